"""Reads XLA's serialized executables: Riegeli records of protocol buffers, compressed by Snappy.

Riegeli is Google's file format for a sequence of records. A file has blocks of 64 KiB with a header each; the blocks
contain chunks, and a chunk contains records, which are protocol buffers here.

Formats: github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md, github.com/google/snappy (its
format_description.txt) and protobuf.dev/programming-guides/encoding. Hashes are not checked.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Message", "read_records", "uncompress", "varint"]

_BLOCK = 1 << 16
_BLOCK_HEADER = 24
_CHUNK_HEADER = struct.Struct("<QQQQQ")


class _Chunk(NamedTuple):
    """A chunk of a Riegeli file.

    kind: the letter of its type: "r" for records, "s" for the file's signature, "m" for metadata. records: the number
    of its records. data: its bytes after the header.
    """

    kind: str
    records: int
    data: bytes


class _Number(NamedTuple):
    """A decoded number. end: the offset of the first byte after it."""

    value: int
    end: int


def varint(data: bytes, at: int) -> _Number:
    """The protocol buffer varint at byte offset `at`. Raises ValueError if the bytes end inside the number."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return _Number(value=value, end=at)
        shift += 7
    raise ValueError("the bytes end inside a number")


class Message:
    """A decoded protocol buffer message, without a schema: its methods take a field's number.

    An absent field is 0, empty bytes, an empty text, an empty message or an empty list. Integers are unsigned. If a
    field occurs several times, methods for one value return the last. The constructor raises ValueError if the bytes
    are no protocol buffer; a method raises it if the field has another type.
    """

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[Any]] = {}
        for number, value in _fields(data):
            self._fields.setdefault(number, []).append(value)

    def with_fields(self, fields: dict[int, bytes]) -> "Message":
        """Changes the message: sets these fields, by number, to these bytes. Returns the same object."""
        self._fields |= {number: [data] for number, data in fields.items()}
        return self

    def numbers(self) -> list[int]:
        """The numbers of the fields that are present."""
        return list(self._fields)

    def integer(self, number: int, default: int = 0) -> int:
        """The value of an integer field, unsigned; `default` if it is absent."""
        found = self._fields.get(number, [default])[-1]
        if not isinstance(found, int):
            raise ValueError(f"field {number}: got bytes, want a number")
        return found

    def data(self, number: int) -> bytes:
        """The bytes of a field: a text, a message, or packed numbers."""
        found = self._fields.get(number, [b""])[-1]
        if not isinstance(found, bytes):
            raise ValueError(f"field {number}: got a number, want bytes")
        return found

    def text(self, number: int) -> str:
        return self.data(number).decode()

    def message(self, number: int) -> "Message":
        return Message(self.data(number))

    def has(self, number: int) -> bool:
        return number in self._fields

    def messages(self, number: int) -> list["Message"]:
        """The messages of a repeated field, in order."""
        return [Message(data) for data in self._fields.get(number, [])]

    def integers(self, number: int) -> list[int]:
        """The values of a repeated integer field, in order, whether the field is packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                read = varint(value, at)
                found.append(read.value)
                at = read.end
        return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, int or bytes) for each field of a protocol buffer. Raises ValueError for other data."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value: int | bytes
            value, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value = int.from_bytes(data[at : at + size], "little")
            at += size
        elif kind == 2:
            size, at = varint(data, at)
            value = data[at : at + size]
            at += size
        else:
            raise ValueError(f"got wire type {kind}, want a protocol buffer")
        if at > len(data) or not key >> 3:
            raise ValueError("the bytes are no protocol buffer")
        yield key >> 3, value


def uncompress(data: bytes) -> bytes:
    """Decompresses bytes that Snappy compressed. Raises ValueError if `data` is not in Snappy's format."""
    size, at = varint(data, 0)
    out = bytearray()
    end = len(data)
    while at < end:
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[at : at + extra], "little")
                at += extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            length = (tag >> 2 & 7) + 4
            offset = (tag >> 5) << 8 | data[at]
            at += 1
        else:
            length = (tag >> 2) + 1
            extra = 2 if kind == 2 else 4
            offset = int.from_bytes(data[at : at + extra], "little")
            at += extra
        start = len(out) - offset
        if not 0 <= start < len(out):
            raise ValueError("the bytes are not in Snappy's format")
        if offset >= length:
            out += out[start : start + length]
        else:
            piece = bytes(out[start:])
            out += (piece * (length // offset + 1))[:length]
    if len(out) != size:
        raise ValueError(f"got {len(out)} bytes from Snappy, want {size}")
    return bytes(out)


def _without_block_headers(data: bytes) -> bytes:
    return b"".join(data[at + _BLOCK_HEADER : at + _BLOCK] for at in range(0, len(data), _BLOCK))


def _chunks(data: bytes) -> Iterator[_Chunk]:
    """Yields the chunks of a Riegeli file. Raises ValueError if the file ends inside a chunk."""
    data = _without_block_headers(data)
    at = 0
    while at + _CHUNK_HEADER.size <= len(data):
        _, size, _, kind, _ = _CHUNK_HEADER.unpack_from(data, at)
        at += _CHUNK_HEADER.size
        if at + size > len(data):
            raise ValueError("the bytes end inside a chunk of records")
        yield _Chunk(kind=chr(kind & 255), records=kind >> 8, data=data[at : at + size])
        at += max(size, kind >> 8)  # a chunk occupies at least one byte per record


def _decoded(kind: str, data: bytes) -> bytes:
    """Decompresses a part of a chunk. kind: "\\0" for uncompressed bytes, "s" for Snappy.

    Raises ValueError for other kinds.
    """
    if kind == "\0":
        return data
    if kind != "s":
        raise ValueError(f"got records with compression {kind!r}, want none or Snappy")
    return uncompress(data[varint(data, 0).end :])


def read_records(data: bytes) -> list[bytes]:
    """The records of a Riegeli file, in order.

    Raises ValueError if `data` is no Riegeli file, or if its chunks or their compression are not supported.
    """
    records: list[bytes] = []
    for chunk in _chunks(data):
        if chunk.kind in "sm":  # signature, metadata
            continue
        if chunk.kind != "r":
            raise ValueError(f"got a chunk of type {chunk.kind!r}, want simple records")
        kind = chr(chunk.data[0])
        size, at = varint(chunk.data, 1)
        sizes, values = _decoded(kind, chunk.data[at : at + size]), _decoded(kind, chunk.data[at + size :])
        at = start = 0
        for _ in range(chunk.records):
            length, at = varint(sizes, at)
            records.append(values[start : start + length])
            start += length
    return records
