"""Sequential Monte Carlo speculative decoding as pure functions on tensors: no model, no KV, no request.

Axes: A places of a packed batch (the particles of all groups, one group after another, then padding), G groups (one
request each), N particles, K tokens of a block, F branches, M = N * F candidates, U uniforms. Functions of one step of
a choice work on a grid [G, N], where entries past a group's own size are padding with log-weight -inf;
`selection.select` packs and unpacks."""
