"""Flatten mappings, the planner_data of ``DefaultSavePlanner``: flat key -> path in the state dict.

A key nearly always is its path joined by dots, and there are few ways in which paths fall apart: so a
path travels as the number of its *shape*, which says how many dot-separated words of the key each part
takes, and whether the part is an integer. ``model.layers.0.weight`` as ``("model", "layers.0.weight")``
has the shape ``[2, 6]``: one word, three words, twice that and one more for an integer.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

from planner.errors import PayloadError
from planner.wire.check import expect_bytes, expect_int, expect_list, expect_str_list
from planner.wire.columns import pack_ints, unpack_ints

__all__ = ["MappingPath", "decode_mapping", "encode_mapping", "is_flatten_mapping"]

MappingPath = tuple[str | int, ...]

# Shape 0: the path is written out; shape 1: the key is the only part; from 2 on: the table.
_EXPLICIT, _WHOLE_KEY, _NUM_RESERVED = 0, 1, 2
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_INT_CHARS = 20


def is_flatten_mapping(planner_data: Any) -> bool:
    """Whether ``planner_data`` consists of just such values as a flatten mapping does."""
    return (
        type(planner_data) is dict
        and set(map(type, planner_data)) <= {str}
        and set(map(type, planner_data.values())) <= {tuple}
        and set(map(type, chain.from_iterable(planner_data.values()))) <= {str, int}
    )


def encode_mapping(mapping: Any, names: list[str]) -> Any:
    """Make a tree of a flatten mapping, or None if it is anything else.

    Args:
        mapping: any planner_data.
        names: distinct strings that whoever decodes has too; keys among them cost next to nothing.
    """
    if type(mapping) is not dict:
        return None
    shapes: dict[tuple[int, ...], int] = {}
    codes: list[int] = []
    explicit: list[list[str | int]] = []
    for key, path in mapping.items():
        if type(key) is not str or type(path) is not tuple:
            return None
        if len(path) == 1 and path[0] == key and type(path[0]) is str:
            codes.append(_WHOLE_KEY)
            continue
        shape: list[int] = []
        for part in path:
            if type(part) is str:
                shape.append((part.count(".") + 1) * 2)
            elif type(part) is int and _INT64_MIN <= part <= _INT64_MAX:
                shape.append(3)
            else:
                return None
        if path and ".".join(map(str, path)) == key:
            codes.append(shapes.setdefault(tuple(shape), len(shapes) + _NUM_RESERVED))
        else:
            codes.append(_EXPLICIT)
            explicit.append(list(path))
    keys = list(mapping)
    return [
        _encode_keys(keys, names),
        [list(shape) for shape in shapes],
        pack_ints(codes),
        explicit,
    ]


def _encode_keys(keys: list[str], names: list[str]) -> Any:
    """Write keys as None (they are ``names``), or as their number in ``names`` and then new strings."""
    if keys == names:
        return None
    known = {name: number for number, name in enumerate(names)}
    new = [key for key in keys if key not in known]
    for key in new:
        known[key] = len(known)
    return [len(keys), new, pack_ints([known[key] for key in keys])]


def _decode_keys(tree: Any, names: list[str], path: str) -> list[str]:
    if tree is None:
        return names
    num_tree, new_tree, column = expect_list(tree, path, 3)
    new = expect_str_list(new_tree, f"{path}.new")
    # Each key takes at least a byte of its column, so the column's own size bounds the count.
    expect_bytes(expect_list(column, path, 2)[1], path)
    num_keys = expect_int(num_tree, f"{path}.count", 0, len(column[1]))
    known = [*names, *new]
    numbers = unpack_ints(column, count=num_keys, path=path, low=0, high=len(known) - 1)
    return [known[number] for number in numbers.tolist()]


def decode_mapping(tree: Any, names: list[str], *, path: str) -> dict[str, MappingPath]:
    """Make the mapping again, keys in their order.

    Raises:
        PayloadError: if ``tree`` is no mapping over ``names``.
    """
    keys_tree, shapes_tree, codes_tree, explicit_tree = expect_list(tree, path, 4)
    keys = _decode_keys(keys_tree, names, f"{path}.keys")
    shapes = [
        [expect_int(part, f"{path}.shapes", 2) for part in expect_list(shape, f"{path}.shapes")]
        for shape in expect_list(shapes_tree, f"{path}.shapes")
    ]
    codes = unpack_ints(
        codes_tree, count=len(keys), path=f"{path}.codes", low=0, high=len(shapes) + _NUM_RESERVED - 1
    ).tolist()
    explicit = expect_list(explicit_tree, f"{path}.explicit", codes.count(_EXPLICIT))
    written_out = iter(explicit)
    mapping: dict[str, MappingPath] = {}
    for key, code in zip(keys, codes, strict=True):
        if code == _WHOLE_KEY:
            mapping[key] = (key,)
        elif code == _EXPLICIT:
            mapping[key] = _explicit_path(next(written_out), f"{path}[{key!r}]")
        else:
            mapping[key] = _split_key(key, shapes[code - _NUM_RESERVED], path)
    if len(mapping) != len(keys):
        raise PayloadError(f"{path}.keys", "keys that all differ", "one of them twice")
    return mapping


def _explicit_path(tree: Any, path: str) -> MappingPath:
    parts = expect_list(tree, path)
    for part in parts:
        if type(part) is not str:
            expect_int(part, path)
    return tuple(parts)


def _split_key(key: str, shape: list[int], path: str) -> MappingPath:
    words = key.split(".")
    ends = [0]
    for part in shape:
        ends.append(ends[-1] + part // 2)
    if ends[-1] != len(words):
        raise PayloadError(f"{path}[{key!r}]", f"a key of {ends[-1]} words", f"{len(words)} words")
    parts: list[str | int] = []
    for part, (start, end) in zip(shape, pairwise(ends), strict=True):
        text = ".".join(words[start:end])
        parts.append(_int_of(text, f"{path}[{key!r}]") if part % 2 else text)
    return tuple(parts)


def _int_of(text: str, path: str) -> int:
    try:
        number = int(text) if len(text) <= _MAX_INT_CHARS else None
    except ValueError:
        number = None
    if number is None or str(number) != text:
        raise PayloadError(path, "an integer in the key", text[:_MAX_INT_CHARS])
    return number
