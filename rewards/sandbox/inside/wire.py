"""Serialization of plain values and framing, between the tests and the code under test.

The bytes are JSON. Whatever the other side sends, reading them only creates None, bool, int, float,
str, list and the types tagged below. Standard library only, because both sides load this file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

HEADER = struct.Struct("<II")  # payload's length in bytes, sequence number
LOAD = 0  # sequence number of a program; calls use other numbers
MAX_BYTES = 4 << 20  # of a frame
READ_BYTES = 1 << 14  # per read; allocating a larger buffer costs more than a typical call
MAX_ITEMS = 10_000  # read from an iterator

_ATOMS = frozenset({type(None), bool, float, str})
_SMALL = 1 << 63  # larger integers are sent as hexadecimal: decimal is quadratic, and limited
_END, _MORE = "end", "more"


class Unsupported(BaseException):
    """A value cannot be sent. Not an ``Exception``, lest a test take it for the program's error."""


class PlainIterator:
    """A received iterator: yields its items, then ends, raises its error or reports the limit."""

    def __init__(self, items: list[Any], ending: Any) -> None:
        self._count = len(items)
        self._items, self._ending = iter(list(items)), str(ending)

    def __repr__(self) -> str:
        return f"<iterator of {self._count} items{' or more' * (self._ending == _MORE)}>"

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for item in self._items:
            return item
        if self._ending == _END:
            raise StopIteration
        if self._ending == _MORE:
            raise Unsupported(f"an iterator of more than {MAX_ITEMS} items")
        raise RuntimeError(f"the iterator raised {self._ending}")


# The C implementations of json's encoder and decoder, created once: in a newly forked process,
# every further function call costs copied pages.
_encode = json.encoder.c_make_encoder(  # type: ignore[attr-defined,misc]
    None, None, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True
)


def dumps(value: Any) -> bytes:
    """Serialize a value. Raises Unsupported if it is not plain, RecursionError if too deep."""
    return "".join(_encode(pack(value), 0)).encode()


def loads(payload: bytes | bytearray) -> Any:
    """Deserialize a payload. Raises ValueError for anything that ``dumps`` cannot produce."""
    try:
        text = payload.decode("ascii")
        value, end = _decode(text, 0)
        if end != len(text):
            raise ValueError("more than one value")
        return value
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a plain value: {error}") from None
    except StopIteration:
        raise ValueError("not a plain value: nothing") from None


def call(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bytes:
    """Serialize a request. Raises the errors of ``dumps``."""
    return dumps([list(arguments), keywords] if keywords else [list(arguments)])


def read(connection: Any, size: int, flags: int = 0) -> bytearray:
    """Read ``size`` bytes from a socket; return no bytes if it closes before."""
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        count = connection.recv_into(missing, 0, flags)
        if not count:
            return bytearray()
        missing = missing[count:]
    return data


def frame(sequence: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), sequence) + payload


def pack(value: Any) -> Any:
    """Convert a value to JSON's types. Instances of subclasses become plain base instances."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"n": hex(value)}
    if kind is list:
        return [v if type(v) in _ATOMS else pack(v) for v in value]
    if kind is tuple:
        return {"t": [v if type(v) in _ATOMS else pack(v) for v in value]}
    if kind is dict:
        return {"d": [pack(v) for item in value.items() for v in item]}
    if kind is set:
        return {"s": [pack(v) for v in value]}
    if kind is frozenset:
        return {"f": [pack(v) for v in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    return _pack_other(value)


def _slice(base: Any) -> Callable[[Any], Any]:
    return lambda value: base.__getitem__(value, slice(None))


_COPY: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    # plain base → a plain copy, made by the base's methods even if a subclass overrides them
    (int, int.__pos__),
    (float, float.__pos__),
    (complex, complex.__pos__),
    (str, _slice(str)),
    (bytes, _slice(bytes)),
    (list, _slice(list)),
    (tuple, _slice(tuple)),
    (dict, lambda value: dict(dict.items(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
)


def _pack_other(value: Any) -> Any:
    kind = type(value)
    for base, copy in _COPY:
        if issubclass(kind, base):
            return pack(copy(value))
    if hasattr(kind, "__next__"):
        return {"i": _take(value)}
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise Unsupported(f"a value of type {name[:80]}")


def _take(iterator: Any) -> list[Any]:
    """Return an iterator's first items and how it ends."""
    items: list[Any] = []
    try:
        for item in iterator:
            if len(items) == MAX_ITEMS:
                return [items, _MORE]
            items.append(pack(item))
    except Exception as error:
        return [items, f"{type(error).__name__}: {error}"[:200]]
    return [items, _END]


def _untag(tagged: dict[str, Any]) -> Any:
    ((tag, body),) = tagged.items()
    read = _READ.get(tag)
    if read is None or type(body) is not (str if tag in ("n", "b") else list):
        raise ValueError(f"tag {tag!r}")
    return read(body)


_READ: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "d": lambda body: dict(zip(body[::2], body[1::2], strict=True)),
    "s": set,
    "f": frozenset,
    "b": bytes.fromhex,
    "n": lambda body: int(body, 16),
    "c": lambda body: complex(*body),
    "i": lambda body: PlainIterator(*body),
}
_decode = json.JSONDecoder(object_hook=_untag).scan_once  # type: ignore[attr-defined]
