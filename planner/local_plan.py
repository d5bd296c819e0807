"""The local plan of DCP's own planner, computed once for each distinct layout among a rank's entries.

``DefaultSavePlanner`` asks of each entry where its shard lies in the whole tensor, which takes most of the
time of a local plan; a rank with thousands of entries has a few dozen layouts. Torch's own code makes
the item of the first entry of each, and the others get the same under their own name, once somebody
looks at the plan: see ``planner.wire.outline``.

Layouts are read anew at each save and compared by value: nothing of a state dict is kept from one save to
the next, so nothing can be stale, and each plan consists of new objects, as torch's does.

Whatever is not plainly in order is left to torch: other planners, functions of torch that were replaced or
look at more than was known when this was written, and, one by one, entries of other kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from planner.known_code import Known, are_known, names
from planner.wire.gc_pause import paused_gc
from planner.wire.outline import PlanOutline, Template, make_plan_later, read_template
from planner.wire.tensors import FIELDS_ARE_KNOWN
from planner.wrapping import is_inherited

__all__ = ["create_local_plan"]

# One that looks at more, say at strides, may make different items of entries that are alike here.
_KNOWN: Known = {
    "create_local_plan": names(
        "create_default_local_save_plan state_dict is_coordinator flatten_state_dict dataclasses replace "
        "mappings plan _enable_plan_caching _cached_plans_key SavePlanner _cached_save_plan "
        "_compare_save_plans logger info SavePlan _pending_local_plan"
    ),
    "create_default_local_save_plan": names(
        "items isinstance DTensor device_mesh get_coordinate _create_write_items SavePlan"
    ),
    "_create_write_items": names(
        "hasattr __create_write_items__ isinstance ShardedTensor local_shards torch Tensor metadata "
        "_create_write_item_for_shard _create_write_item_for_tensor _create_write_item_for_bytesio"
    ),
    "_create_write_items_for_dtensor": names(
        "compute_local_shape_and_global_offset shape device_mesh placements torch Size WriteItem "
        "MetadataIndex WriteItemType SHARD TensorWriteData ChunkStorageMetadata TensorProperties "
        "create_from_tensor to_local size"
    ),
    "_create_write_item_for_tensor": names(
        "torch Size len size WriteItem MetadataIndex WriteItemType TENSOR TensorWriteData "
        "ChunkStorageMetadata TensorProperties create_from_tensor"
    ),
    "_create_write_item_for_bytesio": names("WriteItem MetadataIndex WriteItemType BYTE_IO"),
    "compute_local_shape_and_global_offset": names(
        "_is_current_rank_part_of_mesh _compute_local_shape_and_global_offset shape get_coordinate "
        "_sym_get_coordinate"
    ),
    "create_from_tensor": names(
        "TensorProperties dtype layout requires_grad torch contiguous_format is_pinned"
    ),
    "__create_write_items__": names(
        "_raise_if_contains_partial_placements torch.distributed.checkpoint.planner_helpers "
        "_create_write_items_for_dtensor hasattr _local_tensor __create_write_items__ isinstance torch "
        "Tensor RuntimeError"
    ),
    "_raise_if_contains_partial_placements": names("_spec placements isinstance Partial ValueError any"),
    "to_local": names(
        "torch is_grad_enabled _local_tensor isinstance tuple _ToTorchTensor apply getattr view_as _is_param"
    ),
}


def create_local_plan(inner: Any) -> SavePlan:
    """Do what ``inner.create_local_plan()`` does, in less time where that is ``DefaultSavePlanner``'s.

    Called on all ranks, after ``set_up_planner``; not collective. The plan, the attributes of ``inner``
    and the errors are those of ``DefaultSavePlanner.create_local_plan`` of the torch in use, but that the
    plan may be pending, see ``planner.pending``.
    """
    if not _is_default(inner) or not _is_code_known():
        return inner.create_local_plan()  # type: ignore[no-any-return]  # checked by the caller
    planner_data = inner.mappings if inner.flatten_state_dict else None
    with paused_gc():
        plan = _plan(inner.state_dict, planner_data, is_coordinator=inner.is_coordinator)
    inner.plan = plan
    return plan


def _is_default(inner: Any) -> bool:
    return (
        FIELDS_ARE_KNOWN
        and is_inherited(inner, "create_local_plan", DefaultSavePlanner)
        and not inner._enable_plan_caching  # noqa: SLF001 - DCP's own cache, which looks at every plan
        and type(inner.state_dict) is dict
    )


def _is_code_known() -> bool:
    helpers, tensor = planner_helpers, DTensor
    return are_known(
        _KNOWN,
        (DefaultSavePlanner.create_local_plan, default_planner),
        (default_planner.create_default_local_save_plan, default_planner),
        (default_planner._create_write_items, helpers),  # type: ignore[attr-defined]  # noqa: SLF001 - as torch looks it up
        (helpers._create_write_items_for_dtensor, helpers),  # noqa: SLF001 - the same
        (helpers._create_write_item_for_tensor, helpers),  # noqa: SLF001 - the same
        (helpers._create_write_item_for_bytesio, helpers),  # noqa: SLF001 - the same
        (helpers.compute_local_shape_and_global_offset, _utils),  # type: ignore[attr-defined]
        (TensorProperties.create_from_tensor, None),
        (tensor.__create_write_items__, None),
        (tensor._raise_if_contains_partial_placements, None),  # noqa: SLF001 - the same
        (tensor.to_local, None),
    )


def _plan(state_dict: dict[str, Any], planner_data: Any, *, is_coordinator: bool) -> SavePlan:
    """Return the plan of ``create_default_local_save_plan``, to be made later where all is in order."""
    numbers: dict[Any, int] = {}  # by layout; of its template, or that this rank has nothing of it
    templates: list[Template] = []
    seen: dict[int, Any] = {}
    fqns: list[str] = []
    entries: list[int] = []
    odd: list[tuple[int, list[WriteItem]]] = []  # items that no template gives, and before which entry
    for fqn, value in state_dict.items():
        layout = _layout_of(value, seen)
        number = None if layout is None else numbers.get(layout)
        if number is None:
            made = default_planner.create_default_local_save_plan({fqn: value}, is_coordinator).items
            is_alike = layout is not None and len(made) == 1 and made[0].index.fqn == fqn
            template = read_template(made[0]) if is_alike else None
            if template is not None:
                number = numbers[layout] = len(templates)
                templates.append(template)
            elif layout is not None and not made:
                number = numbers[layout] = _NOT_IN_MESH
            else:
                odd.append((len(fqns), made))
                continue
        if number != _NOT_IN_MESH:
            fqns.append(fqn)
            entries.append(number)
    outline = PlanOutline(fqns, entries, templates, planner_data)
    if not odd and all(type(fqn) is str for fqn in fqns):
        return make_plan_later(outline)
    items, regular, start = [], outline.make_items(), 0
    for position, made in odd:
        items += [*regular[start:position], *made]
        start = position
    return SavePlan(items + regular[start:], planner_data=planner_data)


_NOT_IN_MESH = -1
_BYTES = "bytes"


def _layout_of(value: Any, seen: dict[int, Any]) -> Any:
    """Return all that the item of an entry depends on but its name, or None where that is not known.

    Args:
        value: the entry.
        seen: what meshes and placements come down to, by identity; added to. They live as long as the
            state dict does, and many entries share them.
    """
    kind = type(value)
    if kind is not DTensor:
        if hasattr(value, "__create_write_items__"):
            return None
        if kind is torch.Tensor or kind is Parameter:
            return (value.shape, value.dtype, value.layout, value.requires_grad, value.is_pinned())
        return None if isinstance(value, (torch.Tensor, ShardedTensor)) else _BYTES
    local = value._local_tensor  # noqa: SLF001 - what to_local() gives, without autograd
    if type(local) is not torch.Tensor or hasattr(local, "__create_write_items__"):
        return None
    if (attributes := value.__dict__) and "__create_write_items__" in attributes:
        return None
    spec = value._spec  # noqa: SLF001 - device_mesh and placements, without a property for each
    mesh = spec.mesh
    place = seen.get(id(mesh))
    if place is None:
        # FSDP2 with tensor parallelism has a mesh object for each parameter, all of them alike.
        coordinate = mesh.get_coordinate()
        place = seen[id(mesh)] = (mesh.shape, None if coordinate is None else tuple(coordinate))
    placements = spec.placements
    cuts = seen.get(id(placements))
    if cuts is None:
        cuts = seen[id(placements)] = tuple([_cut_of(placement) for placement in placements])
    if _UNKNOWN in cuts:
        return None
    return (
        value.shape, place, cuts, local.dtype, value.requires_grad, local.requires_grad, local.layout,
        local.is_pinned(),
    )  # fmt: skip


_REPLICATED, _UNKNOWN = -1, -2


def _cut_of(placement: Any) -> Any:
    kind = type(placement)
    if kind is Shard:
        return placement.dim
    if kind is Replicate:
        return _REPLICATED
    if kind is _StridedShard:
        return placement.dim, placement.split_factor
    return _UNKNOWN
