"""The scheduler of the engine: it makes every decision; workers and the executor of rounds run rows through a model."""
