"""Answers a file of requests with a file of answers in the same order. A run starts its own worker groups and can be
resumed."""
