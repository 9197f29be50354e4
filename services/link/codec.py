"""Encodes the dataclasses that our own processes exchange, as the types of their fields say. No message restates its
fields anywhere else.

A message is encoded as the values of its fields, in their order, in MessagePack. An array brings its type and shape
along. Every encoded message begins with a hash of its types, so a process of another build is refused instead of
misread. Decoding builds nothing but the declared types, and checks every value against them; it runs no code of the
sender.

Fields with `init=False` are not sent: the receiver computes them. Within one object, arrays whose names begin with the
same axis (`slot_A`, `pages_AQ`) have the same length, except arrays without elements."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from services.link.base import SAME_VERSION, LinkError

Message = TypeVar("Message")

ARRAY_TYPES = tuple(map(np.dtype, ("|b1", "|u1", "<i2", "<i4", "<i8", "<f4", "<f8")))
"""Types of arrays, by their number in messages."""
HASH_BYTES = 8
_ARRAY_NUMBERS = {kind: number for number, kind in enumerate(ARRAY_TYPES)}


class Codec(Generic[Message]):
    """Encodes messages of one type. `kind` is a dataclass, or a union of dataclasses."""

    def __init__(self, kind: Any) -> None:
        form = _form(kind)
        self._write, self._read = form.write, form.read
        self.hash = hashlib.sha256(form.text.encode()).digest()[:HASH_BYTES]

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message. Raises TypeError for a value that no message can hold; `decode` checks whether
        numbers and texts are of their types."""
        return self.hash + msgpack.packb(self._write(message), default=_plain)

    def decode(self, data: bytes) -> Message:
        """Return the message that `data` holds. Raises LinkError if the sender's types differ from ours, or if a value
        is not of its type."""
        if data[:HASH_BYTES] != self.hash:
            raise LinkError(
                f"a message with types {data[:HASH_BYTES].hex()} came, this side has {self.hash.hex()}; {SAME_VERSION}"
            )
        try:
            return self._read(msgpack.unpackb(data[HASH_BYTES:], strict_map_key=False))
        except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
            raise LinkError(f"a message could not be read: {error}") from error


class _Form(NamedTuple):
    """How values of one type are encoded."""

    text: str
    """The type, down to the names and types of all fields. Equal texts mean equal encodings."""
    write: Callable[[Any], Any]
    """Converts a value to what MessagePack holds."""
    read: Callable[[Any], Any]
    """Converts back. Raises TypeError or ValueError."""


def _same(value: Any) -> Any:
    return value


def _list(value: Any) -> list[Any]:
    """Return a value that must be a list: everything that has parts is sent as one."""
    if type(value) is not list:
        raise TypeError(f"{value!r:.80} came, not a list")
    return value


def _plain(value: Any) -> Any:
    """Return a NumPy number as the number that MessagePack knows."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} is in no declared type")


@cache
def _form(kind: Any) -> _Form:
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return _union(get_args(kind))
    if _is_scalar(origin):
        return _scalar(origin)
    if origin is np.ndarray:
        return _Form("array", _write_array, _read_array)
    if origin in (list, tuple, frozenset):
        return _sequence(origin, get_args(kind))
    if origin is Sequence:
        return _sequence(tuple, (*get_args(kind), ...))
    if origin in (dict, Mapping):
        return _mapping(*get_args(kind))
    if isinstance(origin, type) and issubclass(origin, Enum):
        names = ",".join(f"{one.name}={one.value!r}" for one in origin)
        return _Form(f"{origin.__name__}({names})", lambda value: origin(value).value, origin)
    if isinstance(origin, type) and issubclass(origin, tuple):
        return _record(origin, {name: _resolved(hint) for name, hint in get_type_hints(origin).items()})
    if is_dataclass(origin):
        return _record(cast(type, origin), _field_types(cast(type, origin)))
    raise TypeError(f"messages cannot hold {kind}")


def _accepted(kind: type) -> set[type]:
    """Types of values that a field of this scalar type may hold."""
    return {float, int} if kind is float else {kind}


def _scalar(kind: type) -> _Form:
    accepted = _accepted(kind)

    def read(value: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"{value!r:.80} came, not a {kind.__name__}")
        return value

    return _Form(kind.__name__, _same, read)


def _write_array(array: np.ndarray) -> list[Any]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{array!r:.80} is not an array")
    number = _ARRAY_NUMBERS.get(array.dtype)
    if number is None:
        raise TypeError(f"messages cannot hold arrays of {array.dtype}")
    return [number, array.tobytes()] if array.ndim == 1 else [number, array.tobytes(), *array.shape]


def _read_array(value: Any) -> np.ndarray:
    number, data, *shape = _list(value)
    if type(data) is not bytes or not all(type(size) is int and size >= 0 for size in (number, *shape)):
        raise TypeError(f"{value!r:.80} came, not an array")
    array = np.frombuffer(bytearray(data), ARRAY_TYPES[number])  # writable, as torch wants it
    return array.reshape(shape) if shape else array


def _sequence(origin: type, arguments: tuple[Any, ...]) -> _Form:
    if origin is tuple and arguments[-1] is not Ellipsis:
        forms = [_form(argument) for argument in arguments]

        def read_all(values: Any) -> tuple[Any, ...]:
            return tuple(form.read(value) for form, value in zip(forms, _list(values), strict=True))

        text = f"tuple[{','.join(form.text for form in forms)}]"
        if all(form.write is _same for form in forms):
            return _Form(text, _same, read_all)
        return _Form(text, lambda values: [form.write(value) for form, value in zip(forms, values)], read_all)
    item = _form(arguments[0])
    text = f"{origin.__name__}[{item.text}]"
    in_order = sorted if origin is frozenset else _same
    write = in_order if item.write is _same else lambda values: [item.write(value) for value in in_order(values)]
    if not _is_scalar(arguments[0]):
        return _Form(text, write, lambda values: origin(map(item.read, _list(values))))
    accepted = _accepted(arguments[0])

    def read_scalars(values: Any) -> Any:  # of a prompt there may be a hundred thousand
        if not accepted.issuperset(map(type, _list(values))):
            raise TypeError(f"{values!r:.80} came, not a {text}")
        return origin(values)

    return _Form(text, write, read_scalars)


def _mapping(key_kind: Any, value_kind: Any) -> _Form:
    key, value = _form(key_kind), _form(value_kind)

    def read(held: Any) -> dict[Any, Any]:
        if type(held) is not dict:
            raise TypeError(f"{held!r:.80} came, not a mapping")
        return {key.read(name): value.read(item) for name, item in held.items()}

    def write(held: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key.write(name): value.write(item) for name, item in held.items()}

    return _Form(f"dict[{key.text},{value.text}]", write, read)


def _union(kinds: tuple[Any, ...]) -> _Form:
    """A value of one of several types. Records are sent with the number of their type; None and scalars tell theirs."""
    records = [kind for kind in kinds if not _is_scalar(kind)]
    scalars = tuple(kind for kind in kinds if _is_scalar(kind))
    accepted = tuple(set().union(*map(_accepted, scalars)))
    forms = [_form(kind) for kind in records]
    numbers = {get_origin(kind) or kind: number for number, kind in enumerate(records)}
    text = "|".join([*(kind.__name__ for kind in scalars), *(form.text for form in forms)])
    if len(records) == 1 and scalars == (NoneType,):
        (form,) = forms
        return _Form(
            text,
            lambda value: None if value is None else form.write(value),
            lambda value: None if value is None else form.read(value),
        )

    def write(value: Any) -> Any:
        number = numbers.get(type(value))
        if number is not None:
            return [number, forms[number].write(value)]
        if not isinstance(value, (*accepted, np.generic)):
            raise TypeError(f"{value!r:.80} of type {type(value).__name__} is not one of {text:.200}")
        return value

    def read(value: Any) -> Any:
        if isinstance(value, list):
            number, content = value
            if type(number) is not int or number < 0:
                raise TypeError(f"{number!r:.80} came, not the number of a type")
            return forms[number].read(content)
        if type(value) not in accepted:
            raise TypeError(f"{value!r:.80} came, not one of {text:.200}")
        return value

    return _Form(text, write, read)


def _is_scalar(kind: Any) -> bool:
    return kind in (bool, int, float, str, bytes, NoneType)


def _field_types(kind: type) -> dict[str, Any]:
    """Return the types of the fields that are sent."""
    hints = get_type_hints(kind)
    return {field.name: _resolved(hints[field.name]) for field in fields(cast(Any, kind)) if field.init}


def _resolved(hint: Any) -> Any:
    """Replace type variables: in messages they stand for NumPy arrays."""
    if isinstance(hint, TypeVar):
        return np.ndarray
    if arguments := get_args(hint):
        resolved = tuple(map(_resolved, arguments))
        if get_origin(hint) is UnionType:
            return Union[resolved]  # noqa: UP007 - built from values
        return (get_origin(hint) or hint)[resolved] if resolved != arguments else hint
    return hint


def _record(kind: type, types: dict[str, Any]) -> _Form:
    names, forms = tuple(types), [_form(one) for one in types.values()]
    axes = {name: name.rpartition("_")[2] for name, one in types.items() if one in (np.ndarray, np.ndarray | None)}
    pairs = [(name, None if form.write is _same else form.write) for name, form in zip(names, forms)]

    def write(value: Any) -> list[Any]:
        if type(value) is not kind:
            raise TypeError(f"{value!r:.80} of type {type(value).__name__} came, not a {kind.__name__}")
        return [getattr(value, name) if write is None else write(getattr(value, name)) for name, write in pairs]

    def read(values: Any) -> Any:
        found = {name: form.read(value) for name, form, value in zip(names, forms, _list(values), strict=True)}
        if axes:
            _check_axes(kind, axes, found)
        return kind(**found)

    text = ",".join(f"{name}:{form.text}" for name, form in zip(names, forms))
    return _Form(f"{kind.__name__}({text})", write, read)


def _check_axes(kind: type, axes: dict[str, str], found: dict[str, Any]) -> None:
    """Check the number of axes, and that first axes with the same letter have the same size. Raises ValueError."""
    sizes: dict[str, int] = {}
    for name, letters in axes.items():
        array = found[name]
        if array is None or not array.size:
            continue
        size, known = len(array), sizes.setdefault(letters[0], len(array))
        if len(letters) != array.ndim or size != known:
            raise ValueError(f"{kind.__name__}.{name} has shape {array.shape}; axis {letters[0]} has size {known}")
