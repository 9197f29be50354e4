"""What measures the product: quality, speed, costs, time to the first token, kernels and passes. The product does not need it."""
