import torch

# One thread per process: the suite runs one process per core, and the models are too small to gain from more.
torch.set_num_threads(1)
