"""The metadata of a checkpoint in columns, in parts by how often they change from save to save.

::

    state    state_dict_metadata and planner_data: while the model and its sharding stay
    storage  storage_data: while what every rank writes keeps its size
    head     which attributes there are, storage_meta, version, and the digests of the other two parts

What does not fit columns is sent as an object, piece by piece; metadata that is none of DCP's own class
is one object, and the only part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from planner.errors import PayloadError
from planner.wire.check import expect_bytes, expect_list, expect_map, expect_str_list
from planner.wire.frame import MAX_EXPANSION, Kind, decode_message, digest, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.plans import decode_planner_data, encode_planner_data
from planner.wire.state import StateColumns, StateObjects, decode_state, encode_state, state_columns_of
from planner.wire.storage import StorageColumns, decode_storage, encode_storage, storage_columns_of
from planner.wire.tensors import FIELDS_ARE_KNOWN

__all__ = [
    "StatePart",
    "decode_metadata",
    "decode_state_part",
    "decode_storage_part",
    "encode_head",
    "encode_metadata",
    "encode_state_part",
    "encode_storage_part",
    "with_state_part",
]

_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_COLUMNS, _OBJECT, _ABSENT = 0, 1, 2
_DIGEST_NBYTES = 16
_NUM_PARTS = 3


def encode_metadata(metadata: Metadata, *, path: str = "metadata", strict: bool) -> tuple[bytes, ...]:
    """Encode the metadata of a checkpoint.

    Args:
        metadata: any metadata; a subclass or an odd one just takes more bytes.
        path: what to call it in errors.
        strict: refuse what only pickle can carry.

    Returns:
        Its parts, see the module; the last one is the head.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    attributes = getattr(metadata, "__dict__", {})
    if (
        not FIELDS_ARE_KNOWN
        or type(metadata) is not Metadata
        or not attributes.keys() <= set(_FIELDS)
        or "state_dict_metadata" not in attributes
    ):
        tree: Any = [_OBJECT, encode_object(metadata, path=path, strict=strict)]
        return (encode_message(Kind.METADATA, tree),)
    given = metadata.state_dict_metadata
    here = f"{path}.state_dict_metadata"
    columns = state_columns_of(given, path=here, strict=strict)
    planner_data = [_ABSENT, None]
    names = [] if columns is None else columns.names
    if "planner_data" in attributes:
        planner_data = encode_planner_data(
            metadata.planner_data, names, path=f"{path}.planner_data", strict=strict
        )
    state_part = None if columns is None else _encode_state_columns(columns, planner_data)
    if columns is None or state_part is None:
        columns = None
        if "planner_data" in attributes:
            planner_data = encode_planner_data(
                metadata.planner_data, [], path=f"{path}.planner_data", strict=strict
            )
        state_part = encode_message(
            Kind.METADATA_STATE, [_OBJECT, encode_object(given, path=here, strict=strict), planner_data]
        )
    return _with_storage(metadata, state_part, columns, path=path, strict=strict)


def with_state_part(state_part: bytes, rest: Metadata, *, strict: bool) -> tuple[bytes, ...]:
    """Encode metadata with a known state part; its other attributes are those of ``rest``.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    return _with_storage(rest, state_part, None, path="metadata", strict=strict)


def _with_storage(
    metadata: Metadata, state_part: bytes, columns: StateColumns | None, *, path: str, strict: bool
) -> tuple[bytes, ...]:
    tree = _encode_storage_data(vars(metadata), columns, path=path, strict=strict)
    storage_part = encode_message(Kind.METADATA_STORAGE, tree)
    return (
        state_part,
        storage_part,
        encode_head(metadata, state_part, storage_part, path=path, strict=strict),
    )


def _encode_storage_data(
    attributes: dict[str, Any], state: StateColumns | None, *, path: str, strict: bool
) -> list[Any]:
    if "storage_data" not in attributes:
        return [_ABSENT, None]
    value = attributes["storage_data"]
    columns = None if state is None else storage_columns_of(value, StateObjects(state))
    if columns is None or state is None:
        return [_OBJECT, encode_object(value, path=f"{path}.storage_data", strict=strict)]
    return [_COLUMNS, encode_storage(columns, state)]


def encode_state_part(columns: StateColumns, planner_data: Any, *, strict: bool) -> bytes | None:
    """Encode state_dict_metadata that is in columns, and planner_data.

    Returns:
        The part, or None if it would be more than a receiver takes for so few bytes.

    Raises:
        UnencodableError: if ``planner_data`` cannot travel.
    """
    return _encode_state_columns(
        columns,
        encode_planner_data(planner_data, columns.names, path="metadata.planner_data", strict=strict),
    )


def _encode_state_columns(columns: StateColumns, planner_tree: Any) -> bytes | None:
    part = encode_message(Kind.METADATA_STATE, [_COLUMNS, encode_state(columns), planner_tree])
    return part if int(columns.num_chunks().sum()) <= _max_num_chunks(part) else None


def encode_storage_part(columns: StorageColumns, state: StateColumns) -> bytes:
    """Encode storage_data that is in columns."""
    return encode_message(Kind.METADATA_STORAGE, [_COLUMNS, encode_storage(columns, state)])


def encode_head(
    metadata: Metadata, state_part: bytes, storage_part: bytes, *, path: str = "metadata", strict: bool
) -> bytes:
    """Encode what is not in the other parts: the order of the attributes and the small ones themselves.

    Raises:
        UnencodableError: if one of them cannot travel.
    """
    attributes = vars(metadata)
    # Older pickles lack attributes that have a class default now; the order is that of the pickle.
    small = {
        name: encode_object(attributes[name], path=f"{path}.{name}", strict=strict)
        for name in ("storage_meta", "version")
        if name in attributes
    }
    return encode_message(
        Kind.METADATA, [_COLUMNS, list(attributes), small, digest(state_part), digest(storage_part)]
    )


def _max_num_chunks(part: bytes) -> int:
    # As many as deflate could have made of these bytes, had it held each of them.
    return MAX_EXPANSION * len(part)


@dataclass(frozen=True)
class StatePart:
    """A decoded state part.

    Attributes:
        columns: the state in columns; None where it is an object.
        state_tree: the state as an object, where it is one.
        planner_tree: planner_data, or that there is none.
    """

    columns: StateColumns | None
    state_tree: Any
    planner_tree: Any

    def planner_data(self) -> Any:
        """Make the planner_data, a new one at every call.

        Raises:
            PayloadError: if it is none.
        """
        names = [] if self.columns is None else self.columns.names
        return decode_planner_data(self.planner_tree, names, path="metadata.planner_data")


def decode_state_part(part: bytes) -> StatePart:
    """Read a state part.

    Raises:
        WireError: if the frame or its contents are no such part.
    """
    path = "metadata.state_dict_metadata"
    form, tree, planner_tree = expect_list(decode_message(part, Kind.METADATA_STATE), path, 3)
    expect_list(planner_tree, "metadata.planner_data", 2)
    if _expect_form(form, path, _COLUMNS, _OBJECT) == _OBJECT:
        return StatePart(None, tree, planner_tree)
    return StatePart(decode_state(tree, max_num_chunks=_max_num_chunks(part), path=path), None, planner_tree)


def _expect_form(form: Any, path: str, *forms: int) -> int:
    if type(form) is not int or form not in forms:
        raise PayloadError(f"{path}.form", f"one of {forms}", "another")
    return form


def decode_storage_part(part: bytes, state: StateColumns) -> StorageColumns:
    """Read a storage part that is in columns.

    Raises:
        WireError: if the frame or its contents are no such part.
    """
    path = "metadata.storage_data"
    form, tree = expect_list(decode_message(part, Kind.METADATA_STORAGE), path, 2)
    _expect_form(form, path, _COLUMNS)
    return decode_storage(tree, state, path=path)


@paused_gc()
def decode_metadata(parts: Sequence[bytes]) -> Metadata:
    """Make the metadata of its parts.

    Raises:
        WireError: if a frame or its contents are not those of metadata, or they do not belong together.
    """
    if len(parts) not in (1, _NUM_PARTS):
        raise PayloadError("metadata", f"1 or {_NUM_PARTS} parts", f"{len(parts)} parts")
    tree = expect_list(decode_message(parts[-1], Kind.METADATA), "metadata")
    if len(parts) == 1:
        form, object_tree = expect_list(tree, "metadata", 2)
        _expect_form(form, "metadata", _OBJECT)
        whole = decode_object(object_tree, path="metadata")
        if not isinstance(whole, Metadata):
            raise PayloadError("metadata", "a Metadata", type_name_of(whole))
        return whole
    form, order_tree, small, *digests = expect_list(tree, "metadata", 5)
    _expect_form(form, "metadata", _COLUMNS)
    state_part, storage_part, _ = parts
    for name, part, promised in zip(("state", "storage"), (state_part, storage_part), digests, strict=True):
        if digest(part) != expect_bytes(promised, f"metadata.{name}", _DIGEST_NBYTES):
            raise PayloadError(f"metadata.{name}", "the part of this metadata", "another part")
    order = expect_str_list(order_tree, "metadata.attributes", unique=True)
    if "state_dict_metadata" not in order or not set(order) <= set(_FIELDS):
        raise PayloadError("metadata.attributes", f"among {', '.join(_FIELDS)}", "others")
    expect_map(small, "metadata", [name for name in order if name in ("storage_meta", "version")])

    state = decode_state_part(state_part)
    objects = None if state.columns is None else StateObjects(state.columns)
    metadata = object.__new__(Metadata)
    for name in order:
        if name == "state_dict_metadata":
            value: Any = (
                decode_object(state.state_tree, path="metadata.state_dict_metadata")
                if objects is None
                else objects.build(path="metadata.state_dict_metadata")
            )
        elif name == "planner_data":
            value = state.planner_data()
        elif name == "storage_data":
            value = _decode_storage_data(storage_part, state.columns, objects)
        else:
            value = decode_object(small[name], path=f"metadata.{name}")
        setattr(metadata, name, value)
    return metadata


def _decode_storage_data(part: bytes, state: StateColumns | None, objects: StateObjects | None) -> Any:
    path = "metadata.storage_data"
    form, tree = expect_list(decode_message(part, Kind.METADATA_STORAGE), path, 2)
    if form == _COLUMNS and type(form) is int and state is not None and objects is not None:
        return decode_storage(tree, state, path=path).build(objects)
    _expect_form(form, path, _OBJECT)
    return decode_object(tree, path=path)
