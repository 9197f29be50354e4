"""What an engine does before it serves: costs are timed, kernels are compiled, CUDA graphs of the usual sizes are
captured."""
