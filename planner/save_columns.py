"""One save on the coordinator in columns, from the write results of all ranks to the metadata for them.

Everything here stands for what the general way gives, and steps aside wherever that is in doubt: where a
result is no plain one, where somebody else may have changed the metadata, where two results have one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from planner.column_plans import Planned
from planner.errors import WireError
from planner.known_code import are_known, names
from planner.lazy_metadata import is_pending
from planner.wire.columns import Int64Column
from planner.wire.gc_pause import paused_gc
from planner.wire.metadata import decode_storage_part, encode_head, encode_storage_part, with_state_part
from planner.wire.results import ResultColumns, decode_result_columns
from planner.wire.storage import StorageColumns
from planner.wire.storage_infos import join_storage_infos
from planner.wrapping import is_inherited

__all__ = ["DamagedResults", "ResultLists", "is_plain_finish", "read_results"]

# All names in DCP's own FileSystemWriter.finish, torch 2.9 to 2.15. It gives metadata a new storage_data made
# of the results, a storage_meta and a version, and changes nothing else; one with other names might.
_NAMES_OF_FINISH = names(
    """
    AttributeError CURRENT_DCP_VERSION Path UnsupportedOperation _get_metadata_path _metadata_fn cast
    concat_path create_stream dump exists fileno fs fsync index os path pickle rank rename rm_file
    storage_data storage_meta sync sync_files update use_collectives version
    """
)
_IS_FINISH_KNOWN = are_known({"finish": _NAMES_OF_FINISH}, (FileSystemWriter.finish, filesystem))


def is_plain_finish(storage: Any) -> bool:
    """Whether ``storage`` finishes a save as DCP's ``FileSystemWriter`` does, which looks at results once."""
    return _IS_FINISH_KNOWN and is_inherited(storage, "finish", FileSystemWriter)


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

    def encode_metadata(self, metadata: Metadata, *, strict: bool) -> tuple[bytes, ...] | None:
        """Encode ``metadata`` as ``wire.metadata.encode_metadata`` does, without a look at what is in it.

        Only for the metadata of ``planned`` that nobody has looked at, or nobody before a plain finish made
        its storage_data of these results.

        Returns:
            Its parts; None where ``metadata`` is not, or may not be, what was planned with these results.

        Raises:
            UnencodableError: its storage_meta cannot travel.
        """
        planned = self.planned
        state_part = planned.state_part
        if state_part is None or metadata is not planned.metadata:
            return None
        if is_pending(metadata):
            return with_state_part(state_part, Metadata({}), strict=strict)
        storage_data = metadata.storage_data
        if (
            not planned.is_as_made(metadata)
            or type(storage_data) is not dict
            or len(storage_data) != self._bounds[-1]  # else two results have one key
        ):
            return None
        if self.storage_part is None:
            self.storage_part = encode_storage_part(self._storage, planned.state)
        head = encode_head(metadata, state_part, self.storage_part, strict=strict)
        return (state_part, self.storage_part, head)
