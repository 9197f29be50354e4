"""Presentation of measurements: progress of runs, tables, pictures. Knows nothing about how a command is called."""
