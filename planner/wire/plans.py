"""Save plans in columns, final plans as differences, load plans.

A local plan is two frames. The *schema* has what most ranks have in common: names, item types, tensor
properties, global sizes, planner_data. The *body* has the rest: offsets and sizes of chunks, hints,
storage_data, and the digest of the schema it belongs to, so that the digest of a body is the identity
of a whole plan. Equal plans give equal bytes.

Items that are not regular (see ``planner.wire.tensors``) stand in the body as objects, each with its
position; a plan that is not regular stands there as one object. A final plan refers to the items of the
plan that its rank had sent, and has in full only those that are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from planner.errors import PayloadError
from planner.wire.check import (
    describe,
    expect_bool,
    expect_bytes,
    expect_int,
    expect_list,
    expect_map,
    expect_str,
    expect_str_list,
)
from planner.wire.columns import (
    Int64Column,
    pack_flags,
    pack_ints,
    pack_optional_ints,
    unpack_flags,
    unpack_ints,
    unpack_optional_ints,
)
from planner.wire.frame import Kind, decode_message, digest, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.mappings import MappingPath, decode_mapping, encode_mapping
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.tensors import (
    FIELDS_ARE_KNOWN,
    MAX_NUM_DIMS,
    PropertiesTable,
    PropertyValues,
    SizeTable,
    decode_properties_table,
    is_regular_index,
    is_regular_item,
    make_index,
    property_values,
)

__all__ = [
    "BYTE_IO_CODE",
    "SHARD_CODE",
    "PlanColumns",
    "PlanSchema",
    "decode_final_plan",
    "decode_load_plan",
    "decode_plan",
    "decode_plan_body",
    "decode_plan_columns",
    "decode_planner_data",
    "decode_schema",
    "encode_final_plan",
    "encode_final_plan_columns",
    "encode_load_plan",
    "encode_plan",
    "encode_planner_data",
    "make_items",
    "make_plan",
]

# The order is the wire's; WriteItemType's own numbers are torch's business.
_TYPES = (WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO)
_TENSOR_CODE, SHARD_CODE, BYTE_IO_CODE = range(len(_TYPES))
_SHARD = WriteItemType.SHARD
_PLAN_FIELDS = ("items", "storage_data", "planner_data", "usable")
_MAPPING, _OBJECT = 0, 1
# A dict of a plan's storage_data larger than this is taken for something that all ranks repeat, like
# HuggingFaceStorageWriter's fqn_to_index_mapping, and goes into the schema.
_SHARED_FROM_NUM = 16

_SCHEMA_KEYS = frozenset(
    (
        "count",
        "fqns",
        "fqn_numbers",
        "types",
        "properties",
        "property_numbers",
        "num_dims",
        "sizes",
        "nbytes",
        "usable",
        "planner_data",
        "storage_data",
        "whole",
    )
)
_BODY_KEYS = frozenset(("schema", "offsets", "sizes", "hints", "odd_positions", "odd_items", "storage_data"))
_FINAL_KEYS = frozenset(
    (
        "base_count",
        "kept",
        "hinted",
        "hints",
        "new_positions",
        "new_items",
        "storage_data",
        "planner_data",
        "usable",
    )
)


@dataclass(frozen=True)
class PlanSchema:
    """A decoded schema: what the regular items of all plans with it have in common, item by item.

    Attributes:
        digest: the digest of its frame, by which bodies refer to it.
        fqns: the name of each regular item; shape (count,).
        types: the type of each regular item; shape (count,).
        type_codes: the same as ``SHARD_CODE``, ``BYTE_IO_CODE`` or another; shape (count,), uint8.
        num_dims: the number of dimensions of each, 0 for bytes; shape (count,), int64.
        flat_sizes: the global sizes one after another; shape (sum of num_dims,), int64.
        sizes: the same as ``torch.Size``, an empty one for bytes; shape (count,).
        properties: the arguments of ``TensorProperties`` for each, None for bytes; shape (count,).
        nbytes: bytes of each item's BytesIO where it says so; shape (count,).
        mapping: planner_data, if it is a flatten mapping; to be copied, not to be handed out.
        names: the distinct names, in the order of their first item.
        planner_tree: planner_data as an object, if it is no flatten mapping.
        usable_tree: ``SavePlan.usable`` as an object.
        storage_trees: parts of storage_data that bodies refer to by number.
        whole: the plan is one object, in the body; all of the above is empty.
    """

    digest: bytes
    fqns: list[str]
    types: list[WriteItemType]
    type_codes: npt.NDArray[np.uint8]
    num_dims: Int64Column
    flat_sizes: Int64Column
    sizes: list[torch.Size]
    properties: list[PropertyValues | None]
    nbytes: list[int | None]
    mapping: dict[str, MappingPath] | None
    names: list[str]
    planner_tree: Any
    usable_tree: Any
    storage_trees: list[Any]
    whole: bool

    def planner_data(self) -> Any:
        """Make the planner_data of one plan; every call gives a new one."""
        if self.mapping is not None:
            return dict(self.mapping)
        return decode_object(self.planner_tree, path="plan.planner_data")


@dataclass(frozen=True)
class PlanColumns:
    """A decoded body, its regular items still in columns.

    Attributes:
        offsets: the chunk offsets one after another; shape (sum of num_dims,), int64.
        sizes: the chunk sizes likewise.
        hints: the index hint of each regular item; shape (count,).
        odd_positions: where in the plan the other items stand, ascending; shape (num_odd,).
        odd_items: the other items, decoded.
        storage_data: the plan's storage_data, or the whole plan where the schema says so; decoded.
    """

    offsets: Int64Column
    sizes: Int64Column
    hints: list[int | None]
    odd_positions: list[int]
    odd_items: list[Any]
    storage_data: Any


def _is_regular_plan(plan: Any) -> bool:
    return (
        FIELDS_ARE_KNOWN
        and type(plan) is SavePlan
        and tuple(plan.__dict__) == _PLAN_FIELDS
        and type(plan.items) is list
    )


# --------------------------------------------------------------------------------------------------
# planner_data and storage_data


def encode_planner_data(planner_data: Any, names: list[str], *, path: str, strict: bool) -> Any:
    """Make a tree of any planner_data, a compact one if it is a flatten mapping.

    Args:
        planner_data: what the planner put there.
        names: distinct strings that whoever decodes has too.
        path: where it stands in the message.
        strict: refuse what only pickle can carry.
    """
    mapping = encode_mapping(planner_data, names)
    if mapping is not None:
        return [_MAPPING, mapping]
    return [_OBJECT, encode_object(planner_data, path=path, strict=strict)]


def decode_planner_data(tree: Any, names: list[str], *, path: str) -> Any:
    """Make the planner_data again.

    Raises:
        PayloadError: if ``tree`` is none.
    """
    mapping, object_tree = _split_planner_data(tree, names, path)
    return decode_object(object_tree, path=path) if mapping is None else mapping


def _split_planner_data(tree: Any, names: list[str], path: str) -> tuple[dict[str, MappingPath] | None, Any]:
    code, data = expect_list(tree, path, 2)
    if expect_int(code, f"{path}.form", _MAPPING, _OBJECT) == _MAPPING:
        return decode_mapping(data, names, path=path), None
    return None, data


def _encode_storage_data(storage_data: Any, shared: list[Any], *, path: str, strict: bool) -> list[Any]:
    """Make a tree of a plan's storage_data; its large dicts are appended to ``shared`` instead."""
    if type(storage_data) is not dict or not all(type(key) is str for key in storage_data):
        return [None, encode_object(storage_data, path=path, strict=strict)]
    own: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for key, value in storage_data.items():
        # The key keeps its place in the order; the schema has the value.
        is_shared = type(value) is dict and len(value) > _SHARED_FROM_NUM
        tree = encode_object(value, path=f"{path}[{key!r}]", strict=strict)
        if is_shared:
            numbers[key] = len(shared)
            shared.append(tree)
        own[key] = None if is_shared else tree
    return [numbers, own]


def _decode_storage_data(tree: Any, shared: list[Any], *, path: str) -> Any:
    numbers, own = expect_list(tree, path, 2)
    if numbers is None:
        return decode_object(own, path=path)
    if type(numbers) is not dict or type(own) is not dict or not numbers.keys() <= own.keys():
        raise PayloadError(path, "a map and the numbers of its shared values", describe(own))
    # Each once: a message could otherwise have one large value built for every byte of its own.
    if sorted(expect_int(number, path) for number in numbers.values()) != list(range(len(shared))):
        raise PayloadError(path, f"each of {len(shared)} shared values once", f"{len(numbers)} numbers")
    return {
        expect_str(key, path): decode_object(
            shared[numbers[key]] if key in numbers else value,
            path=f"{path}[{key!r}]",
        )
        for key, value in own.items()
    }


# --------------------------------------------------------------------------------------------------
# Local plans


def encode_plan(plan: SavePlan, *, path: str = "plan", strict: bool) -> tuple[bytes, bytes]:
    """Encode a local plan.

    Args:
        plan: any plan; a subclass or an odd one just takes more bytes.
        path: what to call it in errors.
        strict: refuse what only pickle can carry.

    Returns:
        The schema frame and the body frame.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    if not _is_regular_plan(plan):
        schema = encode_message(Kind.PLAN_SCHEMA, {"whole": True})
        tree = {"schema": digest(schema), "plan": encode_object(plan, path=path, strict=strict)}
        return schema, encode_message(Kind.PLAN_BODY, tree)

    numbers: dict[str, int] = {}
    fqn_numbers: list[int] = []
    types = bytearray()
    table = PropertiesTable()
    property_numbers: list[int] = []
    num_dims: list[int] = []
    global_sizes: list[int] = []
    offsets: list[int] = []
    chunk_sizes: list[int] = []
    nbytes: list[int | None] = []
    hints: list[int | None] = []
    odd_positions: list[int] = []
    odd_items: list[Any] = []
    for position, item in enumerate(plan.items):
        if not is_regular_item(item):
            odd_positions.append(position)
            odd_items.append(encode_object(item, path=f"{path}.items[{position}]", strict=strict))
            continue
        index, tensor_data = item.index, item.tensor_data
        fqn_numbers.append(numbers.setdefault(index.fqn, len(numbers)))
        hints.append(index.index)
        if tensor_data is None:
            types.append(BYTE_IO_CODE)
            nbytes.append(None if item.bytes_io_data is None else item.bytes_io_data.nbytes)
        else:
            types.append(SHARD_CODE if item.type is _SHARD else _TENSOR_CODE)
            chunk, size = tensor_data.chunk, tensor_data.size
            num_dims.append(len(size))
            global_sizes.extend(size)
            offsets.extend(chunk.offsets)
            chunk_sizes.extend(chunk.sizes)
            property_numbers.append(table.number(tensor_data.properties))

    names = list(numbers)
    shared: list[Any] = []
    storage_tree = _encode_storage_data(plan.storage_data, shared, path=f"{path}.storage_data", strict=strict)
    schema = encode_message(
        Kind.PLAN_SCHEMA,
        {
            "count": len(fqn_numbers),
            "fqns": names,
            "fqn_numbers": None if len(names) == len(fqn_numbers) else pack_ints(fqn_numbers),
            "types": bytes(types),
            "properties": table.tree(),
            "property_numbers": pack_ints(property_numbers),
            "num_dims": pack_ints(num_dims),
            "sizes": pack_ints(global_sizes),
            "nbytes": pack_optional_ints(nbytes),
            "usable": encode_object(plan.usable, path=f"{path}.usable", strict=strict),
            "planner_data": encode_planner_data(
                plan.planner_data, names, path=f"{path}.planner_data", strict=strict
            ),
            "storage_data": shared,
            "whole": False,
        },
    )
    body = encode_message(
        Kind.PLAN_BODY,
        {
            "schema": digest(schema),
            "offsets": pack_ints(offsets),
            "sizes": pack_ints(chunk_sizes),
            "hints": pack_optional_ints(hints),
            "odd_positions": pack_ints(odd_positions),
            "odd_items": odd_items,
            "storage_data": storage_tree,
        },
    )
    return schema, body


def _whole_schema(schema_digest: bytes) -> PlanSchema:
    nothing = np.zeros(0, dtype=np.int64)
    codes = np.zeros(0, dtype=np.uint8)
    return PlanSchema(
        schema_digest, [], [], codes, nothing, nothing, [], [], [], None, [], None, None, [], whole=True
    )


def decode_schema(schema: bytes) -> PlanSchema:
    """Decode a schema frame, once for all plans with it.

    Raises:
        WireError: if the frame or its contents are not those of a schema.
    """
    tree = decode_message(schema, Kind.PLAN_SCHEMA)
    if tree == {"whole": True}:
        return _whole_schema(digest(schema))
    expect_map(tree, "schema", _SCHEMA_KEYS)
    if expect_bool(tree["whole"], "schema.whole"):
        raise PayloadError("schema.whole", "no columns beside it", "columns")
    types_tree = expect_bytes(tree["types"], "schema.types")
    count = expect_int(tree["count"], "schema.count", len(types_tree), len(types_tree))
    if count and max(types_tree) >= len(_TYPES):
        raise PayloadError("schema.types", f"codes below {len(_TYPES)}", max(types_tree))
    type_codes = np.frombuffer(types_tree, dtype=np.uint8)
    is_tensor = type_codes != BYTE_IO_CODE
    num_tensors = int(is_tensor.sum())

    names = expect_str_list(tree["fqns"], "schema.fqns", unique=True)
    fqns = names
    if tree["fqn_numbers"] is not None:
        fqn_numbers = unpack_ints(
            tree["fqn_numbers"], count=count, path="schema.fqn_numbers", low=0, high=len(names) - 1
        )
        fqns = [names[number] for number in fqn_numbers.tolist()]
    elif len(names) != count:
        raise PayloadError("schema.fqns", f"{count} names", len(names))

    table = decode_properties_table(tree["properties"], path="schema.properties")
    numbers = unpack_ints(
        tree["property_numbers"],
        count=num_tensors,
        path="schema.property_numbers",
        low=0,
        high=len(table) - 1,
    )
    properties: list[PropertyValues | None] = [None] * count
    for position, number in zip(np.flatnonzero(is_tensor).tolist(), numbers.tolist(), strict=True):
        properties[position] = table[number]

    num_dims = np.zeros(count, dtype=np.int64)
    num_dims[is_tensor] = unpack_ints(
        tree["num_dims"], count=num_tensors, path="schema.num_dims", low=0, high=MAX_NUM_DIMS
    )
    flat_sizes = unpack_ints(tree["sizes"], count=int(num_dims.sum()), path="schema.sizes")

    nbytes: list[int | None] = [None] * count
    found = unpack_optional_ints(tree["nbytes"], count=count - num_tensors, path="schema.nbytes", low=0)
    for position, number_of_bytes in zip(np.flatnonzero(~is_tensor).tolist(), found, strict=True):
        nbytes[position] = number_of_bytes

    mapping, planner_tree = _split_planner_data(tree["planner_data"], names, "schema.planner_data")
    return PlanSchema(
        digest=digest(schema),
        fqns=fqns,
        types=[_TYPES[code] for code in types_tree],
        type_codes=type_codes,
        num_dims=num_dims,
        flat_sizes=flat_sizes,
        sizes=list(SizeTable().cut(flat_sizes, num_dims.tolist())),
        properties=properties,
        nbytes=nbytes,
        mapping=mapping,
        names=names,
        planner_tree=planner_tree,
        usable_tree=tree["usable"],
        storage_trees=expect_list(tree["storage_data"], "schema.storage_data"),
        whole=False,
    )


def _expect_own_schema(found: Any, schema: PlanSchema) -> None:
    if found != schema.digest:
        shown = found.hex() if type(found) is bytes else describe(found)
        raise PayloadError("body.schema", f"the schema with digest {schema.digest.hex()}", shown)


def _decode_positions(tree: Any, *, count: int, total: int, path: str) -> list[int]:
    positions = unpack_ints(tree, count=count, path=path, low=0, high=total - 1)
    if count > 1 and int(np.diff(positions).min()) <= 0:
        raise PayloadError(path, "ascending positions", "others")
    found: list[int] = positions.tolist()
    return found


def decode_plan_columns(schema: PlanSchema, body: bytes) -> PlanColumns:
    """Decode a body frame, leaving its regular items in columns.

    Raises:
        WireError: if the frame or its contents are not those of a body of ``schema``.
    """
    tree = decode_message(body, Kind.PLAN_BODY)
    if schema.whole:
        expect_map(tree, "body", ("schema", "plan"))
        _expect_own_schema(tree["schema"], schema)
        plan = decode_object(tree["plan"], path="plan")
        if not isinstance(plan, SavePlan):
            raise PayloadError("plan", "a SavePlan", type_name_of(plan))
        return PlanColumns(schema.num_dims, schema.num_dims, [], [], [], plan)
    expect_map(tree, "body", _BODY_KEYS)
    _expect_own_schema(tree["schema"], schema)
    num_numbers = len(schema.flat_sizes)
    count = len(schema.fqns)
    odd_trees = expect_list(tree["odd_items"], "body.odd_items")
    odd_positions = _decode_positions(
        tree["odd_positions"],
        count=len(odd_trees),
        total=count + len(odd_trees),
        path="body.odd_positions",
    )
    return PlanColumns(
        offsets=unpack_ints(tree["offsets"], count=num_numbers, path="body.offsets"),
        sizes=unpack_ints(tree["sizes"], count=num_numbers, path="body.sizes"),
        hints=unpack_optional_ints(tree["hints"], count=count, path="body.hints"),
        odd_positions=odd_positions,
        odd_items=[
            _decode_item(odd_tree, f"plan.items[{position}]")
            for position, odd_tree in zip(odd_positions, odd_trees, strict=True)
        ],
        storage_data=_decode_storage_data(
            tree["storage_data"], schema.storage_trees, path="plan.storage_data"
        ),
    )


def _decode_item(tree: Any, path: str) -> Any:
    # Not checked to be a WriteItem: planners of others may put into a plan what only they understand.
    return decode_object(tree, path=path)


def make_items(
    schema: PlanSchema,
    columns: PlanColumns,
    *,
    kept: npt.NDArray[np.bool_] | None = None,
    hints: Sequence[int | None] | None = None,
) -> list[WriteItem]:
    """Make the regular items of a plan, new ones at every call.

    Args:
        schema: the plan's schema.
        columns: its body.
        kept: which of them to make; None for all; shape (count,).
        hints: index hints to give them in place of those they came with; shape (count,).
    """
    num_dims = schema.num_dims.tolist()
    table = SizeTable()
    parts: Iterable[tuple[Any, ...]] = zip(
        schema.fqns,
        schema.types,
        schema.sizes,
        schema.properties,
        schema.nbytes,
        table.cut(columns.offsets, num_dims),
        table.cut(columns.sizes, num_dims),
        columns.hints if hints is None else hints,
        strict=True,
    )
    if kept is not None:
        parts = compress(parts, kept.tolist())
    items: list[WriteItem] = []
    for fqn, item_type, size, values, nbytes, offsets, sizes, hint in parts:
        if values is None:
            bytes_io_data = None if nbytes is None else BytesIOWriteData(nbytes)
            items.append(WriteItem(make_index(fqn, None, hint), item_type, bytes_io_data, None))
        else:
            # Chunks and properties are mutable: each item has its own, as after unpickling.
            chunk = ChunkStorageMetadata(offsets, sizes)
            tensor_data = TensorWriteData(chunk, TensorProperties(*values), size)
            items.append(WriteItem(make_index(fqn, offsets, hint), item_type, None, tensor_data))
    return items


def _merge(items: Iterable[Any], positions: list[int], others: list[Any]) -> list[Any]:
    """Put ``others`` at ``positions`` of the result and ``items`` at the rest, each in its order."""
    if not positions:
        return list(items)
    rest = iter(items)
    merged: list[Any] = []
    for position, other in zip(positions, others, strict=True):
        while len(merged) < position:
            merged.append(next(rest))
        merged.append(other)
    merged.extend(rest)
    return merged


def make_plan(
    schema: PlanSchema,
    columns: PlanColumns,
    *,
    kept: npt.NDArray[np.bool_] | None = None,
    hints: Sequence[int | None] | None = None,
) -> SavePlan:
    """Make the plan of a decoded body.

    Its regular items and planner_data are new at every call; its other items and storage_data are those
    of ``columns``.

    Args:
        schema: the plan's schema.
        columns: its body.
        kept: which of its regular items to make; None for all; see ``make_items``.
        hints: index hints for them; only for a plan without other items.
    """
    if schema.whole:
        plan: SavePlan = columns.storage_data
        return plan
    with paused_gc():
        items = make_items(schema, columns, kept=kept, hints=hints)
    return SavePlan(
        _merge(items, columns.odd_positions, columns.odd_items),
        columns.storage_data,
        schema.planner_data(),
        decode_object(schema.usable_tree, path="plan.usable"),
    )


def decode_plan_body(schema: PlanSchema, body: bytes) -> SavePlan:
    """Make the plan of a body frame; its schema may be shared by any number of plans.

    Raises:
        WireError: if the frame or its contents are not those of a body of ``schema``.
    """
    return make_plan(schema, decode_plan_columns(schema, body))


def decode_plan(schema: bytes, body: bytes) -> SavePlan:
    """Make the plan of a schema frame and a body frame.

    Raises:
        WireError: if a frame or its contents are not those of a plan, or they do not belong together.
    """
    return decode_plan_body(decode_schema(schema), body)


# --------------------------------------------------------------------------------------------------
# Final plans


def _base_items(base: Any) -> list[Any]:
    items = getattr(base, "items", None)
    return items if type(items) is list else []


def _is_same_but_hint(item: WriteItem, base_item: WriteItem) -> bool:
    """Tell whether two regular items are equal, index hints aside."""
    return (
        item.type is base_item.type
        and item.index.fqn == base_item.index.fqn
        and (item.tensor_data is base_item.tensor_data or item.tensor_data == base_item.tensor_data)
        and item.bytes_io_data == base_item.bytes_io_data
    )


def _has_parts_of(base_item: Any, item: WriteItem) -> bool:
    """Tell, faster, whether ``base_item`` is regular because it shares the data of a regular tensor item.

    This is what global planning gives: it replaces an item's index and keeps the rest.
    """
    return (
        type(base_item) is WriteItem
        and item.tensor_data is not None
        and base_item.tensor_data is item.tensor_data
        and base_item.bytes_io_data is None
        and len(base_item.__dict__) == len(item.__dict__)
        and is_regular_index(base_item.index)
        and base_item.index.offset == item.index.offset
    )


class _BaseFinder:
    """Finds items of a final plan in the base plan, in order."""

    def __init__(self, base_items: list[Any]) -> None:
        self._items = base_items
        self._next = 0
        self._positions: dict[str, list[int]] | None = None

    def find(self, item: WriteItem) -> int | None:
        """Return the position of the first equal item past those found before, or None."""
        if self._next < len(self._items) and self._matches(item, self._next):
            self._next += 1
            return self._next - 1
        if self._positions is None:
            self._positions = {}
            for position, base_item in enumerate(self._items):
                if is_regular_item(base_item):
                    self._positions.setdefault(base_item.index.fqn, []).append(position)
        for position in self._positions.get(item.index.fqn, ()):
            if position >= self._next and self._matches(item, position):
                self._next = position + 1
                return position
        return None

    def _matches(self, item: WriteItem, position: int) -> bool:
        base_item = self._items[position]
        return (_has_parts_of(base_item, item) or is_regular_item(base_item)) and _is_same_but_hint(
            item, base_item
        )


def encode_final_plan(plan: SavePlan, base: SavePlan, *, path: str = "plan", strict: bool) -> bytes:
    """Encode a rank's final plan as what differs from the local plan it had sent.

    Args:
        plan: the final plan.
        base: the local plan, as sent or as decoded; both give the same.
        path: what to call the final plan in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    if not _is_regular_plan(plan):
        tree = {"plan": encode_object(plan, path=path, strict=strict)}
        return encode_message(Kind.FINAL_PLAN, tree)
    base_items = _base_items(base)
    finder = _BaseFinder(base_items)
    kept = np.zeros(len(base_items), dtype=np.bool_)
    hinted: list[bool] = []
    hints: list[int | None] = []
    new_positions: list[int] = []
    new_items: list[Any] = []
    for position, item in enumerate(plan.items):
        found = finder.find(item) if is_regular_item(item) else None
        if found is None:
            new_positions.append(position)
            new_items.append(encode_object(item, path=f"{path}.items[{position}]", strict=strict))
            continue
        kept[found] = True
        has_new_hint = item.index.index != base_items[found].index.index
        hinted.append(has_new_hint)
        if has_new_hint:
            hints.append(item.index.index)
    return _encode_final_tree(
        kept=kept,
        hinted=hinted,
        hints=pack_optional_ints(hints),
        new_positions=new_positions,
        new_items=new_items,
        storage_data=None
        if plan.storage_data is getattr(base, "storage_data", None)
        else [encode_object(plan.storage_data, path=f"{path}.storage_data", strict=strict)],
        planner_data=None
        if _is_same_planner_data(plan.planner_data, getattr(base, "planner_data", None))
        else encode_planner_data(
            plan.planner_data, _regular_names(base_items), path=f"{path}.planner_data", strict=strict
        ),
        usable=encode_object(plan.usable, path=f"{path}.usable", strict=strict),
    )


def encode_final_plan_columns(
    schema: PlanSchema,
    columns: PlanColumns,
    kept: npt.NDArray[np.bool_],
    hints: Int64Column,
    *,
    storage_data: Any,
    path: str = "plan",
    strict: bool,
) -> bytes:
    """Encode a rank's final plan that is its local plan with fewer items and other hints.

    The bytes are those of ``encode_final_plan`` for that final plan; neither plan is made.

    Args:
        schema: the schema of the local plan.
        columns: the body of the local plan; all its items are regular.
        kept: which of its items the final plan has; shape (count,).
        hints: the new index hint of each tensor among its items; what stands at other items and at
            those not kept is not looked at; shape (count,), int64.
        storage_data: that of the final plan; ``columns.storage_data`` itself where it did not change.
        path: what to call the final plan in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if ``storage_data`` cannot travel.
    """
    positions = np.flatnonzero(kept)
    hinted: npt.NDArray[np.bool_] = schema.type_codes[positions] != BYTE_IO_CODE
    new_hints = hints[positions]
    if columns.hints.count(None) != len(columns.hints):
        old_hints = compress(columns.hints, kept.tolist())
        is_other = [old != new for old, new in zip(old_hints, new_hints.tolist(), strict=True)]
        hinted &= np.asarray(is_other, dtype=np.bool_)
    new_hints = new_hints[hinted]
    usable = decode_object(schema.usable_tree, path=f"{path}.usable")
    return _encode_final_tree(
        kept=kept,
        hinted=hinted,
        # None of them is None: the same as pack_optional_ints of a list, without the list.
        hints=[None, pack_ints(new_hints)] if len(new_hints) else None,
        new_positions=[],
        new_items=[],
        storage_data=None
        if storage_data is columns.storage_data
        else [encode_object(storage_data, path=f"{path}.storage_data", strict=strict)],
        planner_data=None,
        usable=encode_object(usable, path=f"{path}.usable", strict=strict),
    )


def _encode_final_tree(
    *,
    kept: npt.NDArray[np.bool_],
    hinted: Sequence[bool] | npt.NDArray[np.bool_],
    hints: Any,
    new_positions: list[int],
    new_items: list[Any],
    storage_data: Any,
    planner_data: Any,
    usable: Any,
) -> bytes:
    tree = {
        "base_count": len(kept),
        "kept": pack_flags(kept),
        "hinted": pack_flags(hinted),
        "hints": hints,
        "new_positions": pack_ints(new_positions),
        "new_items": new_items,
        "storage_data": storage_data,
        "planner_data": planner_data,
        "usable": usable,
    }
    return encode_message(Kind.FINAL_PLAN, tree)


def _regular_names(items: list[Any]) -> list[str]:
    return list(dict.fromkeys(item.index.fqn for item in items if is_regular_item(item)))


def _is_same_planner_data(planner_data: Any, base_data: Any) -> bool:
    if planner_data is base_data:
        return True
    # Equality says too little about anything else: it knows no order, and 1 == True.
    mapping = encode_mapping(planner_data, [])
    return mapping is not None and mapping == encode_mapping(base_data, [])


def _copy_item(item: WriteItem, hint: int | None) -> WriteItem:
    tensor_data = item.tensor_data
    if tensor_data is not None:
        chunk = tensor_data.chunk
        properties = TensorProperties(*property_values(tensor_data.properties))
        tensor_data = TensorWriteData(
            ChunkStorageMetadata(chunk.offsets, chunk.sizes), properties, tensor_data.size
        )
    offset = None if tensor_data is None else tensor_data.chunk.offsets
    return WriteItem(make_index(item.index.fqn, offset, hint), item.type, item.bytes_io_data, tensor_data)


def decode_final_plan(data: bytes, base: SavePlan) -> SavePlan:
    """Make the final plan again on the rank that sent ``base``.

    Args:
        data: a FINAL_PLAN frame.
        base: the local plan; it is not changed, and shares no items with the result.

    Raises:
        WireError: if the frame or its contents are not those of a final plan for ``base``.
    """
    tree = decode_message(data, Kind.FINAL_PLAN)
    if type(tree) is dict and tree.keys() == {"plan"}:
        plan = decode_object(tree["plan"], path="plan")
        if not isinstance(plan, SavePlan):
            raise PayloadError("plan", "a SavePlan", type_name_of(plan))
        return plan
    expect_map(tree, "plan", _FINAL_KEYS)
    base_items = _base_items(base)
    num_base = expect_int(tree["base_count"], "plan.base_count", len(base_items), len(base_items))
    kept = np.flatnonzero(unpack_flags(tree["kept"], count=num_base, path="plan.kept")).tolist()
    hinted = unpack_flags(tree["hinted"], count=len(kept), path="plan.hinted")
    new_hints = iter(unpack_optional_ints(tree["hints"], count=int(hinted.sum()), path="plan.hints"))
    items: list[WriteItem] = []
    with paused_gc():
        for position, has_new_hint in zip(kept, hinted.tolist(), strict=True):
            item = base_items[position]
            if not is_regular_item(item):
                found = f"item {position} of type {type_name_of(item)}"
                raise PayloadError("plan.kept", "regular items", found)
            items.append(_copy_item(item, next(new_hints) if has_new_hint else item.index.index))
    new_trees = expect_list(tree["new_items"], "plan.new_items")
    new_positions = _decode_positions(
        tree["new_positions"],
        count=len(new_trees),
        total=len(items) + len(new_trees),
        path="plan.new_positions",
    )
    new_items = [
        _decode_item(new_tree, f"plan.items[{position}]")
        for position, new_tree in zip(new_positions, new_trees, strict=True)
    ]
    if tree["storage_data"] is None:
        storage_data = getattr(base, "storage_data", None)
    else:
        (storage_tree,) = expect_list(tree["storage_data"], "plan.storage_data", 1)
        storage_data = decode_object(storage_tree, path="plan.storage_data")
    if tree["planner_data"] is None:
        planner_data = getattr(base, "planner_data", None)
        if type(planner_data) is dict:
            planner_data = dict(planner_data)
    else:
        planner_data = decode_planner_data(
            tree["planner_data"], _regular_names(base_items), path="plan.planner_data"
        )
    return SavePlan(
        _merge(items, new_positions, new_items),
        storage_data,
        planner_data,
        decode_object(tree["usable"], path="plan.usable"),
    )


# --------------------------------------------------------------------------------------------------
# Load plans


def encode_load_plan(plan: LoadPlan, *, path: str = "plan", strict: bool) -> bytes:
    """Encode a load plan as one object.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    return encode_message(Kind.LOAD_PLAN, encode_object(plan, path=path, strict=strict))


def decode_load_plan(data: bytes) -> LoadPlan:
    """Make the load plan of a LOAD_PLAN frame.

    Raises:
        WireError: if the frame or its contents are not those of a load plan.
    """
    plan = decode_object(decode_message(data, Kind.LOAD_PLAN), path="plan")
    if not isinstance(plan, LoadPlan):
        raise PayloadError("plan", "a LoadPlan", type_name_of(plan))
    return plan
