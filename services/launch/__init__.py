"""Starts the processes, watches them, restarts them and stops them."""
