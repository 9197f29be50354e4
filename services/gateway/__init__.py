"""Where callers come in: a gRPC server over whoever decodes (`services.backend.Backend`)."""
