"""The gateway: a gRPC server, and the handling of requests that all front ends share. A `services.backend.Backend`
decodes the requests."""
