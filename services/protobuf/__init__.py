"""Converts between the protobuf messages that processes exchange and the library's types. Knows nothing about servers
or channels."""

RETRY_TRAILER = "grpc-retry-pushback-ms"
"""gRPC's own trailer: clients with a retry policy wait this long before they try again."""
