"""Mathematics of speculative decoding (Sequential Monte Carlo and exact) as pure functions on tensors. Knows nothing
about models, KV or requests.

Axes: A batch indices of a packed batch (the particles of all groups, one group after another, then padding), G groups
(one per request), N particles, K tokens of a block, F branches, M = N * F candidates, U uniforms. Most functions of
`resampling` work on a grid [G, N], where entries past a group's size are padding with log-weight -inf;
`selection.select` packs and unpacks."""
