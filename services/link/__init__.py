"""Links between coordinator, draft and target: one interface, over torch.distributed or over gRPC."""
