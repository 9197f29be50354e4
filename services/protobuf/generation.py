"""Converts sampling settings, requests and answers between messages of the public API and the library's types. Imports
no model code, so that clients start quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.pb import generation_pb2 as pb
from smc.api.constraint import check_constraint
from smc.api.request import Alternatives, Answer, FinishReason, Particle, PromptToken
from smc.api.sampling_params import DEFAULT_METHOD, SETTINGS, SamplingParams, with_defaults
from smc.api.settings import Biases, Items, OneOf

Data = TypeVar("Data")

FINISH_REASONS = {
    reason.value: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    for reason in FinishReason
    if reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
}
"""Finish reasons of answers. A request that fails or is cancelled ends with a status code instead."""

REPORTS = tuple(name for name, known in SETTINGS.items() if known.report)
"""Settings that ask for reports: messages have them beside the sampling settings."""
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
    """Return a message with the given settings; for settings that are None the server's defaults apply.

    Raises TypeError for a name that is not a setting, ValueError for a value that the message cannot hold. Other checks
    of values are left to the server."""
    message = pb.SamplingParams()
    for name, value in settings.items():
        if name not in SAMPLING:
            raise TypeError(f"{name} is not a sampling setting; allowed: {', '.join(SAMPLING)}")
        if value is not None:
            _set(message, name, value)
    return message


def sampling_settings(message: pb.SamplingParams) -> dict[str, Any]:
    """Return the settings that a message holds, by name; absent ones are left out. Raises ValueError for an unknown
    number of an enum, and for more items than are allowed."""
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
            settings[name] = constraint_of(value) if name == "constraint" else value
    return settings


def constraint_of(message: pb.Constraint) -> dict[str, Any]:
    """Return a constraint in the form that `smc.api.constraint.Constraint.of` reads."""
    kind = message.WhichOneof("kind")
    given: dict[str, Any] = {"after": message.after} if message.HasField("after") else {}
    if kind is None:
        return given
    return given | {kind: list(message.choice.texts) if kind == "choice" else getattr(message, kind)}


def constraint_message(value: Any) -> pb.Constraint:
    """Return the message of a constraint. Raises ValueError if the constraint is not valid."""
    constraint = check_constraint("constraint", value)
    given: dict[str, Any] = {constraint.kind: constraint.text}
    if constraint.kind == "choice":
        given = {"choice": pb.Choice(texts=constraint.choices)}
    elif constraint.kind == "json_object":
        given = {"json_object": True}
    return pb.Constraint(**given, after=constraint.after)


def check_counts(message: Message) -> None:
    """Check the lengths of fields that are named like a setting, before their items are converted: a message may hold
    millions. Raises ValueError."""
    for name in message.DESCRIPTOR.fields_by_name:
        if name in SETTINGS and isinstance(check := SETTINGS[name].check, (Items, Biases)):
            check.check_count(name, len(getattr(message, name)))


def name_of(names: Mapping[str, int], number: int, field: str) -> str:
    """Return the name of an enum's number. Raises ValueError naming the field, the number and what is allowed."""
    for name, known in names.items():
        if known == number:
            return name
    allowed = ", ".join(f"{known} ({name})" for name, known in names.items())
    raise ValueError(f"{field}={number}; allowed: {allowed}")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _set(message: pb.SamplingParams, name: str, value: Any) -> None:
    names, field = _ENUMS.get(name), _FIELDS[name]
    if name == "constraint":
        message.constraint.CopyFrom(constraint_message(value))
        return
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
    ) as error:  # protobuf's own message names neither the field nor its type
        raise ValueError(f"{name}={value!r}; allowed: {kind}") from error


def data_of(kind: type[Data], message: Any, **known: Any) -> Data:
    """Build the dataclass `kind` from a message's fields with the same names. `known`: fields that have other
    values."""
    names = [field.name for field in fields(cast(Any, kind)) if field.name not in known]
    return kind(**{name: getattr(message, name) for name in names}, **known)


def to_sampling(
    message: pb.GenerateRequest,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    method: str = DEFAULT_METHOD,
    **own: Any,
) -> SamplingParams:
    """Return the library's settings from a message with sampling settings and reports. An absent setting has its value
    in `own`, else in `defaults`, else the library's default. A value of `defaults` that contradicts the message is left
    out. `method`: that of a message that names none (`with_defaults`).

    Raises ValueError naming the field, the value and what is allowed.
    """
    reports = {name: _given(message, name) for name in REPORTS}
    return SamplingParams(**with_defaults({**own, **sampling_settings(message.sampling), **reports}, defaults, method))


def _given(message: Any, name: str) -> Any:
    """Return a field of a message; None if it is optional and absent."""
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return None
    return getattr(message, name)


def to_finish(answer: Answer, *, statistics: bool) -> pb.Finish:
    """Return the message that ends an answer. `statistics`: include them. The API has none for plain decoding."""
    finish = pb.Finish(
        reason=FINISH_REASONS.get(answer.finish_reason.value, pb.FINISH_REASON_UNSPECIFIED),
        usage=pb.Usage(
            prompt_tokens=answer.prompt_tokens, completion_tokens=len(answer.tokens), cached_tokens=answer.cached_tokens
        ),
        seed=answer.seed,
        logprobs=answer.logprobs or (),
        times=pb.Times(**asdict(answer.times)),
        statistics=pb.Statistics(**asdict(answer.statistics)) if statistics else None,
        particles=map(_from_particle, answer.particles or ()),
        top_logprobs=map(_from_alternatives, answer.top_logprobs or ()),
    )
    if isinstance(answer.matched, str):
        finish.matched_string = answer.matched
    elif answer.matched is not None:
        finish.matched_token_id = answer.matched
    if answer.prompt_logprobs is not None:
        finish.prompt_logprobs.CopyFrom(_from_prompt_tokens(answer.prompt_logprobs))
    return finish


def _from_particle(particle: Particle) -> pb.Particle:
    return pb.Particle(
        token_ids=particle.tokens,
        text=particle.text,
        reason=FINISH_REASONS[particle.finish_reason.value],
        weight=particle.weight,
    )


def to_particle(message: pb.Particle) -> Particle:
    reason = FinishReason(name_of(FINISH_REASONS, message.reason, "particle.reason"))
    return Particle(tuple(message.token_ids), message.text, reason, message.weight)


def _from_alternatives(alternatives: Alternatives) -> pb.TopLogprobs:
    tokens, logprobs = zip(*alternatives) if alternatives else ((), ())
    return pb.TopLogprobs(token_ids=tokens, logprobs=logprobs)


def to_alternatives(message: pb.TopLogprobs) -> Alternatives:
    return tuple(zip(message.token_ids, message.logprobs))


def _from_prompt_tokens(tokens: tuple[PromptToken, ...]) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        logprobs=[token.logprob for token in tokens],
        ranks=[token.rank for token in tokens],
        top_logprobs=[_from_alternatives(token.likeliest) for token in tokens],
    )


def to_prompt_tokens(message: pb.PromptLogprobs) -> tuple[PromptToken, ...]:
    likeliest = map(to_alternatives, message.top_logprobs)
    return tuple(map(PromptToken, message.logprobs, message.ranks, likeliest))
