"""A Python client of the service. Needs grpc and protobuf only: no model code is imported.

from services.client import Client, Message

with Client("127.0.0.1:50051") as client:
    completion = client.generate([Message("user", "How many legs have three cats?")], particles=8, seed=1)
    print(completion.text, completion.finish_reason)

    with client.stream("Once upon a time", max_tokens=100) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.completion.usage)
"""

from services.client.client import (
    Chunk,
    Client,
    Completion,
    CompletionStream,
    Message,
    ModelDescription,
    ModelInfo,
    Prompt,
    ServerInfo,
    ServiceError,
    Usage,
)
from smc.api.request import Particle, PromptToken, Statistics, Times

__all__ = [
    "Chunk",
    "Client",
    "Completion",
    "CompletionStream",
    "Message",
    "ModelDescription",
    "ModelInfo",
    "Particle",
    "Prompt",
    "PromptToken",
    "ServerInfo",
    "ServiceError",
    "Statistics",
    "Times",
    "Usage",
]
