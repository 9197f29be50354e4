"""The types of a round, defined once: its plan, and the tensors that models keep and stages exchange. Torch forms
(`smc.executor`), kernels and their launchers (`smc.kernels`), the runner of graphs and the link take and return them.

Most are NamedTuples of tensors: a kernel takes one as it is, and finds a pointer under the name of each field. Knows
nothing about what stages compute.

Local axes: P chains (batch indices of groups whose rows are chains), U unconditional rows, Y rows of chains, Z
entries of the bias tables. X = A * F. Tails have B = K - 1 pages."""
