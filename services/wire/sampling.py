"""Sampling settings and enums of the API by the names that people use. Imports no model code: clients load it in no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from services.pb import generation_pb2 as pb

METHODS = {"smc": pb.METHOD_SMC, "exact": pb.METHOD_EXACT, "target": pb.METHOD_TARGET, "draft": pb.METHOD_DRAFT}
POPULATIONS = {"distinct": pb.POPULATION_DISTINCT, "independent": pb.POPULATION_INDEPENDENT}
SCHEMES = {
    "systematic": pb.RESAMPLING_SYSTEMATIC,
    "stratified": pb.RESAMPLING_STRATIFIED,
    "residual": pb.RESAMPLING_RESIDUAL,
    "multinomial": pb.RESAMPLING_MULTINOMIAL,
    "ssp": pb.RESAMPLING_SSP,
}
FINISH_REASONS = {
    "eos": pb.FINISH_REASON_EOS,
    "stop_token": pb.FINISH_REASON_STOP_TOKEN,
    "stop_string": pb.FINISH_REASON_STOP_STRING,
    "length": pb.FINISH_REASON_LENGTH,
    "time_budget": pb.FINISH_REASON_TIME_BUDGET,
    "queue_time": pb.FINISH_REASON_QUEUE_TIME,
}
"""Of an answer; what fails or is cancelled has a status code instead."""

_ENUMS = {"method": METHODS, "population": POPULATIONS, "resampling": SCHEMES}
_FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name
_KINDS = {
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_INT32: "a 32-bit integer",
    FieldDescriptor.TYPE_INT64: "a 64-bit integer",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "valid Unicode text",
}


def sampling_message(settings: Mapping[str, Any]) -> pb.SamplingParams:
    """A message of the settings that are given; those that are None are left to the server's defaults.

    Raises TypeError for a name that is no setting, ValueError for what the message cannot hold; whether a value makes sense
    is for the server to say.
    """
    message = pb.SamplingParams()
    for name, value in settings.items():
        if name not in _FIELDS:
            raise TypeError(f"{name} is not a sampling setting; allowed: {', '.join(_FIELDS)}")
        if value is not None:
            _set(message, name, value)
    return message


def sampling_settings(message: pb.SamplingParams) -> dict[str, Any]:
    """The settings that a message holds, by name; absent ones are left out. Raises ValueError for an enum number that is unknown."""
    settings = {}
    for name, field in _FIELDS.items():
        value = getattr(message, name)
        if name in _ENUMS:
            if value:
                settings[name] = name_of(_ENUMS[name], value, name)
        elif field.is_repeated:
            if value:
                settings[name] = tuple(value)
        elif message.HasField(name):
            settings[name] = value
    return settings


def name_of(names: Mapping[str, int], number: int, field: str) -> str:
    """The name of an enum's number. Raises ValueError naming the field, the number and what is allowed."""
    for name, known in names.items():
        if known == number:
            return name
    allowed = ", ".join(f"{known} ({name})" for name, known in names.items())
    raise ValueError(f"{field}={number}; allowed: {allowed}")


def _set(message: pb.SamplingParams, name: str, value: Any) -> None:
    names, field = _ENUMS.get(name), _FIELDS[name]
    if names is not None:
        if value not in names:
            raise ValueError(f"{name}={value!r}; allowed: {', '.join(names)}")
        setattr(message, name, names[value])
        return
    kind = _KINDS[field.type]
    if field.is_repeated:
        kind = f"a list, every item {kind}"
    try:
        if not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, str):
            raise TypeError
        else:
            getattr(message, name).extend(value)
    except (TypeError, ValueError, OverflowError) as error:  # protobuf's own words name neither the field nor what it holds
        raise ValueError(f"{name}={value!r}; allowed: {kind}") from error
