"""Who keeps an item that several ranks have: the choice of ``dedup_save_plans``.

Stock DCP goes over the distinct (name, offset) in the order in which they first appear, and gives each
to the rank that holds least so far. Only those on more than one rank need a choice, one after another;
what the others add to their ranks up to there is a difference of two prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.global_plan.order import BoolColumn, IntpColumn, group_numbers, group_starts, stable_order
from planner.global_plan.table import ItemTable, NotColumnarError
from planner.wire.columns import Int64Column

__all__ = ["Deduped", "dedup"]


@dataclass(frozen=True)
class Deduped:
    """What is left.

    Attributes:
        kept: which items stay; shape (num_items,).
        has_twice: which names some rank keeps at one offset more than once; shape (num_names,).
    """

    kept: BoolColumn
    has_twice: BoolColumn


@dataclass(frozen=True)
class _Keys:
    """The distinct (name, offset): the items with each, one key after another, ascending in each."""

    members: IntpColumn
    starts: IntpColumn


def dedup(table: ItemTable, *, to_lowest_rank: bool) -> Deduped:
    """Choose, for all ranks, which items they keep.

    Args:
        table: the items.
        to_lowest_rank: as ``dedup_save_to_lowest_rank`` of ``DefaultSavePlanner``.
    """
    num_items = len(table.ranks)
    keys = _find_keys(table)
    ends = np.append(keys.starts, num_items)[1:]
    firsts = keys.members[keys.starts]
    lasts = keys.members[ends - 1]
    is_shared = table.ranks[firsts] != table.ranks[lasts]
    chosen = table.ranks[firsts]
    if not to_lowest_rank and is_shared.any():
        _choose(table, keys, is_shared, chosen)
    kept = np.zeros(num_items, dtype=np.bool_)
    key_of = group_numbers(keys.starts, num_items)
    is_kept = table.ranks[keys.members] == chosen[key_of]
    kept[keys.members] = is_kept
    has_twice = np.zeros(table.num_names, dtype=np.bool_)
    again = np.flatnonzero(is_kept[1:] & is_kept[:-1] & (key_of[1:] == key_of[:-1]))
    has_twice[table.names[keys.members[again]]] = True
    return Deduped(kept, has_twice)


def _find_keys(table: ItemTable) -> _Keys:
    members: list[IntpColumn] = []
    starts: list[IntpColumn] = []
    num_before = 0
    for size_class in table.classes:
        columns = [table.names[size_class.numbers], *size_class.offsets]
        order = stable_order(columns, len(size_class.numbers))
        starts.append(group_starts(columns, order) + num_before)
        members.append(size_class.numbers[order])
        num_before += len(order)
    nothing = np.zeros(0, dtype=np.intp)
    return _Keys(np.concatenate([nothing, *members]), np.concatenate([nothing, *starts]))


def _choose(table: ItemTable, keys: _Keys, is_shared: BoolColumn, chosen: Int64Column) -> None:
    """Set ``chosen`` of the shared keys to the rank that stock DCP's loop gives each."""
    num_items, num_ranks = len(table.ranks), len(table.plans)
    ends = np.append(keys.starts, num_items)[1:]
    firsts = keys.members[keys.starts]
    # The last item of a key is the one whose size counts: stock DCP overwrites what it noted before.
    costs = table.costs[keys.members[ends - 1]]
    unshared_nbytes = np.zeros(num_items + 1, dtype=np.int64)
    unshared_nbytes[firsts[~is_shared] + 1] = costs[~is_shared]
    before = np.cumsum(unshared_nbytes)

    shared = np.flatnonzero(is_shared)
    shared = shared[np.argsort(firsts[shared])]
    own_firsts = firsts[shared]
    own_ranks = table.ranks[own_firsts]
    # An unshared key counts on the rank where it first appears, so within that rank's own stretch.
    counted_to = table.starts[own_ranks]
    same_rank = own_ranks[1:] == own_ranks[:-1]
    counted_to[1:][same_rank] = own_firsts[:-1][same_rank]
    added = before[own_firsts] - before[counted_to]
    last_counted = table.starts[:-1].copy()
    last_counted[own_ranks] = own_firsts  # of equal ranks the last assignment stays
    rest = (before[table.starts[1:]] - before[last_counted]).tolist()

    group_of, groups = _rank_groups(table.ranks[keys.members], keys.starts[shared], ends[shared], num_ranks)
    nbytes_of_rank = [0] * num_ranks
    get_nbytes = nbytes_of_rank.__getitem__
    picks: list[int] = []
    current = 0
    for rank, nbytes, cost, group in zip(
        own_ranks.tolist(), added.tolist(), costs[shared].tolist(), group_of.tolist(), strict=True
    ):
        while current < rank:
            nbytes_of_rank[current] += rest[current]
            current += 1
        nbytes_of_rank[rank] += nbytes
        pick = min(groups[group], key=get_nbytes)
        nbytes_of_rank[pick] += cost
        picks.append(pick)
    chosen[shared] = picks


def _rank_groups(
    ranks: Int64Column, starts: IntpColumn, ends: IntpColumn, num_ranks: int
) -> tuple[IntpColumn, list[set[int]]]:
    """Return the distinct sets of ranks among the stretches of ``ranks``, and which one each stretch is."""
    lengths = ends - starts
    own_starts = np.cumsum(lengths) - lengths
    members = ranks[np.arange(lengths.sum()) + np.repeat(starts - own_starts, lengths)]
    # Sums of random numbers tell stretches apart but for chance, and then that is checked.
    random_of_rank = np.random.default_rng(0).integers(0, 2**63 - 1, num_ranks, dtype=np.int64)
    sums = np.add.reduceat(random_of_rank[members], own_starts)
    _, samples, group_of = np.unique(sums, return_index=True, return_inverse=True)
    sample_of = samples[group_of]
    at_sample = np.arange(len(members)) + np.repeat(own_starts[sample_of] - own_starts, lengths)
    if (lengths != lengths[sample_of]).any() or (members != members[at_sample]).any():
        raise NotColumnarError
    # A tie goes to whichever the set yields first, which is not always the lowest: so it has to be a
    # set, filled in the order in which stock DCP fills its own.
    groups = [
        set(members[own_starts[sample] : ends_at].tolist())
        for sample, ends_at in zip(samples.tolist(), (own_starts + lengths)[samples].tolist(), strict=True)
    ]
    return group_of, groups
