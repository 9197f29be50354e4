"""What is known about a constraint before it is compiled: what nothing satisfies, and what has to be rewritten."""
