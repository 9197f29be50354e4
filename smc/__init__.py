"""smcserve: Sequential Monte Carlo speculative decoding as a library."""
