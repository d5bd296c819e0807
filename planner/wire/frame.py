"""Frames: what one message looks like on the wire, before anybody knows what it means.

A frame is a fixed little-endian header and a body::

    0   magic           4 bytes, b"GCPF"
    4   wire version    u16
    6   kind            u8, see ``Kind``
    7   flags           u8, bit 0: the body is deflated
    8   stored length   u64, bytes of the body as it stands in the frame
    16  raw length      u64, bytes of the payload once inflated
    24  checksum        u32, crc32 of the 24 bytes before it and the stored body
    28  body

The payload is one msgpack value. Nothing here allocates on the word of a peer: the stored length has
to be the length of the bytes at hand, and the raw length may not exceed what deflate can make of them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import Any

import msgpack

from planner.errors import FrameError, PayloadError, UnencodableError

__all__ = [
    "HEADER_NBYTES",
    "MAGIC",
    "MAX_EXPANSION",
    "WIRE_VERSION",
    "Kind",
    "decode_frame",
    "decode_message",
    "digest",
    "encode_frame",
    "encode_message",
    "kind_of",
    "pack",
    "unpack",
]

WIRE_VERSION = 1
MAGIC = b"GCPF"

_HEADER = struct.Struct("<4sHBBQQI")
HEADER_NBYTES = _HEADER.size
_CHECKSUM = struct.Struct("<I")
_CHECKED_NBYTES = HEADER_NBYTES - _CHECKSUM.size
_VERSION = struct.Struct("<H")
_KIND_AT = len(MAGIC) + _VERSION.size

_DEFLATED = 0x01
_DEFLATE_FROM_NBYTES = 256
# Deflate spends at least two bits on a match of at most 258 bytes: no honest stream expands more.
MAX_EXPANSION = 1032
_DEFLATE_SLACK_NBYTES = 1024


class Kind(IntEnum):
    """What a frame holds; a receiver always knows which kind it waits for."""

    OBJECT = 1
    PLAN_SCHEMA = 2
    PLAN_BODY = 3
    FINAL_PLAN = 4
    WRITE_RESULTS = 5
    METADATA = 6
    FAILURE = 7
    ENVELOPE = 8
    VERDICT = 9
    LOAD_PLAN = 10
    METADATA_STATE = 11
    METADATA_STORAGE = 12


def _kind_name(kind: int) -> str:
    try:
        return f"{kind} ({Kind(kind).name})"
    except ValueError:
        return str(kind)


def encode_frame(kind: int, payload: bytes) -> bytes:
    """Put ``payload`` into a frame of ``kind``, deflated where that saves at least an eighth."""
    body, flags = payload, 0
    if len(payload) >= _DEFLATE_FROM_NBYTES:
        deflated = zlib.compress(payload, 1)
        if len(deflated) * 8 <= len(payload) * 7:
            body, flags = deflated, _DEFLATED
    header = _HEADER.pack(MAGIC, WIRE_VERSION, kind, flags, len(body), len(payload), 0)[:_CHECKED_NBYTES]
    checksum = zlib.crc32(body, zlib.crc32(header))
    return b"".join((header, _CHECKSUM.pack(checksum), body))


def _checked_start(data: bytes | memoryview | bytearray) -> memoryview:
    """Return a view of what starts like a frame of this version and has a whole header."""
    view = memoryview(data).cast("B")
    num_magic = min(len(view), len(MAGIC))
    if view[:num_magic] != MAGIC[:num_magic]:
        raise FrameError("magic", MAGIC, bytes(view[:num_magic]))
    if len(view) >= _KIND_AT:
        (version,) = _VERSION.unpack_from(view, len(MAGIC))
        if version != WIRE_VERSION:
            raise FrameError("version", WIRE_VERSION, version)
    if len(view) < HEADER_NBYTES:
        raise FrameError("length", f"at least {HEADER_NBYTES} bytes", f"{len(view)} bytes")
    return view


def kind_of(data: bytes | memoryview | bytearray) -> int:
    """Return the kind that a frame says it is of; the rest of the frame is not looked at.

    Raises:
        FrameError: if ``data`` does not start like a frame of this version.
    """
    kind: int = _checked_start(data)[_KIND_AT]
    return kind


def decode_frame(data: bytes | memoryview | bytearray, kind: int) -> bytes:
    """Check a whole frame and return its payload.

    Args:
        data: exactly one frame, contiguous.
        kind: the kind that is waited for.

    Raises:
        FrameError: if anything about the frame is off; magic and version are looked at first, so that
            a frame of another release is named as such, then length, checksum, flags and kind.
    """
    view = _checked_start(data)
    _, _, found_kind, flags, stored_nbytes, raw_nbytes, checksum = _HEADER.unpack_from(view)
    body = view[HEADER_NBYTES:]
    if stored_nbytes != len(body):
        raise FrameError(
            "length", f"{HEADER_NBYTES} + {stored_nbytes} bytes", f"{HEADER_NBYTES} + {len(body)} bytes"
        )
    found_checksum = zlib.crc32(body, zlib.crc32(view[:_CHECKED_NBYTES]))
    if found_checksum != checksum:
        raise FrameError("checksum", f"{checksum:#010x}", f"{found_checksum:#010x}")
    if flags & ~_DEFLATED:
        raise FrameError("flags", f"none but {_DEFLATED:#04x}", f"{flags:#04x}")
    if found_kind != kind:
        raise FrameError("kind", _kind_name(kind), _kind_name(found_kind))
    if flags & _DEFLATED:
        return _inflate(body, raw_nbytes)
    if raw_nbytes != stored_nbytes:
        raise FrameError("length", f"{stored_nbytes} raw bytes, as nothing is deflated", raw_nbytes)
    return bytes(body)


def _inflate(body: memoryview, raw_nbytes: int) -> bytes:
    limit = MAX_EXPANSION * len(body) + _DEFLATE_SLACK_NBYTES
    if raw_nbytes > limit:
        raise FrameError("length", f"at most {limit} raw bytes out of {len(body)}", raw_nbytes)
    inflater = zlib.decompressobj()
    try:
        # One byte more than promised, so that a longer stream shows; zero would mean no bound at all.
        payload = inflater.decompress(body, raw_nbytes + 1)
    except (zlib.error, MemoryError) as error:
        raise FrameError("deflated body", "a zlib stream", str(error)) from error
    if len(payload) != raw_nbytes or not inflater.eof:
        raise FrameError("length", f"a stream of {raw_nbytes} raw bytes", f"{len(payload)} before its end")
    if inflater.unused_data or inflater.unconsumed_tail:
        raise FrameError("length", "nothing after the deflated stream", "more bytes")
    return payload


def pack(tree: Any) -> bytes:
    """Write a msgpack value; lone surrogates in strings survive.

    Raises:
        UnencodableError: if ``tree`` holds anything but exact msgpack types, or is past their limits.
    """
    try:
        packed = msgpack.packb(tree, use_bin_type=True, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UnencodableError("message", type(tree).__name__, str(error)) from error
    return bytes(packed)


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a map has a key twice")
    return tree


def unpack(data: bytes | memoryview) -> Any:
    """Read exactly one msgpack value; extension types come back as ``msgpack.ExtType``.

    Raises:
        PayloadError: if the bytes are anything else, or nest deeper than msgpack's own stack.
    """
    limit = len(data)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            object_pairs_hook=_unique_map,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=limit,
            max_map_len=limit // 2,
            max_ext_len=limit,
        )
    except Exception as error:
        raise PayloadError("message", "one msgpack value", f"{type(error).__name__}: {error}") from error


def encode_message(kind: int, tree: Any) -> bytes:
    """Pack ``tree`` into a frame of ``kind``."""
    return encode_frame(kind, pack(tree))


def decode_message(data: bytes | memoryview | bytearray, kind: int) -> Any:
    """Return the msgpack value of a frame of ``kind``.

    Raises:
        FrameError: if ``data`` is no such frame.
        PayloadError: if its payload is not one msgpack value.
    """
    return unpack(decode_frame(data, kind))


def digest(data: bytes | memoryview | bytearray) -> bytes:
    """Return the 16 bytes by which a frame is known; equal frames are equal messages."""
    return hashlib.blake2b(data, digest_size=16).digest()
