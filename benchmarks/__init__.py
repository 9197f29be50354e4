"""Measurements of the product: quality, speed, latency, time to the first token, kernels. The product runs without
it."""
