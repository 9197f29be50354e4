"""Preparations of an engine before it accepts requests: it measures latencies, compiles kernels, and captures CUDA
graphs of the usual sizes."""
