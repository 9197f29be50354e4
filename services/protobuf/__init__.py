"""Converts between the public API's protobuf messages and the library's types. Knows nothing about servers
or channels."""

RETRY_TRAILER = "grpc-retry-pushback-ms"
"""gRPC's own trailer: clients with a retry policy wait this long before they try again."""
