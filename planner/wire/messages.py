"""What DCP hands to an exchange, as frames: picks the codec for each kind of value.

A value travels as one or more parts, each a frame; the kind in the first one's header tells how to
read them. Plans and write results are written relative to what both sides already have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import PayloadError
from planner.pending import look_at
from planner.wire.final_plans import decode_final_plan, encode_final_plan
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.metadata import decode_metadata, encode_metadata
from planner.wire.objects import decode_object, encode_object
from planner.wire.outline import PlanOutline
from planner.wire.plans import (
    PlanSchema,
    decode_load_plan,
    decode_plan_body,
    decode_schema,
    encode_load_plan,
    encode_plan,
)
from planner.wire.results import decode_results, encode_results

__all__ = [
    "decode_reply",
    "decode_value",
    "encode_reply",
    "encode_value",
    "is_metadata",
    "is_plan",
    "is_results",
]

_NUM_PLAN_PARTS = 2
_KIND_AT = 6  # see planner.wire.frame; whether it is true is checked by the codec that it leads to


def encode_value(value: Any, *, base: SavePlan | None = None, path: str, strict: bool) -> tuple[bytes, ...]:
    """Return the parts that carry ``value``.

    Args:
        value: anything; DCP's own values take few bytes.
        base: the plan that the receiver already has: a rank's local plan where ``value`` is its final
            plan, its final plan where ``value`` is its write results.
        path: what to call ``value`` in errors.
        strict: refuse what only pickle could carry.

    Raises:
        UnencodableError: something in ``value`` cannot travel; names its path and type.
    """
    if type(look_at(value)) is SavePlan:
        if base is not None:
            return (encode_final_plan(value, base, path=path, strict=strict),)
        return encode_plan(value, path=path, strict=strict)
    if type(value) is LoadPlan:
        return (encode_load_plan(value, path=path, strict=strict),)
    if type(value) is Metadata:
        return encode_metadata(value, path=path, strict=strict)
    if type(value) is list and value and all(type(item) is WriteResult for item in value):
        return (encode_results(value, base, path=path, strict=strict),)
    return (encode_message(Kind.OBJECT, encode_object(value, path=path, strict=strict)),)


def is_metadata(parts: Sequence[bytes]) -> bool:
    """Whether the last of ``parts`` says that they are metadata."""
    return len(parts) > 0 and _kind_in(parts[-1]) == Kind.METADATA


def is_plan(frame: bytes) -> bool:
    """Whether ``frame`` says that it is the first part of a local plan."""
    return _kind_in(frame) == Kind.PLAN_SCHEMA


def is_results(frame: bytes) -> bool:
    """Whether ``frame`` says that it holds write results."""
    return _kind_in(frame) == Kind.WRITE_RESULTS


def _kind_in(frame: bytes) -> int | None:
    return frame[_KIND_AT] if len(frame) > _KIND_AT else None


def encode_reply(value: Any, *, base: SavePlan | None = None, path: str, strict: bool) -> tuple[bytes, ...]:
    """Return the parts that carry ``value`` to a rank, one but for metadata; see ``encode_value``."""
    # A plan of which the receiver has no other is rare enough to go as an object.
    if base is None and type(look_at(value)) is SavePlan:
        return (encode_message(Kind.OBJECT, encode_object(value, path=path, strict=strict)),)
    return encode_value(value, base=base, path=path, strict=strict)


def decode_reply(parts: Sequence[bytes], *, base: SavePlan | PlanOutline | None) -> Any:
    """Return what ``encode_reply`` was given.

    Args:
        parts: the frames, in order.
        base: this rank's local plan, or its outline, to which a final plan is a difference.

    Raises:
        FrameError, PayloadError: the parts are no value of this wire version; nothing was used.
    """
    if len(parts) == 1 and _kind_in(parts[0]) == Kind.FINAL_PLAN and base is not None:
        return decode_final_plan(parts[0], base)
    return decode_value(parts)


def decode_value(
    parts: Sequence[bytes],
    *,
    base: SavePlan | None = None,
    schemas: dict[bytes, PlanSchema] | None = None,
) -> Any:
    """Return what ``encode_value`` was given.

    Args:
        parts: the frames, in order.
        base: as for ``encode_value``.
        schemas: schemas read so far, by their bytes; one that many plans share is read once.

    Raises:
        FrameError, PayloadError: the parts are no value of this wire version; nothing was used.
    """
    if not parts:
        raise PayloadError("message", "at least one part", "none")
    kind = _kind_in(parts[0])
    if is_metadata(parts):
        return decode_metadata(parts)
    if kind == Kind.PLAN_SCHEMA:
        if len(parts) != _NUM_PLAN_PARTS:
            raise PayloadError("plan", f"{_NUM_PLAN_PARTS} parts", f"{len(parts)} parts")
        schemas = {} if schemas is None else schemas
        schema = schemas.get(parts[0])
        if schema is None:
            schema = schemas[parts[0]] = decode_schema(parts[0])
        return decode_plan_body(schema, parts[1])
    if len(parts) != 1:
        raise PayloadError("message", "1 part", f"{len(parts)} parts")
    if kind == Kind.FINAL_PLAN:
        if base is None:
            raise PayloadError("plan", "a local plan that it differs from", "none on this rank")
        return decode_final_plan(parts[0], base)
    if kind == Kind.LOAD_PLAN:
        return decode_load_plan(parts[0])
    if kind == Kind.WRITE_RESULTS:
        return decode_results(parts[0], base)
    return decode_object(decode_message(parts[0], Kind.OBJECT), path="object")
