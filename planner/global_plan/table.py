"""The items of all ranks in arrays, an item's place there being its number.

Items are numbered by rank and then by position, the order in which stock DCP walks over them. What
has to do with chunks is kept apart for each number of dimensions, in *classes*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import SavePlan

from planner.global_plan.order import IntpColumn
from planner.wire.columns import Int64Column
from planner.wire.plans import BYTE_IO_CODE, PlanColumns, PlanSchema

__all__ = ["BYTES_DIMS", "Columnar", "ItemTable", "NotColumnarError", "RankPlan", "SizeClass", "make_table"]

Columnar = tuple[PlanSchema, PlanColumns]
RankPlan = Columnar | SavePlan

BYTES_DIMS = -1
"""The number of dimensions of an item of bytes: a scalar's offset is (), and theirs is None."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

_MAX_TOTAL_NBYTES = 2.0**62


class NotColumnarError(Exception):
    """These plans have to be planned by stock DCP itself."""


@dataclass(frozen=True)
class SizeClass:
    """All items with the same number of dimensions.

    Attributes:
        num_dims: that number, ``BYTES_DIMS`` for bytes.
        numbers: the items, ascending; shape (num,).
        offsets: the offsets of their chunks; shape (max(num_dims, 0), num), int64.
        sizes: the sizes of their chunks likewise.
    """

    num_dims: int
    numbers: IntpColumn
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemTable:
    """The items of all ranks.

    Attributes:
        plans: what each rank sent.
        starts: the number of each rank's first item, and at the end the number of items;
            shape (num_ranks + 1,).
        ranks: each item's rank; shape (num_items,), as all below.
        names: each item's name as a number; two are equal where the names are.
        num_names: how many different names there are.
        codes: each item's type code, see ``PlanSchema.type_codes``.
        num_dims: each item's number of dimensions, ``BYTES_DIMS`` for bytes.
        rows: each item's place in its class.
        costs: what the item counts when stock DCP balances ranks.
        classes: by number of dimensions, ascending.
    """

    plans: Sequence[Columnar]
    starts: IntpColumn
    ranks: Int64Column
    names: Int64Column
    num_names: int
    codes: npt.NDArray[np.uint8]
    num_dims: Int64Column
    rows: IntpColumn
    costs: Int64Column
    classes: list[SizeClass]

    def schema_and_position(self, number: int) -> tuple[PlanSchema, int]:
        """Return where the constant part of an item stands: its schema, and its position there."""
        rank = int(self.ranks[number])
        return self.plans[rank][0], number - int(self.starts[rank])

    def tensor_sizes(self, numbers: IntpColumn, num_dims: int) -> npt.NDArray[np.int64]:
        """Return the sizes of the tensors of items with so many dimensions; shape (num_dims, num)."""
        found = [self.schema_and_position(number) for number in numbers.tolist()]
        sizes = [schema.sizes[position] for schema, position in found]
        return np.asarray(sizes, dtype=np.int64).reshape(len(sizes), num_dims).T.copy()


@dataclass(frozen=True)
class _SchemaRows:
    """What all plans of one schema put into the table."""

    ranks: list[int]
    names: Int64Column
    num_dims: Int64Column
    costs: Int64Column
    flat_starts: Int64Column


def make_table(plans: Sequence[RankPlan]) -> ItemTable:
    """Lay out the items of all ranks.

    Raises:
        NotColumnarError: if a plan is not in columns altogether, or its sizes are beyond any storage.
    """
    columnar: list[Columnar] = []
    for plan in plans:
        if type(plan) is not tuple or plan[0].whole or plan[1].odd_positions:
            raise NotColumnarError
        columnar.append(plan)
    schemas, num_names = _read_schemas(columnar)
    of_rank = {rank: rows for rows in schemas for rank in rows.ranks}
    in_order = [of_rank[rank] for rank in range(len(columnar))]
    counts = [len(rows.names) for rows in in_order]
    starts = np.zeros(len(counts) + 1, dtype=np.intp)
    np.cumsum(counts, out=starts[1:])
    num_dims = _joined([rows.num_dims for rows in in_order], np.int64)
    costs = _joined([rows.costs for rows in in_order], np.int64)
    if float(np.abs(costs.astype(np.float64)).sum()) >= _MAX_TOTAL_NBYTES:
        raise NotColumnarError
    table = ItemTable(
        plans=columnar,
        starts=starts,
        ranks=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        names=_joined([rows.names for rows in in_order], np.int64),
        num_names=num_names,
        codes=_joined([schema.type_codes for schema, _ in columnar], np.uint8),
        num_dims=num_dims,
        rows=np.zeros(len(num_dims), dtype=np.intp),
        costs=costs,
        classes=[],
    )
    for dims in np.unique(num_dims).tolist():
        size_class = _make_class(table, schemas, dims)
        table.rows[size_class.numbers] = np.arange(len(size_class.numbers))
        table.classes.append(size_class)
    return table


def _joined(parts: list[npt.NDArray[_Scalar]], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts])


def _read_schemas(plans: Sequence[Columnar]) -> tuple[list[_SchemaRows], int]:
    by_identity: dict[int, list[int]] = {}
    for rank, (schema, _) in enumerate(plans):
        by_identity.setdefault(id(schema), []).append(rank)
    numbers: dict[str, int] = {}
    element_nbytes: dict[torch.dtype, int] = {}
    found = []
    for ranks in by_identity.values():
        schema = plans[ranks[0]][0]
        names = [numbers.setdefault(name, len(numbers)) for name in schema.fqns]
        flat_starts = np.cumsum(schema.num_dims) - schema.num_dims
        num_dims = np.where(schema.type_codes == BYTE_IO_CODE, BYTES_DIMS, schema.num_dims)
        found.append(
            _SchemaRows(
                ranks,
                np.asarray(names, dtype=np.int64),
                num_dims,
                _costs(schema, element_nbytes),
                flat_starts,
            )
        )
    return found, len(numbers)


def _costs(schema: PlanSchema, element_nbytes: dict[torch.dtype, int]) -> Int64Column:
    """Return ``tensor_storage_size() or 1`` of each item: the whole tensor, for whatever chunk."""
    costs = []
    for size, values in zip(schema.sizes, schema.properties, strict=True):
        if values is None:
            costs.append(1)
            continue
        dtype = values[0]
        if dtype not in element_nbytes:
            element_nbytes[dtype] = _element_nbytes(dtype)
        costs.append(math.prod(size) * element_nbytes[dtype] or 1)
    try:
        return np.asarray(costs, dtype=np.int64)
    except OverflowError as error:
        raise NotColumnarError from error


def _element_nbytes(dtype: torch.dtype) -> int:
    try:
        nbytes: int = torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what tensor_storage_size asks
    except Exception as error:
        raise NotColumnarError from error
    return nbytes


def _make_class(table: ItemTable, schemas: list[_SchemaRows], num_dims: int) -> SizeClass:
    numbers = np.flatnonzero(table.num_dims == num_dims)
    shape = (max(num_dims, 0), len(numbers))
    made = SizeClass(num_dims, numbers, np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64))
    if num_dims <= 0:
        return made
    first_rows = np.searchsorted(numbers, table.starts).tolist()
    for rows in schemas:
        flat = rows.flat_starts[rows.num_dims == num_dims] + np.arange(num_dims)[:, None]
        for rank in rows.ranks:
            own = slice(first_rows[rank], first_rows[rank + 1])
            columns = table.plans[rank][1]
            made.offsets[:, own] = columns.offsets[flat]
            made.sizes[:, own] = columns.sizes[flat]
    return made
