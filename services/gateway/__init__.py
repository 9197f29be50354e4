"""The gateway: a gRPC server, and what all front ends share, over a `services.backend.Backend`."""
