"""Objects: every plain value comes back exactly; anything else is pickled, and said so, or refused."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import uuid

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import PayloadError, UnencodableError, WireError
from planner.wire import objects
from planner.wire.frame import pack, unpack
from planner.wire.objects import decode_object, encode_object, register_codec
from tests import strategies

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


class Foreign:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Foreign and other.value == self.value

    __hash__ = None


class Labelled(str):
    """A subclass of a plain type is not that type."""

    __slots__ = ()


class Angry:
    def __reduce__(self):
        raise ZeroDivisionError("no")


class Registered:
    def __init__(self, number):
        self.number = number


def there_and_back(value, *, strict=True):
    tree = unpack(pack(encode_object(value, path="v", strict=strict)))
    return decode_object(tree, path="v")


def exactly(value):
    """Write a value with every type in it, so that 1, True and 1.0 differ."""
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(element) for element in value]
    if isinstance(value, dict):
        return type(value), [(exactly(key), exactly(element)) for key, element in value.items()]
    return type(value), value


@QUICK
@given(strategies.PLAIN)
def test_plain_values_come_back_with_their_types_and_order_and_without_pickle(value):
    assert exactly(there_and_back(value)) == exactly(value)


@QUICK
@given(strategies.PLAIN)
def test_equal_values_give_equal_bytes(value):
    again = there_and_back(value)
    assert pack(encode_object(again, path="v", strict=True)) == pack(
        encode_object(value, path="v", strict=True)
    )


def test_every_dtype_of_this_torch_comes_back():
    dtypes = {value for value in vars(torch).values() if type(value) is torch.dtype}
    assert len(dtypes) > 20
    assert all(there_and_back(dtype) is dtype for dtype in dtypes)


@pytest.mark.parametrize(
    "value",
    [
        MetadataIndex("a"),
        MetadataIndex("a", [1, 2], 3),
        MetadataIndex("a", None, 3),
        _StorageInfo("p", 1, 2),
        _StorageInfo("p", 1, 2, ["zstd"]),
        _StorageInfo("p", 1, 2, ("zstd",)),
        _StoragePrefix("__0_"),
        StorageMeta("/x", "s", "l", ["m"]),
        TensorProperties(dtype=torch.float16),
        WriteResult(MetadataIndex("a", [0], 1), 3, _StorageInfo("p", 0, 3)),
        LoadPlan([ReadItem(LoadItemType.TENSOR, MetadataIndex("a"), torch.Size([1]),
                           MetadataIndex("b"), torch.Size([0]), torch.Size([2]))]),
        SavePlan([], {"fqn_to_index_mapping": {"a": 1}, "shard_index": 2}),
        Metadata({}, storage_data={MetadataIndex("a", [0]): _StorageInfo("p", 0, 1)}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_dataclasses_of_dcp_come_back_as_from_pickle_without_pickle(value):
    found, expected = there_and_back(value), pickle.loads(pickle.dumps(value))
    assert type(found) is type(value)
    assert found == value
    assert vars(found) == vars(expected)


def test_attributes_that_older_pickles_lack_stay_missing():
    metadata = Metadata({})
    del metadata.__dict__["version"]
    assert "version" not in vars(there_and_back(metadata))


def test_a_dataclass_with_more_attributes_than_dcp_gave_it_is_anything_else():
    chunk = ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    chunk.more = 1
    assert there_and_back(chunk, strict=False).more == 1
    with pytest.raises(UnencodableError):
        there_and_back(chunk)


def test_subclasses_are_anything_else(caplog):
    with caplog.at_level(logging.WARNING, "planner.wire.objects"):
        assert type(there_and_back(Labelled("x"), strict=False)) is Labelled


def test_anything_else_is_pickled_alone_with_one_warning_for_its_type(caplog, monkeypatch):
    monkeypatch.setattr(objects, "_warned_types", set())
    value = {"index": [0, Foreign(1), Foreign(2)]}
    with caplog.at_level(logging.WARNING, "planner.wire.objects"):
        assert there_and_back(value, strict=False) == value
        assert there_and_back(value, strict=False) == value
    (record,) = caplog.records
    assert "v['index'][1]" in record.getMessage()
    assert "Foreign" in record.getMessage()


def test_strict_refuses_what_only_pickle_can_carry_and_says_where():
    with pytest.raises(UnencodableError, match="strict") as caught:
        encode_object({"index": [0, Foreign(1)]}, path="plan.storage_data", strict=True)
    assert caught.value.path == "plan.storage_data['index'][1]"
    assert caught.value.type_name.endswith("Foreign")


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, Angry()], ids=["lock", "lambda", "angry"])
def test_what_cannot_be_pickled_is_unencodable_from_its_cause(value):
    with pytest.raises(UnencodableError) as caught:
        encode_object([value], path="v", strict=False)
    assert caught.value.path == "v[0]"
    assert caught.value.__cause__ is not None


def test_cycles_and_deep_nesting_are_unencodable():
    cycle = []
    cycle.extend([cycle] * 10)
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in (cycle, deep, {"a": cycle}, SavePlan(cycle)):
        with pytest.raises(UnencodableError):
            encode_object(value, path="v", strict=True)
    shared = [1]
    assert there_and_back([shared, shared]) == [[1], [1]]


def test_a_registered_codec_carries_its_class_by_name():
    name = f"test.{uuid.uuid4()}"
    cls = type("Fresh", (Registered,), {})
    register_codec(cls, name=name, encode=lambda value: (value.number,), decode=lambda made: cls(*made))
    assert there_and_back([cls(2**70)])[0].number == 2**70
    with pytest.raises(UnencodableError):
        there_and_back(type("Sub", (cls,), {})(1))


def test_a_taken_name_or_class_is_a_value_error():
    name = f"test.{uuid.uuid4()}"
    cls, other = type("A", (), {}), type("B", (), {})
    encode, decode = (lambda _: 1), (lambda _: cls())
    register_codec(cls, name=name, encode=encode, decode=decode)
    register_codec(cls, name=name, encode=encode, decode=decode)
    for taken_cls, taken_name in (
        (other, name),
        (cls, name + "2"),
        (list, name + "3"),
        (SavePlan, name + "4"),
    ):
        with pytest.raises(ValueError, match="codec"):
            register_codec(taken_cls, name=taken_name, encode=lambda _: 1, decode=lambda _: 2)


def test_an_unknown_codec_is_a_payload_error_that_names_it():
    tree = msgpack.ExtType(objects._Ext.REGISTERED, pack(["their.codec", 1]))
    with pytest.raises(PayloadError, match=r"their\.codec"):
        decode_object([tree], path="v")


def test_codecs_that_raise_are_wrapped():
    name = f"test.{uuid.uuid4()}"
    cls = type("Bad", (), {})
    register_codec(cls, name=name, encode=lambda value: value.missing, decode=lambda _: 1 / 0)
    with pytest.raises(UnencodableError) as caught:
        encode_object(cls(), path="v", strict=True)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(PayloadError) as found:
        decode_object(msgpack.ExtType(objects._Ext.REGISTERED, pack([name, 1])), path="v")
    assert isinstance(found.value.__cause__, ZeroDivisionError)


def test_a_pickle_that_does_not_load_is_a_payload_error():
    for data in (b"", b"garbage", b"cno_such_module\nname\n."):
        with pytest.raises(PayloadError) as caught:
            decode_object(msgpack.ExtType(objects._Ext.PICKLED, pack(["x.Y", data])), path="v[0]")
        assert caught.value.path == "v[0]"
        assert caught.value.__cause__ is not None


@QUICK
@given(
    st.integers(0, 127),
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=20)
        | st.sampled_from(["WriteItem", "cpu", "float32", "PosixPath", "WriteItemType"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=6,
    ),
)  # fmt: skip
def test_any_extension_with_any_contents_is_a_value_or_a_wire_error(code, contents):
    if code == objects._Ext.PICKLED:
        return
    for data in (pack(contents), contents if isinstance(contents, bytes) else b""):
        with contextlib.suppress(WireError):
            decode_object(msgpack.ExtType(code, data), path="v")


def test_extensions_nested_without_end_are_a_payload_error():
    tree = 1
    for _ in range(400):
        tree = msgpack.ExtType(objects._Ext.TUPLE, pack([tree]))
    with pytest.raises(PayloadError):
        decode_object(tree, path="v")


def test_what_cannot_be_pickled_either_is_not_said_to_travel(caplog):
    class Local:
        """Pickle finds no class of this name."""

    with pytest.raises(UnencodableError):
        encode_object(Local(), path="plan", strict=False)
    assert not caplog.records
