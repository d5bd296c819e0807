"""Envelopes and verdicts come back as they were, or are refused."""

from __future__ import annotations

import random

import pytest

from planner.errors import WireError
from planner.wire.envelope import (
    Abort,
    Done,
    Envelope,
    Identity,
    Moved,
    Send,
    decode_verdict,
    encode_verdict,
)
from planner.wire.frame import Kind, decode_message, digest, encode_message
from tests import strategies

PARTS = tuple((digest(bytes([number])), number) for number in range(3))
ENVELOPES = [
    Envelope(Identity("save", "/ckpt", "plan")),
    Envelope(Identity("save", "/ckpt", "write", "mode"), PARTS, known=tuple(d for d, _ in PARTS)),
    Envelope(Identity("load", "", "read"), has_later=True, failure=b"frame"),
]
VERDICTS = [
    Send(3, {4: 1}, later=True),
    Done(),
    Done(3, 0b100, {1: 0b111, 5: 0}),
    Abort("plan", [(b"frame", [1, 2])]),
    Moved(),
]


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_an_envelope_comes_back(envelope):
    assert Envelope.decode(envelope.encode()) == envelope


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_comes_back(verdict):
    assert decode_verdict(encode_verdict(verdict)) == verdict


def test_a_rank_that_is_not_named_gets_the_default():
    done = Done(3, 0b100, {1: 0b111, 5: 0})
    assert [done.mask_of(rank) for rank in (0, 1, 5, 6)] == [0b100, 0b111, 0, 0b100]


def test_whole_frames_with_any_wrong_payload_give_an_envelope_or_a_verdict_or_a_wire_error():
    rng = random.Random(7)
    trees = [(Envelope.decode, Kind.ENVELOPE, decode_message(e.encode(), Kind.ENVELOPE)) for e in ENVELOPES]
    trees += [
        (decode_verdict, Kind.VERDICT, decode_message(encode_verdict(v), Kind.VERDICT)) for v in VERDICTS
    ]
    num_refused = 0
    for _ in range(1500):
        decode, kind, tree = rng.choice(trees)
        try:
            decode(encode_message(kind, strategies.mutated(tree, rng)))
        except WireError:
            num_refused += 1
    assert num_refused > 500
