"""What measurements look like: runs shown as they go, tables, pictures. Knows nothing about how a command is called."""
