"""vLLM's engine protocol, so that routers made for it work in front of this service."""
