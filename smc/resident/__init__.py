"""Rounds whose state stays beside the models: every shape is known beforehand, so a whole round can be queued on a device.

The host says which groups take part and what no model has to be asked for (`RoundPlan`); tokens, weights, the choice among candidates
and block tables stay where the models are, and the host learns of them afterwards (`RoundResult`). It may therefore be a round behind.

What makes this possible: all open particles of a group are equally long, as each grows by a whole block a round, so every position is
known to the host; and every page is assigned when a request starts, so nothing is allocated while it runs.

Axes: S slots, G groups, M places of a group's particles (padded), A = G * M places in all, F branches, K tokens drafted, Q tokens of
the block that the target runs (K, or K + 1 with the seed), R rows, T tokens, L positions, B = K - 1 pages of a branch.
"""
