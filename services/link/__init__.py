"""How coordinator, draft and target talk: one interface, over torch.distributed or over gRPC."""
