"""DCP's own end of a save, which writes ``.metadata``: all of it, but what it pickles comes from columns."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from planner.known_code import are_known, names
from planner.pending import is_pending
from planner.save_columns import ResultLists
from planner.wire.gc_pause import paused_gc
from planner.wrapping import is_inherited

__all__ = ["Finish", "plain_finish_of"]

# All names in DCP's own FileSystemWriter.finish of torch 2.13. It gives metadata a new storage_data made of
# the results, a storage_meta and a version, changes nothing else, and pickles it into a file; one with other
# names might do more. That of torch 2.10 fills a copy, and is not known.
_NAMES_OF_FINISH = names(
    """
    AttributeError CURRENT_DCP_VERSION Path UnsupportedOperation _get_metadata_path _metadata_fn cast
    concat_path create_stream dump exists fileno fs fsync index os path pickle rank rename rm_file
    storage_data storage_meta sync sync_files update use_collectives version
    """
)
_SET = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_FINISH: Any = FileSystemWriter.finish
_IS_KNOWN = are_known({"finish": _NAMES_OF_FINISH}, (_FINISH, filesystem))


class Finish:
    """The ``finish`` of a plain writer for one save, from columns where that goes.

    Args:
        writer: one that finishes as DCP's own.
        results: the results of the save.
    """

    def __init__(self, writer: FileSystemWriter, results: ResultLists) -> None:
        self._writer = writer
        self._results = results
        self.written: Metadata | None = None
        """What DCP's finish set in the metadata it wrote; None where it wrote none from columns."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Be the writer's ``finish`` inside; whatever calls it, be it DCP or what wraps it, stays."""
        self._writer.finish = self  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._writer.finish

    def __call__(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do what ``FileSystemWriter.finish`` does."""
        is_as_planned = metadata is self._results.planned.metadata and is_pending(metadata)
        if not is_as_planned or not self._results.can_write_metadata():
            with paused_gc():
                _FINISH(self._writer, metadata=metadata, results=results)
            return
        rest = Metadata({})

        def dump(value: Any, stream: Any) -> None:
            if value is not rest or set(vars(rest)) != _SET or rest.storage_data != {}:
                raise RuntimeError(
                    f"FileSystemWriter.finish of torch {torch.__version__} pickles something else than the "
                    "versions known here; report it, and meanwhile use a subclass whose own finish calls "
                    "super().finish: it gets real objects"
                )
            for piece in self._results.metadata_pieces(vars(rest)):
                stream.write(piece)

        finish = types.FunctionType(
            _FINISH.__code__, {**_FINISH.__globals__, "pickle": types.SimpleNamespace(dump=dump)}
        )
        finish(self._writer, metadata=rest, results=[])
        self.written = rest


def plain_finish_of(storage: Any, results: ResultLists) -> Finish | None:
    """Return a finish for ``storage``, or None if it does not finish a save in the very code of DCP's own."""
    is_plain = (
        _IS_KNOWN and FileSystemWriter.finish is _FINISH and is_inherited(storage, "finish", FileSystemWriter)
    )
    return Finish(storage, results) if is_plain else None
