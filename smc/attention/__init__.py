"""Attention over paged keys and values: one small interface, one backend per way of computing it."""
