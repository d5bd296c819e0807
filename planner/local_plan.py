"""The local plan of DCP's own planner, computed once for each distinct layout among a rank's entries.

``DefaultSavePlanner`` asks of each entry where its shard lies in the whole tensor, which takes most of the
time of a local plan; a rank with thousands of entries has a few dozen layouts. Torch's own code makes
the item of the first entry of each, and the others get the same under their own name.

Layouts are read anew at each save and compared by value: nothing is kept from one save to the next, so
nothing can be stale, and each plan consists of new objects, as torch's does.

Whatever is not plainly in order is left to torch: other planners, functions of torch that were replaced or
look at more than was known when this was written, and, one by one, entries of other kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from planner.known_code import Known, are_known, names
from planner.wire.gc_pause import paused_gc
from planner.wire.tensors import FIELDS_ARE_KNOWN, is_regular_item
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
    and the errors are those of ``DefaultSavePlanner.create_local_plan`` of the torch in use.
    """
    if not _is_default(inner) or not _is_code_known():
        return inner.create_local_plan()  # type: ignore[no-any-return]  # checked by the caller
    with paused_gc():
        items = _create_items(inner.state_dict, is_coordinator=inner.is_coordinator)
    plan = SavePlan(items)
    if inner.flatten_state_dict:
        plan = SavePlan(items, planner_data=inner.mappings)
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
        (helpers.compute_local_shape_and_global_offset, _utils),  # type: ignore[attr-defined]
        (TensorProperties.create_from_tensor, None),
        (tensor.__create_write_items__, None),
        (tensor._raise_if_contains_partial_placements, None),  # noqa: SLF001 - the same
        (tensor.to_local, None),
    )


def _create_items(state_dict: dict[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
    """Return the items of ``create_default_local_save_plan``."""
    templates: dict[Any, _Template | None] = {}
    seen: dict[int, Any] = {}
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        layout = _layout_of(value, seen)
        if layout in templates:
            template = templates[layout]
            if template is not None:
                items.append(_make_item(fqn, template))
            continue
        made = default_planner.create_default_local_save_plan({fqn: value}, is_coordinator).items
        items += made
        if layout is not None and not made:
            templates[layout] = None  # this rank is not in its mesh
        elif layout is not None and _is_alike(made, fqn):
            templates[layout] = _read_template(made[0])
    return items


# Type, hint and offset of the index; offsets and sizes of the chunk; fields of the properties; size.
_Template = tuple[WriteItemType, Any, torch.Size, torch.Size, torch.Size, dict[str, Any], torch.Size]


def _make_item(fqn: str, template: _Template) -> WriteItem:
    """Do what the classes' own ``__init__`` does, which takes twice as long where they are frozen."""
    kind, hint, offset, offsets, sizes, properties, size = template
    new = object.__new__
    index = new(MetadataIndex)
    fields = index.__dict__
    fields["fqn"] = fqn
    fields["index"] = hint
    fields["offset"] = offset
    own_properties = new(TensorProperties)
    own_properties.__dict__.update(properties)
    data = new(TensorWriteData)
    fields = data.__dict__
    fields["chunk"] = ChunkStorageMetadata(offsets, sizes)
    fields["properties"] = own_properties
    fields["size"] = size
    item = new(WriteItem)
    fields = item.__dict__
    fields["index"] = index
    fields["type"] = kind
    fields["bytes_io_data"] = None
    fields["tensor_data"] = data
    return item


def _is_alike(made: list[WriteItem], fqn: str) -> bool:
    """Whether these items of an entry are one that every entry of its layout has under its own name."""
    if len(made) != 1 or made[0].index.fqn != fqn:
        return False
    return made[0].type is not WriteItemType.BYTE_IO and is_regular_item(made[0])


def _read_template(item: WriteItem) -> _Template:
    index, data = item.index, item.tensor_data
    assert data is not None and index.offset is not None  # noqa: S101, PT018 - regular, and no bytes
    return (
        item.type, index.index, index.offset, data.chunk.offsets, data.chunk.sizes,
        dict(data.properties.__dict__), data.size,
    )  # fmt: skip


def _layout_of(value: Any, seen: dict[int, Any]) -> Any:
    """Return all that the item of an entry depends on but its name, or None where that is not known.

    Args:
        value: the entry.
        seen: what meshes and placements come down to, by identity; added to. They live as long as the
            state dict does, and many entries share them.
    """
    kind = type(value)
    if kind is not DTensor:
        if (kind is not torch.Tensor and kind is not Parameter) or hasattr(value, "__create_write_items__"):
            return None
        return (value.shape, value.dtype, value.layout, value.requires_grad, value.is_pinned())
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
