"""Local plans in columns, and load plans.

A local plan is two frames. The *schema* has what most ranks have in common: names, item types, tensor
properties, global sizes, planner_data. The *body* has the rest: offsets and sizes of chunks, hints,
storage_data, and the digest of the schema it belongs to, so that the digest of a body is the identity
of a whole plan. Equal plans give equal bytes.

Items that are not regular (see ``planner.wire.tensors``) stand in the body as objects, each with its
position; a plan that is not regular stands there as one object.
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
from planner.pending import look_at
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
    pack_ints,
    pack_optional_ints,
    unpack_ints,
    unpack_optional_ints,
)
from planner.wire.frame import Kind, decode_message, digest, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.mappings import MappingPath, decode_mapping, encode_mapping
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.outline import PlanOutline, TensorParts, template_of
from planner.wire.tensors import (
    FIELDS_ARE_KNOWN,
    MAX_NUM_DIMS,
    PropertiesTable,
    PropertyValues,
    SizeTable,
    decode_properties_table,
    is_regular_item,
    make_index,
)

__all__ = [
    "BYTE_IO_CODE",
    "SHARD_CODE",
    "PlanColumns",
    "PlanSchema",
    "decode_load_plan",
    "decode_plan",
    "decode_plan_body",
    "decode_plan_columns",
    "decode_planner_data",
    "decode_positions",
    "decode_schema",
    "encode_load_plan",
    "encode_plan",
    "encode_planner_data",
    "is_regular_plan",
    "make_items",
    "make_plan",
    "merge_items",
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


def is_regular_plan(plan: Any) -> bool:
    """Whether ``plan`` is a plain ``SavePlan`` with a list of whatever items."""
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


class _ItemColumns:
    """Collects the regular items of a plan, in order."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.fqn_numbers: list[int] = []
        self.types = bytearray()
        self.table = PropertiesTable()
        self.property_numbers: list[int] = []
        self.num_dims: list[int] = []
        self.global_sizes: list[int] = []
        self.offsets: list[int] = []
        self.chunk_sizes: list[int] = []
        self.nbytes: list[int | None] = []
        self.hints: list[int | None] = []

    def add(
        self,
        fqn: str,
        item_type: WriteItemType,
        hint: int | None,
        tensor: TensorParts | None,
        nbytes: int | None = None,
    ) -> None:
        """Add one by its name and template; ``nbytes`` are those of its BytesIO where it says so."""
        self.fqn_numbers.append(self.numbers.setdefault(fqn, len(self.numbers)))
        self.hints.append(hint)
        if tensor is None:
            self.types.append(BYTE_IO_CODE)
            self.nbytes.append(nbytes)
            return
        self.types.append(SHARD_CODE if item_type is _SHARD else _TENSOR_CODE)
        offsets, sizes, properties, size = tensor
        self.num_dims.append(len(size))
        self.global_sizes.extend(size)
        self.offsets.extend(offsets)
        self.chunk_sizes.extend(sizes)
        self.property_numbers.append(self.table.number(properties))


def encode_plan(plan: SavePlan | PlanOutline, *, path: str = "plan", strict: bool) -> tuple[bytes, bytes]:
    """Encode a local plan.

    Args:
        plan: any plan, or the outline of one; a subclass or an odd one just takes more bytes.
        path: what to call it in errors.
        strict: refuse what only pickle can carry.

    Returns:
        The schema frame and the body frame.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    columns = _ItemColumns()
    odd_positions: list[int] = []
    odd_items: list[Any] = []
    if isinstance(plan, PlanOutline):
        for entry in plan.entries():
            columns.add(*entry)
    elif not is_regular_plan(look_at(plan)):
        schema = encode_message(Kind.PLAN_SCHEMA, {"whole": True})
        tree = {"schema": digest(schema), "plan": encode_object(plan, path=path, strict=strict)}
        return schema, encode_message(Kind.PLAN_BODY, tree)
    else:
        for position, item in enumerate(plan.items):
            if is_regular_item(item):
                nbytes = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
                columns.add(item.index.fqn, *template_of(item), nbytes)
            else:
                odd_positions.append(position)
                odd_items.append(encode_object(item, path=f"{path}.items[{position}]", strict=strict))

    names = list(columns.numbers)
    shared: list[Any] = []
    storage_tree = _encode_storage_data(plan.storage_data, shared, path=f"{path}.storage_data", strict=strict)
    schema = encode_message(
        Kind.PLAN_SCHEMA,
        {
            "count": len(columns.fqn_numbers),
            "fqns": names,
            "fqn_numbers": None if len(names) == len(columns.fqn_numbers) else pack_ints(columns.fqn_numbers),
            "types": bytes(columns.types),
            "properties": columns.table.tree(),
            "property_numbers": pack_ints(columns.property_numbers),
            "num_dims": pack_ints(columns.num_dims),
            "sizes": pack_ints(columns.global_sizes),
            "nbytes": pack_optional_ints(columns.nbytes),
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
            "offsets": pack_ints(columns.offsets),
            "sizes": pack_ints(columns.chunk_sizes),
            "hints": pack_optional_ints(columns.hints),
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


def decode_positions(tree: Any, *, count: int, total: int, path: str) -> list[int]:
    """Read ascending positions below ``total``.

    Raises:
        PayloadError: if ``tree`` is no column of ``count`` such.
    """
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
    odd_positions = decode_positions(
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
        # Not checked to be WriteItems: planners of others may put into a plan what only they understand.
        odd_items=[
            decode_object(odd_tree, path=f"plan.items[{position}]")
            for position, odd_tree in zip(odd_positions, odd_trees, strict=True)
        ],
        storage_data=_decode_storage_data(
            tree["storage_data"], schema.storage_trees, path="plan.storage_data"
        ),
    )


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


def merge_items(items: Iterable[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
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
        merge_items(items, columns.odd_positions, columns.odd_items),
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
