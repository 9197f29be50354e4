"""The process of one rank of one model: it executes what the link brings."""
