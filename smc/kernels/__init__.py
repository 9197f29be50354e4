"""Triton kernels of the fast path on a GPU. Each has an equivalent in plain torch elsewhere in the package, with which
tests compare it."""
