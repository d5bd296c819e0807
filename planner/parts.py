"""What of all parts of an exchange has to travel: each distinct one once, and none that is known there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from planner.wire.envelope import Done, Envelope, Send
from planner.wire.frame import digest

__all__ = ["choose_parts", "choose_replies", "lasting_mask"]


def choose_parts(
    envelopes: Mapping[int, Envelope], known: Container[bytes]
) -> tuple[dict[int, list[int]], Send]:
    """Choose who sends what, so that each distinct part that is not known travels once."""
    seen = {digest(b"")}
    wanted: dict[int, list[int]] = {}
    masks: dict[int, int] = {}
    for rank in sorted(envelopes):
        mask = 0
        for part, (part_digest, _) in enumerate(envelopes[rank].parts):
            if part_digest not in seen and part_digest not in known:
                seen.add(part_digest)
                mask |= 1 << part
                wanted.setdefault(rank, []).append(part)
        masks[rank] = mask
    default = Counter(masks.values()).most_common(1)[0][0] if masks else 0
    return wanted, Send(default, {rank: mask for rank, mask in masks.items() if mask != default})


def choose_replies(replies: Mapping[int, Sequence[bytes]], envelopes: Mapping[int, Envelope]) -> Done:
    """Choose which parts of the reply follow to whom: those that the rank does not know."""
    num_parts = max(map(len, replies.values()), default=0)
    digests: dict[int, bytes] = {}  # one object may be for all
    masks: dict[int, int] = {}
    for rank, parts in replies.items():
        if len(parts) != num_parts:
            raise ValueError(f"group rank {rank} is to get {len(parts)} parts, another {num_parts}")
        mask = 0
        known = envelopes[rank].known
        for position, part in enumerate(parts):
            if position < len(known) and id(part) not in digests:
                digests[id(part)] = digest(part)
            if position >= len(known) or known[position] != digests[id(part)]:
                mask |= 1 << position
        masks[rank] = mask
    default = Counter(masks.values()).most_common(1)[0][0] if masks else 0
    return Done(num_parts, default, {rank: mask for rank, mask in masks.items() if mask != default})


def lasting_mask(num_parts: int) -> int:
    """Return the bits of the parts of a reply that may be the same in another save."""
    return (1 << max(1, num_parts - 1)) - 1
