"""Measurements of the product: quality, speed, costs, time to the first token, kernels. The product runs without it."""
