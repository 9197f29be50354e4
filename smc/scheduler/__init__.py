"""The engine: one scheduler that owns every decision, and workers that run rows through a model."""
