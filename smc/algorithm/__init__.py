"""Sequential Monte Carlo speculative decoding as pure functions on tensors: no model, no KV, no request.

Axes: G groups (one request each), N particles, K tokens of a block, F branches, M = N * F candidates, U uniforms.
Groups of different sizes share a tensor: entries past a group's own size are padding, with log-weight -inf.
"""
