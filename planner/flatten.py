"""A state dict made flat as DCP's own planner does it, in one walk in place of two.

``DefaultSavePlanner`` walks over a state dict to flatten it and again to look for sharded tensors within
sharded tensors, asking of each value whether it is a mapping. Lists are left to torch's own code, and state
dicts with sharded tensors, or that cannot be made flat, altogether.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import (
    _nested_dict,
    _sharded_tensor_utils,
    _traverse,
    _version,
    default_planner,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from planner.known_code import Known, are_known, names
from planner.wire.gc_pause import paused_gc
from planner.wrapping import is_inherited

__all__ = ["set_up_planner"]

_Path = tuple[str | int, ...]

_KNOWN: Known = {
    "set_up_planner": names(
        "flatten_state_dict mappings flatten_sharded_tensors _flatten_sharded_tensors state_dict "
        "is_coordinator"
    ),
    "flatten_state_dict": names(
        "OBJ_PATH STATE_DICT_ITEM _version _derived_version traverse_state_dict_v_2_3 traverse_state_dict "
        "join map str ValueError"
    ),
    "traverse_state_dict": names(
        "STATE_DICT_ITEM OBJ_PATH bool items str isinstance Mapping list tuple enumerate"
    ),
    "_flatten_sharded_tensors": names(
        "OBJ_PATH STATE_DICT_ITEM traverse_state_dict isinstance ShardedTensor set_element local_shards len "
        "tensor ValueError Shard ShardMetadata _element_wise_add metadata shard_offsets shard_sizes dist "
        "get_rank device copy deepcopy _normalize_device_info type enumerate shards_metadata pop "
        "_remote_device placement append _init_from_local_shards_and_global_metadata"
    ),
}


def set_up_planner(inner: Any, state_dict: Any, *, is_coordinator: bool) -> bool:
    """Do what ``DefaultSavePlanner.set_up_planner`` does, or return False where that is for torch to do.

    Called on all ranks; not collective. What is flattened are dicts and what torch would flatten in them;
    its errors are left to torch.
    """
    if (
        not is_inherited(inner, "set_up_planner", DefaultSavePlanner)
        or not inner.flatten_state_dict
        or not inner.flatten_sharded_tensors
        or _version._derived_version is not None  # noqa: SLF001 - torch then flattens as torch 2.3 did
        or not isinstance(state_dict, dict)
        or not _is_code_known()
    ):
        return False
    flattened: dict[str, Any] = {}
    mappings: dict[str, _Path] = {}
    with paused_gc():
        if not _flatten(state_dict, (), "", flattened, mappings):
            return False
    inner.mappings = mappings
    inner.state_dict = flattened
    inner.is_coordinator = is_coordinator
    return True


def _is_code_known() -> bool:
    flatten, shards = default_planner.flatten_state_dict, default_planner._flatten_sharded_tensors  # type: ignore[attr-defined]  # noqa: SLF001 - as torch looks it up
    return are_known(
        _KNOWN,
        (DefaultSavePlanner.set_up_planner, default_planner),
        (flatten, _nested_dict),
        (_nested_dict.traverse_state_dict, _traverse),  # type: ignore[attr-defined]  # as torch looks it up
        (shards, _sharded_tensor_utils),
        (_sharded_tensor_utils.traverse_state_dict, _traverse),  # type: ignore[attr-defined]  # the same
    )


# Most entries are one of these, and it takes long to find out what others are.
_LEAVES: frozenset[type] = frozenset(
    (torch.Tensor, Parameter, DTensor, int, float, str, bool, bytes, type(None))
)


def _is_leaf(value: Any) -> bool:
    """Whether ``value``, which is no list, is an entry by itself; torch takes sharded tensors apart."""
    return type(value) in _LEAVES or not isinstance(value, (Mapping, list, ShardedTensor))


def _flatten(
    values: Mapping[Any, Any],
    path: _Path,
    prefix: str,
    flattened: dict[str, Any],
    mappings: dict[str, _Path],
) -> bool:
    """Put the entries of ``values`` into ``flattened`` and ``mappings``; False where torch has to."""
    for key, value in values.items():
        name = key if type(key) is str else str(key)
        fqn = prefix + name
        if _is_leaf(value):
            if fqn in flattened:
                return False
            flattened[fqn] = value
            mappings[fqn] = (*path, name)
        elif isinstance(value, Mapping):
            if not _flatten(value, (*path, name), f"{fqn}.", flattened, mappings):
                return False
        elif type(value) is not list or not _flatten_list(value, (*path, name), flattened, mappings):
            return False
    return True


def _flatten_list(
    values: list[Any],
    path: _Path,
    flattened: dict[str, Any],
    mappings: dict[str, _Path],
) -> bool:
    """The same for a list, which torch itself takes apart where it holds tensors or dicts."""
    found: list[tuple[_Path, Any]] = []
    _traverse.traverse_state_dict({"": values}, lambda *path_and_value: found.append(path_and_value))
    for inner_path, value in found:
        whole = (*path, *inner_path[1:])
        fqn = ".".join(map(str, whole))
        if fqn in flattened or not (_is_leaf(value) or type(value) is list):
            return False
        flattened[fqn] = value
        mappings[fqn] = whole
    return True
