"""What runs beside the models: prompts, and rounds whose state stays there. Schedulers use it; it knows nothing of
requests or queues.

The host says which groups take part in a round, and which pages what is run is to be stored in (`RoundPlan`); tokens,
lengths, weights, the choice among candidates and block tables stay where the models are, and the host learns of them
afterwards (`RoundResult`, `Lineage`). It may therefore be a round behind. Shapes follow from the batch size alone,
which is padded to few, so that a whole round can be queued on a device, or recorded there.

Axes: S slots, A batch indices (its particles, then padding), G groups, N particles of a group, F rows for each
batch index, K tokens drafted, X = A * F rows of all, Q tokens of a block (K, or K + 1 with the seed), P pending tokens,
R rows, T tokens, L positions, B = K - 1 pages of a row, W pages of a path."""
