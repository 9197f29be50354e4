"""The types of a round, defined once: its plan and the tensors that its stages exchange. Torch forms
(`smc.executor`), kernels and their launchers (`smc.kernels`), the runner of graphs and the link take and return them.

Most are NamedTuples of tensors: a kernel takes one as it is, and finds a pointer under the name of each field. Knows
nothing about what stages compute.

Axes: S slots, A batch indices (the particles of all groups, then padding), G groups, N particles of a group, F rows for
each batch index, K tokens drafted, X = A * F rows in total, Q tokens of a block (K, or K + 1 with the seed), P pending
tokens, R rows, T tokens, L positions, B = K - 1 pages of a row, W pages of a path."""
