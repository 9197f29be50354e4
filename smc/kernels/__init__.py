"""Triton kernels of the fast path on a GPU; each has a plain torch twin elsewhere in the package that it is tested
against."""
