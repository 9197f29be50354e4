"""What crosses process borders as protobuf, and how it becomes the library's types and back. Knows nothing about
servers or channels."""

RETRY_TRAILER = "grpc-retry-pushback-ms"
"""gRPC's own trailer: clients with a retry policy wait this long before they try again."""
