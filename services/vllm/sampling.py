"""Requests of vLLM's engine protocol in our terms. What this service does not have is refused by name, unless it asks
for nothing.

The protocol has few optional fields: a number that is 0 was left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as pb

from services.openai.requests import derived_seed
from services.wire.sampling import check_counts
from smc.api.limits import MAX_TOP_LOGPROBS
from smc.api.sampling_params import SETTINGS, Method, SamplingParams

MAX_ANSWERS = 128
"""n of one call."""
ABSENT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "frequency_penalty": (lambda value: value == 0, "0: there are no penalties here"),
    "presence_penalty": (lambda value: value == 0, "0: there are no penalties here"),
    "repetition_penalty": (lambda value: value in (0, 1), "1: there are no penalties here"),
}
"""Settings that this service does not have: whether a value asks for nothing, and what is allowed."""
UNSET = {
    pb.SamplingParams: ("prompt_logprobs", "truncate_prompt_tokens"),
    pb.GenerateRequest: ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"),
}
"""Fields of what this service does not have, by message."""


def check_request(message: pb.GenerateRequest) -> None:
    """Raises ValueError naming what of a request this service does not have."""
    _check_unset(message)
    if message.extra_mm_inputs:
        raise ValueError("extra_mm_inputs is given; this service has text only: leave it out")
    if message.data_parallel_rank:
        raise ValueError(f"data_parallel_rank={message.data_parallel_rank}; allowed: 0, there is one")


def to_params(message: pb.SamplingParams, method: str, room: int) -> list[SamplingParams]:
    """Settings of every answer that is asked for. `method` where the temperature is above 0; `room`: tokens that the
    context leaves.

    Raises ValueError naming the field, the value and what is allowed.
    """
    _check_absent(message)
    _check_unset(message)
    # Before anything is made of them: a message may hold millions.
    check_counts(message)
    count = message.n or 1
    if count > MAX_ANSWERS:
        raise ValueError(f"n={count}; allowed: 1..{MAX_ANSWERS}")
    settings = {"max_tokens": room, **_settings(message)}
    settings["method"] = Method.EXACT if settings.get("temperature") == 0 and method == Method.SMC else method
    first = settings.pop("seed", None)
    seeds = [first if index == 0 or first is None else derived_seed(f"{first}:{index}") for index in range(count)]
    return [SamplingParams(**settings, seed=seed) for seed in seeds]


def _settings(message: pb.SamplingParams) -> dict[str, Any]:
    """Those that the protocol and the library have under the same name, and that are given."""
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        known = message.DESCRIPTOR.fields_by_name.get(name)
        if known is None or not (message.HasField(name) if known.has_presence else getattr(message, name)):
            continue
        value = getattr(message, name)
        if known.type == FieldDescriptor.TYPE_FLOAT:
            value = round(value, 7)  # 32 bits: 0.7 arrives as 0.699999988
        settings[name] = value if not known.is_repeated else dict(value) if known.message_type else tuple(value)
    if "logprobs" in settings:
        settings |= _logprobs(settings["logprobs"])
    return settings


def _logprobs(count: int) -> dict[str, Any]:
    """Of the drawn token itself, and of so many of the likeliest."""
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"logprobs={count}; allowed: 0..{MAX_TOP_LOGPROBS}")
    return {"logprobs": True, "top_logprobs": count}


def _check_absent(message: pb.SamplingParams) -> None:
    for name, (asks_nothing, allowed) in ABSENT.items():
        value = getattr(message, name)
        if not asks_nothing(value):
            raise ValueError(f"{name}={value}; allowed: {allowed}")
    constraint = message.WhichOneof("constraint")
    if constraint and getattr(message, constraint) is not False:
        raise ValueError(f"{constraint} is given; this service has no guided decoding: leave it out")


def _check_unset(message: pb.SamplingParams | pb.GenerateRequest) -> None:
    for name in UNSET[type(message)]:
        if message.HasField(name):
            raise ValueError(f"{name} is given; this service does not have it: leave it out")
