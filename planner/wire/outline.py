"""A local plan in few words: names, and the few different items among those that have them.

A rank with thousands of entries has a few dozen layouts, and the items of a layout differ in their names
alone. So much says what the whole plan is, and makes its items, new ones each time.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from planner.pending import Pending, source_of
from planner.wire.frame import digest
from planner.wire.gc_pause import paused_gc
from planner.wire.mappings import is_flatten_mapping
from planner.wire.tensors import PropertyValues, is_regular_item, property_values

__all__ = [
    "PlanOutline",
    "Template",
    "TensorParts",
    "make_plan_later",
    "outline_of",
    "planner_data_of",
    "read_template",
    "template_of",
]

TensorParts = tuple[torch.Size, torch.Size, PropertyValues, torch.Size]
"""Of a tensor the offsets and sizes of its chunk, its properties, its size."""

Template = tuple[WriteItemType, int | None, TensorParts | None]
"""An item but for its name: its type, its index hint, and what it has as a tensor."""


def read_template(item: WriteItem) -> Template | None:
    """Return all but the name of an item; None for one that has more to it, see ``is_regular_item``."""
    return template_of(item) if is_regular_item(item) and item.bytes_io_data is None else None


def template_of(item: WriteItem) -> Template:
    """Return all but the name, and a number of bytes, of a regular item."""
    index, data = item.index, item.tensor_data
    if data is None:
        return (item.type, index.index, None)
    values = property_values(data.properties)
    return (item.type, index.index, (data.chunk.offsets, data.chunk.sizes, values, data.size))


class PlanOutline:
    """What a local plan consists of; to be called to make it.

    Args:
        fqns: the names of its items, in order, no two equal.
        numbers: the template of each, by its number.
        templates: the different items.
        planner_data: the plan's own.
    """

    storage_data = None
    usable = True

    def __init__(
        self, fqns: list[str], numbers: Sequence[int], templates: Sequence[Template], planner_data: Any
    ) -> None:
        self.fqns = fqns
        self.planner_data = planner_data
        self._numbers = numbers
        self._templates = templates

    def __len__(self) -> int:
        return len(self.fqns)

    def __call__(self) -> SavePlan:
        """Make the plan; all but its ``planner_data`` is new."""
        with paused_gc():
            return SavePlan(self.make_items(), planner_data=self.planner_data)

    def digest(self) -> bytes | None:
        """Return what only an equal plan has too; None where ``planner_data`` is no flatten mapping."""
        if self.planner_data is not None and not is_flatten_mapping(self.planner_data):
            return None
        # Has one way to write these values, unlike pickle. Of others, such as arrays, it loses the type.
        told: Any = (self.fqns, self._numbers, repr(self._templates), self.planner_data)
        return digest(marshal.dumps(told, 0))

    def entries(self) -> Iterator[tuple[str, WriteItemType, int | None, TensorParts | None]]:
        """Yield each item: its name, and its template."""
        return ((fqn, *self._templates[number]) for fqn, number in zip(self.fqns, self._numbers, strict=True))

    def make_items(
        self, positions: Sequence[int] | None = None, hints: Sequence[int | None] | None = None
    ) -> list[WriteItem]:
        """Make items of the plan, new ones at every call.

        Args:
            positions: those to make; None for all.
            hints: the index hint of each; None for their own.
        """
        positions = range(len(self)) if positions is None else positions
        fqns = map(self.fqns.__getitem__, positions)
        templates = [self._templates[self._numbers[position]] for position in positions]
        return list(map(_make_item, fqns, templates, self.own_hints(positions) if hints is None else hints))

    def own_hints(self, positions: Sequence[int]) -> Iterator[int | None]:
        """Yield the index hints that items have by themselves."""
        return (self._templates[self._numbers[position]][1] for position in positions)


def _make_item(fqn: str, template: Template, hint: int | None) -> WriteItem:
    """Do what the classes' own ``__init__`` does, which takes twice as long where they are frozen."""
    kind, _, tensor = template
    new = object.__new__
    index = new(MetadataIndex)
    fields = index.__dict__
    fields["fqn"] = fqn
    fields["index"] = hint
    data = None
    if tensor is not None:
        offsets, sizes, values, size = tensor
        fields["offset"] = offsets
        data = new(TensorWriteData)
        fields = data.__dict__
        fields["chunk"] = ChunkStorageMetadata(offsets, sizes)
        fields["properties"] = TensorProperties(*values)
        fields["size"] = size
    item = new(WriteItem)
    fields = item.__dict__
    fields["index"] = index
    fields["type"] = kind
    fields["bytes_io_data"] = None
    fields["tensor_data"] = data
    return item


class _PendingPlan(Pending, SavePlan):
    will_be = SavePlan


def make_plan_later(outline: PlanOutline) -> SavePlan:
    """Return the plan of an outline, made once it is looked at."""
    return _PendingPlan(outline)


def outline_of(plan: object) -> PlanOutline | None:
    """Return the outline of a plan that nobody has looked at; None for any other."""
    outline = source_of(plan)
    return outline if isinstance(outline, PlanOutline) else None


def planner_data_of(plan: SavePlan) -> Any:
    """Return the ``planner_data`` of a plan, without a look at one that is to be made later."""
    outline = outline_of(plan)
    return plan.planner_data if outline is None else outline.planner_data
