"""Attention over paged keys and values: one small interface, and one backend for each way of computing it."""
