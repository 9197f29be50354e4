"""The coordinator: the engine and its thread, its connections to gateway and workers, and its process."""
