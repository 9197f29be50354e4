"""The engine's interface to callers: sampling parameters, requests, outputs, and the limits that all parts share.
Imports no torch."""
