"""Any Python value as a msgpack tree and back, by exact type.

Plain values are themselves: None, bools, ints of 64 bit, floats, strings, bytes, lists and dicts with
string keys. Everything else is a msgpack extension whose data is msgpack again; ``_Ext`` lists them.
Two of them carry a name: records (DCP's own dataclasses, every attribute by name, so that one a class
gains in another torch travels too) and registered codecs. What nobody knows is pickled, alone, inside
the frame, and said so once; ``strict`` refuses it instead.

Identity is not kept: a list that stands in two places arrives as two equal lists.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import pickle  # noqa: TID251 - the one place that may: what no codec knows travels as pickle
import struct
import uuid
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeVar

import msgpack
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import PayloadError, UnencodableError, WireError
from planner.pending import is_pending, look_at
from planner.wire.check import (
    describe,
    expect_bytes,
    expect_int,
    expect_list,
    expect_str,
    expect_str_list,
)
from planner.wire.frame import pack, unpack

__all__ = ["decode_object", "encode_object", "register_codec", "type_name_of"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_DEPTH = 200
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_COMPLEX = struct.Struct("<dd")


class _Ext(IntEnum):
    """Extension codes; what each holds is in the functions named after it."""

    BIG_INT = 1  # two's complement, little-endian
    PAIRS = 2  # a dict with other keys than strings: [key, value, key, value, ...]
    TUPLE = 3
    SET = 4  # elements in the order of their bytes, so that equal sets are equal messages
    FROZENSET = 5
    COMPLEX = 6
    BYTEARRAY = 7
    RANGE = 8
    SLICE = 9
    SIZE = 10
    DTYPE = 11
    LAYOUT = 12
    MEMORY_FORMAT = 13
    DEVICE = 14
    PATH = 15
    TIMEDELTA = 16
    UUID = 17
    ENUM = 18
    RECORD = 19  # [name, value, ...], every field in the order of the class
    PARTIAL_RECORD = 20  # [name, {attribute: value}], when some are missing
    REGISTERED = 21  # [name, what the codec made of it]
    PICKLED = 22  # [type name, pickle]


class _Path(NamedTuple):
    """Where a value stands; put into words only when an error needs them."""

    parent: _Path | None
    form: str
    key: Any
    depth: int

    def child(self, form: str, key: Any) -> _Path:
        return _Path(self, form, key, self.depth + 1)

    def __str__(self) -> str:
        steps: list[str] = []
        step: _Path | None = self
        while step is not None:
            try:
                steps.append(step.form.format(step.key))
            except Exception:  # noqa: BLE001 - a key's repr is foreign code, and only decorates an error
                steps.append(f"[<{type(step.key).__name__}>]")
            step = step.parent
        return "".join(reversed(steps))


class _Codec(NamedTuple):
    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def type_name_of(value: object) -> str:
    """Return the full name of the class of ``value``."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# --------------------------------------------------------------------------------------------------
# What is known by name. torch's own names are the wire names: dtypes differ between releases, numbers
# of them would too.


def _torch_names(cls: type) -> dict[str, Any]:
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is cls}


_DTYPES = _torch_names(torch.dtype)
_LAYOUTS = _torch_names(torch.layout)
_MEMORY_FORMATS = _torch_names(torch.memory_format)
_ENUMS: dict[str, type[Enum]] = {
    cls.__name__: cls for cls in (dcp_planner.WriteItemType, dcp_planner.LoadItemType)
}
_RECORDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.Metadata,
        dcp_planner.BytesIOWriteData,
        dcp_planner.TensorWriteData,
        dcp_planner.WriteItem,
        dcp_planner.SavePlan,
        dcp_planner.ReadItem,
        dcp_planner.LoadPlan,
        WriteResult,
        _StorageInfo,
        _StoragePrefix,
    )
}
_FIELDS: dict[type, tuple[str, ...]] = {
    cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in _RECORDS.values()
}
# The order in which its own __init__ sets them, and so that of its pickles.
_FIELDS[dcp_metadata.MetadataIndex] = tuple(
    sorted(_FIELDS[dcp_metadata.MetadataIndex], key=lambda name: name == "offset")
)
_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}

_codecs_by_name: dict[str, _Codec] = {}
_codecs_by_class: dict[type, _Codec] = {}
_warned_types: set[str] = set()


def register_codec(
    cls: type[_T], *, name: str, encode: Callable[[_T], Any], decode: Callable[[Any], _T]
) -> None:
    """Make values of exactly ``cls`` travel by name instead of as pickle.

    Register the same codec on every rank. Registering the very same codec again changes nothing.

    Args:
        cls: the class; its subclasses are not meant.
        name: what the class is called on the wire.
        encode: makes a value of the class into one of values that can travel.
        decode: makes it into the class again; what it raises counts as a bad message.

    Raises:
        ValueError: if the name or the class has another codec, or the class travels by itself.
    """
    codec = _Codec(name, cls, encode, decode)
    if _codecs_by_name.get(name) == codec:
        return
    if name in _codecs_by_name:
        raise ValueError(f"the codec name {name!r} is taken by {_codecs_by_name[name].cls.__qualname__}")
    if cls in _codecs_by_class:
        raise ValueError(f"{cls.__qualname__} has a codec already, named {_codecs_by_class[cls].name!r}")
    if cls is int or cls in _PLAIN or cls in _ENCODERS:
        raise ValueError(f"{cls.__qualname__} travels by itself and needs no codec")
    _codecs_by_name[name] = _codecs_by_class[cls] = codec


# --------------------------------------------------------------------------------------------------
# Encoding


def encode_object(value: Any, *, path: str, strict: bool) -> Any:
    """Make a msgpack tree of any value.

    Args:
        value: the value.
        path: where it stands in the message, for errors and warnings.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if a part cannot travel: not picklable, pickled though ``strict``, in a cycle,
            or nested more than 200 deep.
    """
    try:
        return _Encoder(strict=strict).encode(value, _Path(None, "{}", path, 0))
    except RecursionError as error:
        raise UnencodableError(path, type_name_of(value), "it is nested too deep to be encoded") from error


class _Encoder:
    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self._open: set[int] = set()

    def encode(self, value: Any, path: _Path) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
        if cls is int:
            return _encode_int(value)
        encode = _ENCODERS.get(cls)
        if encode is None and cls not in _codecs_by_class:
            if is_pending(value):
                return self.encode(look_at(value), path)
            return self._pickle(value, path)
        if id(value) in self._open:
            raise UnencodableError(str(path), type_name_of(value), "it contains itself")
        if path.depth >= _MAX_DEPTH:
            raise UnencodableError(str(path), type_name_of(value), f"it is nested over {_MAX_DEPTH} deep")
        self._open.add(id(value))
        try:
            return encode(self, value, path) if encode else self._registered(value, path)
        finally:
            self._open.discard(id(value))

    def _registered(self, value: Any, path: _Path) -> Any:
        codec = _codecs_by_class[type(value)]
        try:
            made = codec.encode(value)
        except Exception as error:
            reason = f"its registered codec {codec.name!r} raised {type(error).__name__}: {error}"
            raise UnencodableError(str(path), type_name_of(value), reason) from error
        return _ext(_Ext.REGISTERED, [codec.name, self.encode(made, path.child("<{}>", codec.name))])

    def _pickle(self, value: Any, path: _Path) -> Any:
        name = type_name_of(value)
        if self.strict:
            raise UnencodableError(
                str(path), name, "no codec knows it and strict mode does not let it travel as pickle"
            )
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            reason = f"it cannot be pickled ({type(error).__name__}: {error})"
            raise UnencodableError(str(path), name, reason) from error
        if name not in _warned_types:
            _warned_types.add(name)
            _log.warning("%s of type %s has no codec and travels as pickle", path, name)
        return _ext(_Ext.PICKLED, [name, data])


def _ext(code: _Ext, tree: Any) -> msgpack.ExtType:
    return msgpack.ExtType(int(code), pack(tree))


def _encode_int(value: int) -> Any:
    if _INT64_MIN <= value <= _UINT64_MAX:
        return value
    nbytes = value.bit_length() // 8 + 1
    return msgpack.ExtType(int(_Ext.BIG_INT), value.to_bytes(nbytes, "little", signed=True))


def _encode_list(encoder: _Encoder, value: list[Any], path: _Path) -> Any:
    return [encoder.encode(element, path.child("[{}]", i)) for i, element in enumerate(value)]


def _encode_dict(encoder: _Encoder, value: dict[Any, Any], path: _Path) -> Any:
    if all(type(key) is str for key in value):
        return {key: encoder.encode(element, path.child("[{!r}]", key)) for key, element in value.items()}
    pairs: list[Any] = []
    for key, element in value.items():
        pairs.append(encoder.encode(key, path.child(".key({!r})", key)))
        pairs.append(encoder.encode(element, path.child("[{!r}]", key)))
    return _ext(_Ext.PAIRS, pairs)


def _encode_tuple(encoder: _Encoder, value: tuple[Any, ...], path: _Path) -> Any:
    return _ext(_Ext.TUPLE, [encoder.encode(part, path.child("[{}]", i)) for i, part in enumerate(value)])


def _encode_set(encoder: _Encoder, value: set[Any] | frozenset[Any], path: _Path) -> Any:
    trees = [encoder.encode(element, path.child("<{!r}>", element)) for element in value]
    return _ext(_Ext.SET if type(value) is set else _Ext.FROZENSET, sorted(trees, key=pack))


def _encode_complex(_encoder: _Encoder, value: complex, _path: _Path) -> Any:
    return msgpack.ExtType(int(_Ext.COMPLEX), _COMPLEX.pack(value.real, value.imag))


def _encode_bytearray(_encoder: _Encoder, value: bytearray, _path: _Path) -> Any:
    return msgpack.ExtType(int(_Ext.BYTEARRAY), bytes(value))


def _encode_bounds(encoder: _Encoder, value: range | slice, path: _Path) -> Any:
    bounds = [encoder.encode(bound, path) for bound in (value.start, value.stop, value.step)]
    return _ext(_Ext.RANGE if type(value) is range else _Ext.SLICE, bounds)


def _encode_size(_encoder: _Encoder, value: torch.Size, path: _Path) -> Any:
    if not all(isinstance(length, int) for length in value):
        raise UnencodableError(str(path), "torch.Size", "its lengths are not plain integers")
    return _ext(_Ext.SIZE, [int(length) for length in value])


def _encode_torch_name(code: _Ext) -> Callable[[_Encoder, Any, _Path], Any]:
    def encode(_encoder: _Encoder, value: Any, _path: _Path) -> Any:
        return _ext(code, str(value).removeprefix("torch."))

    return encode


def _encode_device(_encoder: _Encoder, value: torch.device, _path: _Path) -> Any:
    return _ext(_Ext.DEVICE, [value.type, value.index])


def _encode_path(_encoder: _Encoder, value: pathlib.PurePath, _path: _Path) -> Any:
    return _ext(_Ext.PATH, [type(value).__name__, str(value)])


def _encode_timedelta(_encoder: _Encoder, value: timedelta, _path: _Path) -> Any:
    return _ext(_Ext.TIMEDELTA, [value.days, value.seconds, value.microseconds])


def _encode_uuid(_encoder: _Encoder, value: uuid.UUID, _path: _Path) -> Any:
    return msgpack.ExtType(int(_Ext.UUID), value.bytes)


def _encode_enum(_encoder: _Encoder, value: Enum, _path: _Path) -> Any:
    return _ext(_Ext.ENUM, [type(value).__name__, value.name])


def _encode_record(encoder: _Encoder, value: Any, path: _Path) -> Any:
    cls = type(value)
    attributes = vars(value)
    if cls is _StorageInfo:
        # Its __getstate__ leaves None out; so do we, to rebuild what every other way of sending gives.
        attributes = {name: attribute for name, attribute in attributes.items() if attribute is not None}
    names = _FIELDS[cls]
    if not attributes.keys() <= set(names):
        return encoder._pickle(value, path)  # noqa: SLF001 - part of the encoder, split by type
    # In the order of the class, not of the object: unpickling changes that, and equal is to be equal bytes.
    present = [name for name in names if name in attributes]
    trees = [encoder.encode(attributes[name], path.child(".{}", name)) for name in present]
    if len(present) == len(names):
        return _ext(_Ext.RECORD, [cls.__name__, *trees])
    return _ext(_Ext.PARTIAL_RECORD, [cls.__name__, dict(zip(present, trees, strict=True))])


_PLAIN: frozenset[type] = frozenset((type(None), bool, float, str, bytes))
_ENCODERS: dict[type, Callable[[_Encoder, Any, _Path], Any]] = {
    list: _encode_list,
    dict: _encode_dict,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_set,
    complex: _encode_complex,
    bytearray: _encode_bytearray,
    range: _encode_bounds,
    slice: _encode_bounds,
    torch.Size: _encode_size,
    torch.dtype: _encode_torch_name(_Ext.DTYPE),
    torch.layout: _encode_torch_name(_Ext.LAYOUT),
    torch.memory_format: _encode_torch_name(_Ext.MEMORY_FORMAT),
    torch.device: _encode_device,
    timedelta: _encode_timedelta,
    uuid.UUID: _encode_uuid,
    **dict.fromkeys(_PATHS.values(), _encode_path),
    **dict.fromkeys(_ENUMS.values(), _encode_enum),
    **dict.fromkeys(_RECORDS.values(), _encode_record),
}


# --------------------------------------------------------------------------------------------------
# Decoding


def decode_object(tree: Any, *, path: str) -> Any:
    """Make the value again that ``encode_object`` made ``tree`` of.

    Args:
        tree: a msgpack tree, as it came.
        path: where it stands in the message, for errors.

    Raises:
        PayloadError: if the tree breaks the format, names a codec that is not registered here, or the
            codec or pickle that is to rebuild a part raises.
    """
    try:
        return _decode(tree, _Path(None, "{}", path, 0))
    except WireError:
        raise
    except Exception as error:
        # Constructors of the types above refuse what no encoder of ours would have written.
        raise PayloadError(path, "an object of ours", f"{type(error).__name__}: {error}") from error


def _decode(tree: Any, path: _Path) -> Any:
    cls = type(tree)
    if cls in _PLAIN or cls is int:
        return tree
    if path.depth > _MAX_DEPTH:
        raise PayloadError(str(path), f"nesting of at most {_MAX_DEPTH}", "more")
    if cls is list:
        return [_decode(element, path.child("[{}]", i)) for i, element in enumerate(tree)]
    if cls is dict:
        return {
            expect_str(key, path): _decode(element, path.child("[{!r}]", key))
            for key, element in tree.items()
        }
    if cls is not msgpack.ExtType:
        raise PayloadError(str(path), "an object", describe(tree))
    decode = _DECODERS.get(tree.code)
    if decode is None:
        raise PayloadError(str(path), "a known extension", f"extension {tree.code}")
    return decode(tree.data, path)


def _decode_elements(data: bytes, path: _Path) -> list[Any]:
    return [
        _decode(element, path.child("[{}]", i)) for i, element in enumerate(expect_list(unpack(data), path))
    ]


def _decode_big_int(data: bytes, _path: _Path) -> int:
    return int.from_bytes(data, "little", signed=True)


def _decode_pairs(data: bytes, path: _Path) -> dict[Any, Any]:
    elements = _decode_elements(data, path)
    if len(elements) % 2:
        raise PayloadError(str(path), "keys and values", f"{len(elements)} elements")
    value = dict(zip(elements[::2], elements[1::2], strict=True))
    if len(value) * 2 != len(elements):
        raise PayloadError(str(path), "keys that all differ", "one of them twice")
    return value


def _decode_tuple(data: bytes, path: _Path) -> tuple[Any, ...]:
    return tuple(_decode_elements(data, path))


def _decode_set(data: bytes, path: _Path) -> set[Any]:
    return set(_decode_elements(data, path))


def _decode_frozenset(data: bytes, path: _Path) -> frozenset[Any]:
    return frozenset(_decode_elements(data, path))


def _decode_complex(data: bytes, path: _Path) -> complex:
    return complex(*_COMPLEX.unpack(expect_bytes(data, path, _COMPLEX.size)))


def _decode_bytearray(data: bytes, _path: _Path) -> bytearray:
    return bytearray(data)


def _decode_range(data: bytes, path: _Path) -> range:
    start, stop, step = _decode_elements(data, path)
    return range(start, stop, step)


def _decode_slice(data: bytes, path: _Path) -> slice:
    start, stop, step = _decode_elements(data, path)
    return slice(start, stop, step)


def _decode_size(data: bytes, path: _Path) -> torch.Size:
    lengths = expect_list(unpack(data), path)
    return torch.Size([expect_int(length, path) for length in lengths])


def _decode_torch_name(kind: str, names: dict[str, Any]) -> Callable[[bytes, _Path], Any]:
    def decode(data: bytes, path: _Path) -> Any:
        name = expect_str(unpack(data), path)
        if name not in names:
            raise PayloadError(str(path), f"a {kind} of this torch", describe(name))
        return names[name]

    return decode


def _decode_device(data: bytes, path: _Path) -> torch.device:
    kind, index = expect_list(unpack(data), path, 2)
    expect_str(kind, path)
    return torch.device(kind) if index is None else torch.device(kind, expect_int(index, path, 0, 127))


def _decode_path(data: bytes, path: _Path) -> pathlib.PurePath:
    name, text = expect_str_list(unpack(data), path)
    if name not in _PATHS:
        raise PayloadError(str(path), "a class of pathlib", describe(name))
    return _PATHS[name](text)


def _decode_timedelta(data: bytes, path: _Path) -> timedelta:
    days, seconds, microseconds = (expect_int(part, path) for part in expect_list(unpack(data), path, 3))
    return timedelta(days, seconds, microseconds)


def _decode_uuid(data: bytes, path: _Path) -> uuid.UUID:
    return uuid.UUID(bytes=expect_bytes(data, path, 16))


def _decode_enum(data: bytes, path: _Path) -> Enum:
    class_name, member_name = expect_str_list(unpack(data), path)
    if class_name not in _ENUMS or member_name not in _ENUMS[class_name].__members__:
        raise PayloadError(str(path), "a member of DCP's enums", f"{class_name[:60]}.{member_name[:60]}")
    return _ENUMS[class_name][member_name]


def _record_class(name: Any, path: _Path) -> type:
    cls = _RECORDS.get(name) if type(name) is str else None
    if cls is None:
        raise PayloadError(str(path), "a dataclass of DCP", describe(name))
    return cls


def _decode_record(data: bytes, path: _Path) -> Any:
    parts = expect_list(unpack(data), path)
    cls = _record_class(parts[0] if parts else None, path)
    names = _FIELDS[cls]
    if len(parts) != len(names) + 1:
        raise PayloadError(str(path), f"{len(names)} fields of {cls.__name__}", f"{len(parts) - 1}")
    return _make_record(cls, dict(zip(names, parts[1:], strict=True)), path)


def _decode_partial_record(data: bytes, path: _Path) -> Any:
    name, trees = expect_list(unpack(data), path, 2)
    cls = _record_class(name, path)
    if type(trees) is not dict or not trees.keys() <= set(_FIELDS[cls]):
        raise PayloadError(str(path), f"fields of {cls.__name__}", describe(trees))
    return _make_record(cls, trees, path)


def _make_record(cls: type, trees: dict[str, Any], path: _Path) -> Any:
    record: Any = object.__new__(cls)
    for name, tree in trees.items():
        # Most of these classes are frozen, and __init__ would set attributes that were not there.
        object.__setattr__(record, name, _decode(tree, path.child(".{}", name)))
    return record


def _decode_registered(data: bytes, path: _Path) -> Any:
    name, tree = expect_list(unpack(data), path, 2)
    codec = _codecs_by_name.get(expect_str(name, path))
    if codec is None:
        raise PayloadError(
            str(path),
            "a codec registered on this rank",
            f"one named {describe(name)}; call planner.register_codec(cls, name={describe(name)}, ...) on "
            "every rank before the first save",
        )
    made = _decode(tree, path.child("<{}>", name))
    try:
        return codec.decode(made)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise PayloadError(str(path), f"what codec {name!r} can decode", found) from error


def _decode_pickled(data: bytes, path: _Path) -> Any:
    name, pickled = expect_list(unpack(data), path, 2)
    expect_str(name, path)
    expect_bytes(pickled, path)
    try:
        return pickle.loads(pickled)  # noqa: S301 - as stock DCP does, and refused at the origin when strict
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise PayloadError(str(path), f"a pickle of {describe(name)} that loads here", found) from error


_DECODERS: dict[int, Callable[[bytes, _Path], Any]] = {
    _Ext.BIG_INT: _decode_big_int,
    _Ext.PAIRS: _decode_pairs,
    _Ext.TUPLE: _decode_tuple,
    _Ext.SET: _decode_set,
    _Ext.FROZENSET: _decode_frozenset,
    _Ext.COMPLEX: _decode_complex,
    _Ext.BYTEARRAY: _decode_bytearray,
    _Ext.RANGE: _decode_range,
    _Ext.SLICE: _decode_slice,
    _Ext.SIZE: _decode_size,
    _Ext.DTYPE: _decode_torch_name("dtype", _DTYPES),
    _Ext.LAYOUT: _decode_torch_name("layout", _LAYOUTS),
    _Ext.MEMORY_FORMAT: _decode_torch_name("memory format", _MEMORY_FORMATS),
    _Ext.DEVICE: _decode_device,
    _Ext.PATH: _decode_path,
    _Ext.TIMEDELTA: _decode_timedelta,
    _Ext.UUID: _decode_uuid,
    _Ext.ENUM: _decode_enum,
    _Ext.RECORD: _decode_record,
    _Ext.PARTIAL_RECORD: _decode_partial_record,
    _Ext.REGISTERED: _decode_registered,
    _Ext.PICKLED: _decode_pickled,
}
