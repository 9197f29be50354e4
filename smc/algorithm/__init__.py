"""Mathematics of speculative decoding (Sequential Monte Carlo and exact) as pure functions on tensors. Knows nothing
about models, KV or requests.

Most functions of `resampling` work on a grid [G, N], where entries past a group's size are padding with log-weight
-inf; `selection.select` packs and unpacks.

Local axes: U uniforms, Y = N * F candidates of a group, Z non-empty groups."""
