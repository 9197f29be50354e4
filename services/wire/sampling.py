"""Sampling settings and enums of the API by the names that people use. Imports no model code: clients load it in no
time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.pb import generation_pb2 as pb
from smc.api.sampling_params import SETTINGS
from smc.api.settings import Biases, Items, OneOf

FINISH_REASONS = {
    "eos": pb.FINISH_REASON_EOS,
    "stop_token": pb.FINISH_REASON_STOP_TOKEN,
    "stop_string": pb.FINISH_REASON_STOP_STRING,
    "length": pb.FINISH_REASON_LENGTH,
    "time_budget": pb.FINISH_REASON_TIME_BUDGET,
    "queue_time": pb.FINISH_REASON_QUEUE_TIME,
}
"""Of an answer; what fails or is cancelled has a status code instead."""

REPORTS = tuple(name for name, known in SETTINGS.items() if known.report)
"""Settings of what is reported: they stand beside the sampling settings."""
SAMPLING = tuple(name for name in SETTINGS if name not in REPORTS)
_FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name
_ENUMS = {
    name: {
        choice: _FIELDS[name].enum_type.values_by_name[f"{name}_{choice}".upper()].number
        for choice in known.check.names
    }
    for name, known in SETTINGS.items()
    if isinstance(known.check, OneOf)
}
_KINDS = {
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_INT32: "a 32-bit integer",
    FieldDescriptor.TYPE_INT64: "a 64-bit integer",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "valid Unicode text",
}


def sampling_message(settings: Mapping[str, Any]) -> pb.SamplingParams:
    """A message of the settings that are given; those that are None are left to the server's defaults.

    Raises TypeError for a name that is no setting, ValueError for what the message cannot hold; whether a value makes
    sense is for the server to say."""
    message = pb.SamplingParams()
    for name, value in settings.items():
        if name not in SAMPLING:
            raise TypeError(f"{name} is not a sampling setting; allowed: {', '.join(SAMPLING)}")
        if value is not None:
            _set(message, name, value)
    return message


def sampling_settings(message: pb.SamplingParams) -> dict[str, Any]:
    """The settings that a message holds, by name; absent ones are left out. Raises ValueError for an enum number that
    is unknown, and for more items than are allowed."""
    check_counts(message)
    settings: dict[str, Any] = {}
    for name in SAMPLING:
        field = _FIELDS[name]
        value = getattr(message, name)
        if name in _ENUMS:
            if value:
                settings[name] = name_of(_ENUMS[name], value, name)
        elif field.is_repeated:
            if value:
                settings[name] = dict(value) if _is_map(field) else tuple(value)
        elif message.HasField(name):
            settings[name] = value
    return settings


def check_counts(message: Message) -> None:
    """Of fields that have the name of a setting, before anything is made of them: a message may hold millions. Raises
    ValueError."""
    for name in message.DESCRIPTOR.fields_by_name:
        if name in SETTINGS and isinstance(check := SETTINGS[name].check, (Items, Biases)):
            check.check_count(name, len(getattr(message, name)))


def name_of(names: Mapping[str, int], number: int, field: str) -> str:
    """The name of an enum's number. Raises ValueError naming the field, the number and what is allowed."""
    for name, known in names.items():
        if known == number:
            return name
    allowed = ", ".join(f"{known} ({name})" for name, known in names.items())
    raise ValueError(f"{field}={number}; allowed: {allowed}")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _set(message: pb.SamplingParams, name: str, value: Any) -> None:
    names, field = _ENUMS.get(name), _FIELDS[name]
    if names is not None:
        if value not in names:
            raise ValueError(f"{name}={value!r}; allowed: {', '.join(names)}")
        setattr(message, name, names[value])
        return
    kind = "numbers by token id" if _is_map(field) else _KINDS[field.type]
    if field.is_repeated and not _is_map(field):
        kind = f"a list, every item {kind}"
    try:
        if not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, str):
            raise TypeError
        elif _is_map(field):
            getattr(message, name).update(dict(value))
        else:
            getattr(message, name).extend(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # protobuf's own words name neither the field nor what it holds
        raise ValueError(f"{name}={value!r}; allowed: {kind}") from error
