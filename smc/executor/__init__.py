"""Execution on the models' devices: runs prompts and rounds. Schedulers use it. Knows nothing about requests or queues.

For each round the host names the groups that take part and the pages in which keys and values are stored (`RoundPlan`).
Tokens, lengths, weights, the choice among candidates and block tables stay on the devices. The host reads the results
afterwards (`RoundResult`, `Lineage`), so it may be one round behind. Shapes depend on the plan alone, and batch sizes
are padded to a few values, so that a whole round can be queued on a device or recorded there.

See `smc.round` for the axes of tensors."""
