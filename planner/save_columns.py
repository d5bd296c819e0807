"""One save on the coordinator in columns, from the write results of all ranks to the metadata for them.

Everything here stands for what the general way gives, and steps aside wherever that is in doubt: where a
result is no plain one, where somebody else may have changed the metadata, where two results have one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from planner.column_plans import Planned
from planner.errors import WireError
from planner.metadata_file import can_write, metadata_pieces
from planner.wire.columns import Int64Column
from planner.wire.gc_pause import paused_gc
from planner.wire.metadata import decode_storage_part, encode_head, encode_storage_part, with_state_part
from planner.wire.results import ResultColumns, decode_result_columns
from planner.wire.storage import StorageColumns
from planner.wire.storage_infos import join_storage_infos

__all__ = ["DamagedResults", "ResultLists", "read_results"]


class DamagedResults(Exception):  # noqa: N818 - carries what is wrong with the results of others
    """Raised where results cannot be read; what is wrong, by rank."""

    def __init__(self, damaged: dict[int, BaseException]) -> None:
        super().__init__(damaged)
        self.damaged = damaged


def read_results(
    planned: Planned, frames: Sequence[bytes | None], digest: bytes, remembered: bytes | None
) -> ResultLists | None:
    """Read the results of all ranks, or return None where some are no plain ones.

    Args:
        planned: what the global plan came to.
        frames: each rank's results; None where a rank has none.
        digest: of all these.
        remembered: the storage part of the metadata that these very results came to in an earlier save.

    Raises:
        DamagedResults: frames are no results for these plans.
    """
    read = _Reader(planned, frames)
    if remembered is not None:
        storage = decode_storage_part(remembered, planned.state)
        return ResultLists(planned, storage, read.sizes, digest, remembered)
    damaged: dict[int, BaseException] = {}
    is_plain = True
    for rank in range(len(frames)):
        try:
            is_plain = read(rank) is not None and is_plain
        except WireError as error:
            damaged[rank] = error
    if damaged:
        raise DamagedResults(damaged)
    placed = _place(planned, read) if is_plain else None
    return None if placed is None else ResultLists(planned, placed, read.sizes, digest, None)


class _Reader:
    """Reads each rank's results once."""

    def __init__(self, planned: Planned, frames: Sequence[bytes | None]) -> None:
        self._planned = planned
        self._frames = frames
        self._read: dict[int, ResultColumns | None] = {}

    def __call__(self, rank: int) -> ResultColumns | None:
        frame = self._frames[rank]
        if rank not in self._read:
            self._read[rank] = (
                _nothing() if frame is None else decode_result_columns(frame, self._planned.num_kept(rank))
            )
        return self._read[rank]

    def __len__(self) -> int:
        return len(self._frames)

    def sizes(self, rank: int) -> Int64Column:
        results = self(rank)
        assert results is not None  # noqa: S101 - all were plain when they were first read
        return results.sizes


def _nothing() -> ResultColumns:
    return ResultColumns(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), join_storage_infos([]))


def _place(planned: Planned, read: _Reader) -> StorageColumns | None:
    """Say of each result which chunk of the metadata it is about."""
    counts: list[int] = []
    entries, chunks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    infos = []
    for rank in range(len(read)):
        results, places = read(rank), planned.places(rank)
        if results is None or places is None:
            return None
        counts.append(len(results.items))
        entries.append(places[0][results.items])
        chunks.append(places[1][results.items])
        infos.append(results.infos)
    return StorageColumns(
        counts, np.concatenate(entries), np.concatenate(chunks), None, join_storage_infos(infos)
    )


class ResultLists(Sequence[list[WriteResult]]):
    """The results of all ranks, by group rank; those of a rank are made anew at every look.

    Args:
        planned: what the global plan came to.
        storage: where everything stands, a run for each rank.
        sizes: gives the ``size_in_bytes`` of a rank's results.
        digest: of all that this depends on.
        storage_part: ``storage`` as part of the metadata, where it is known.
    """

    def __init__(
        self,
        planned: Planned,
        storage: StorageColumns,
        sizes: Callable[[int], Int64Column],
        digest: bytes,
        storage_part: bytes | None,
    ) -> None:
        self.planned = planned
        self.digest = digest
        self.is_remembered = storage_part is not None
        self._storage = storage
        self._sizes = sizes
        self.storage_part = storage_part
        """The storage part of the metadata, once it is known."""
        ends = np.cumsum(storage.counts)
        self._bounds = [0, *ends.tolist()]

    def build(self, rank: int) -> list[WriteResult]:
        """Make the results of one rank; they share names and offsets with the metadata."""
        start, end = self._bounds[rank], self._bounds[rank + 1]
        new, set_attribute = object.__new__, object.__setattr__
        results: list[WriteResult] = []
        with paused_gc():
            for index, size, info in zip(
                self._storage.build_indices(self.planned.objects, start, end),
                self._sizes(rank).tolist(),
                self._storage.infos.build(start, end),
                strict=True,
            ):
                result = new(WriteResult)
                set_attribute(result, "index", index)
                set_attribute(result, "size_in_bytes", size)
                set_attribute(result, "storage_data", info)
                results.append(result)
        return results

    @overload
    def __getitem__(self, index: int) -> list[WriteResult]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[WriteResult]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.build(rank) for rank in range(*index.indices(len(self)))]
        return self.build(range(len(self))[index])

    def __len__(self) -> int:
        return len(self._storage.counts)

    def __iter__(self) -> Iterator[list[WriteResult]]:
        return map(self.build, range(len(self)))

    def can_write_metadata(self) -> bool:
        """Whether ``metadata_pieces`` may be called."""
        planned = self.planned
        return planned.state_part is not None and can_write(planned.state, self._storage)

    def metadata_pieces(self, rest: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield in pieces the pickle of the metadata that was planned, with a storage_data of these results.

        Args:
            rest: all its attributes in their order; the values of those that were planned do not matter.
        """
        attributes = {**rest, "planner_data": self.planned.planner_data()}
        return metadata_pieces(self.planned.state, self._storage, attributes)

    def encode_metadata(self, rest: Metadata | None, *, strict: bool) -> tuple[bytes, ...] | None:
        """Encode the metadata that was planned, as ``wire.metadata.encode_metadata`` does.

        Args:
            rest: what else the storage put into it, beside a storage_data of these results; None for nothing
                at all.
            strict: refuse what only pickle can carry.

        Returns:
            Its parts; None where it does not go on columns.

        Raises:
            UnencodableError: its storage_meta cannot travel.
        """
        planned = self.planned
        state_part = planned.state_part
        if state_part is None:
            return None
        if rest is None:
            return with_state_part(state_part, Metadata({}), strict=strict)
        if self.storage_part is None:
            self.storage_part = encode_storage_part(self._storage, planned.state)
        head = encode_head(rest, state_part, self.storage_part, strict=strict)
        return (state_part, self.storage_part, head)
