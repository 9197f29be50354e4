"""What measures the product: quality, speed, costs, time to the first token, kernels. The product does not need it."""
