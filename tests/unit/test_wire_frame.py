"""Frames: a changed, cut, foreign or lying one is refused, whatever it says."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import FrameError, PayloadError, UnencodableError, WireError
from planner.wire import columns
from planner.wire.frame import (
    HEADER_NBYTES,
    Kind,
    decode_frame,
    decode_message,
    digest,
    encode_frame,
    encode_message,
    kind_of,
    pack,
    unpack,
)

QUICK = settings(max_examples=60, deadline=None, derandomize=True)

HELLO = bytes.fromhex("47435046 0100 01 00 0500000000000000 0500000000000000") + struct.pack(
    "<I", zlib.crc32(b"hello", zlib.crc32(bytes.fromhex("474350460100010005000000000000000500000000000000")))
)


def frame_of(kind, flags, body, raw_nbytes, stored_nbytes=None):
    """Write a frame with any header and a right checksum."""
    stored_nbytes = len(body) if stored_nbytes is None else stored_nbytes
    header = struct.pack("<4sHBBQQ", b"GCPF", 1, kind, flags, stored_nbytes, raw_nbytes)
    return header + struct.pack("<I", zlib.crc32(body, zlib.crc32(header))) + body


def test_a_frame_has_exactly_these_bytes():
    assert encode_frame(Kind.OBJECT, b"hello") == HELLO + b"hello"
    assert HEADER_NBYTES == 28
    assert encode_message(Kind.VERDICT, {"go": True})[28:] == bytes.fromhex("81a2676fc3")


def test_a_large_payload_is_deflated_only_where_that_pays():
    plain = bytes(range(256))
    assert encode_frame(1, plain)[7] == 0
    assert encode_frame(1, plain * 4)[7] == 1
    assert encode_frame(1, b"a" * 255)[7] == 0
    assert encode_frame(1, b"a" * 256)[7] == 1


@QUICK
@given(st.binary(max_size=600), st.sampled_from(Kind))
def test_every_payload_comes_back(payload, kind):
    for data in (payload, payload * 20):
        frame = encode_frame(kind, data)
        assert decode_frame(frame, kind) == data
        assert decode_frame(memoryview(bytearray(frame)), kind) == data
        assert kind_of(frame) == kind


@QUICK
@given(st.data(), st.sampled_from([b"", b"hello", b"abc" * 200]))
def test_any_single_changed_byte_is_refused(data, payload):
    frame = bytearray(encode_frame(Kind.METADATA, payload))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        decode_frame(bytes(frame), Kind.METADATA)


@pytest.mark.parametrize("payload", [b"", b"hello", b"abc" * 200])
def test_a_frame_cut_anywhere_or_with_bytes_added_is_refused(payload):
    frame = encode_frame(Kind.METADATA, payload)
    for length in range(len(frame)):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame[:length], Kind.METADATA)
        assert caught.value.reason == "length"
    for more in (b"\0", frame):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame + more, Kind.METADATA)
        assert caught.value.reason == "length"


def test_foreign_bytes_and_other_versions_are_named_first():
    with pytest.raises(FrameError) as caught:
        decode_frame(b"HTTP/1.1 200 OK", 1)
    assert (caught.value.reason, caught.value.found) == ("magic", b"HTTP")
    for cut in (6, 12, 100):
        with pytest.raises(FrameError) as caught:
            decode_frame((b"GCPF" + struct.pack("<H", 7) + b"\xff" * 94)[:cut], 1)
        assert (caught.value.reason, caught.value.expected, caught.value.found) == ("version", 1, 7)


def test_a_frame_of_another_kind_names_both_kinds():
    with pytest.raises(FrameError, match=r"3 \(PLAN_BODY\), expected 6 \(METADATA\)"):
        decode_frame(encode_frame(Kind.PLAN_BODY, b""), Kind.METADATA)


def test_headers_that_lie_under_a_right_checksum_are_refused_before_they_allocate():
    deflated = zlib.compress(b"a" * 1000)
    lies = [
        frame_of(1, 2, b"x", 1),
        frame_of(1, 0, b"x", 2),
        frame_of(1, 0, b"x", 1, stored_nbytes=2**60),
        frame_of(1, 1, deflated, 2**63),
        frame_of(1, 1, deflated, 999),
        frame_of(1, 1, deflated, 1001),
        frame_of(1, 1, deflated, 0),
        frame_of(1, 1, deflated + b"more", 1000),
        frame_of(1, 1, deflated[:-2], 1000),
        frame_of(1, 1, b"no stream", 10),
        frame_of(1, 1, b"", 0),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(FrameError):
                decode_frame(lie, 1)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_unpack_to_a_value_or_a_payload_error(data):
    with contextlib.suppress(PayloadError):
        unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        b"\xc1",
        b"\xa1\xff",
        b"\x91" * 100_000 + b"\x01",
        msgpack.packb({b"k": 1})[:1] * 2,
        b"\x82\x01\x01\x01\x01",
        b"\x81\x90\x01",
    ],
    ids=[
        "empty",
        "two values",
        "array",
        "string",
        "reserved",
        "utf-8",
        "deep",
        "cut",
        "key twice",
        "list key",
    ],
)
def test_what_is_no_single_msgpack_value_is_a_payload_error(data):
    with pytest.raises(PayloadError):
        decode_message(encode_frame(1, data), 1)


def test_lone_surrogates_and_byte_strings_survive_packing():
    tree = {"\ud800": [b"\xff", "\udc80", None, 1.5, msgpack.ExtType(5, b"x")]}
    assert unpack(pack(tree)) == tree


def test_what_msgpack_cannot_hold_is_unencodable():
    for tree in (2**64, (1,), object(), {"a": {1, 2}}):
        with pytest.raises(UnencodableError):
            pack(tree)


def test_equal_messages_have_equal_digests_of_16_bytes():
    assert digest(b"a") == digest(bytearray(b"a")) != digest(b"b")
    assert len(digest(b"")) == 16


@QUICK
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300)))
def test_a_column_comes_back_and_is_as_narrow_as_it_can_be(values):
    tree = columns.pack_ints(values)
    assert columns.unpack_ints(tree, count=len(values), path="c").tolist() == values
    if values and 0 <= min(values) <= max(values) < 256:
        assert len(tree[1]) == len(values)


@QUICK
@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_a_column_with_nones_comes_back(values):
    tree = columns.pack_optional_ints(values)
    assert columns.unpack_optional_ints(tree, count=len(values), path="c") == values


@pytest.mark.parametrize(
    "tree", [None, [], [9, b""], [0, b"\1\2"], [0, b""], [0, "a"], [True, b"a"], [0, b"\5"], [3, b"\xff"]]
)
def test_a_column_of_another_length_width_or_range_is_refused(tree):
    with pytest.raises(WireError):
        columns.unpack_ints(tree, count=1, path="c", low=0, high=4)


def test_integers_beyond_64_bit_do_not_fit_a_column():
    with pytest.raises(UnencodableError):
        columns.pack_ints([2**63])


def test_a_bit_set_of_another_length_is_refused():
    assert columns.unpack_flags(columns.pack_flags([True] * 9), count=9, path="f").tolist() == [True] * 9
    for data, count in ((b"\xff", 7), (b"", 1), (b"\0\0", 8)):
        with pytest.raises(PayloadError):
            columns.unpack_flags(data, count=count, path="f")
