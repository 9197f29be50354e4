"""The one brain: an engine run by a thread, who it talks to, and the process it lives in."""
