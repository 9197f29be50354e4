"""Bringing the processes up, watching them, starting them again, taking them down."""
