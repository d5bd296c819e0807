"""One process that is the coordinator, or another rank, of a whole save: the others' bytes are there already.

``dcp.save`` runs as it is, on a fake process group. What is replaced is what moves bytes: for stock DCP the
three object collectives of c10d, which still pickle, pad and unpickle; for ours the store, which has every
envelope at once, and the sends and receives of gloo. So everything that a rank computes is there, and
nothing that it waits for. Making the others' bytes is not counted.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import OURS, Stopwatch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object
from torch.futures import Future
from worlds import World, local_plan_of

from planner import GlooCoordinatedPlanner
from planner.exchange import Exchange
from planner.global_plan import plan_globally
from planner.plain_finish import Finish
from planner.turns import Turns
from planner.wire.envelope import Envelope, Identity, decode_verdict
from planner.wire.frame import Kind, digest
from planner.wire.plans import decode_plan_columns, decode_schema, encode_plan
from planner.wire.results import encode_results

_CPU = torch.device("cpu")
MAX_COMPARED = 64  # ranks


class NullWriter(FileSystemWriter):
    """Writes no data, and says of it what ``FileSystemWriter`` would; writes ``.metadata`` as that does."""

    def __init__(self, path: str, watch: Stopwatch | None = None) -> None:
        super().__init__(path)
        self._watch = watch

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:  # noqa: ARG002
        with nullcontext() if self._watch is None else self._watch.span("write_data"):
            written: Future[list[WriteResult]] = Future()
            written.set_result(make_results(plan))
            return written


def make_results(plan: SavePlan) -> list[WriteResult]:
    """Return the results of a writer that put all items of a final plan into one file."""
    path, offset = f"{plan.storage_data.prefix}0.distcp", 0
    results = []
    for item in plan.items:
        nbytes = 16
        if item.tensor_data is not None:
            nbytes = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        results.append(WriteResult(item.index, nbytes, _StorageInfo(path, offset, nbytes)))
        offset += nbytes
    return results


@dataclass
class Sent:
    """What each rank sends in a save, by rank; the coordinator's own entries are None.

    Attributes:
        plans: ours: schema and body.
        results: ours: one frame.
        stock_plans: pickled.
        stock_results: pickled.
    """

    plans: list[tuple[bytes, ...] | None] = field(default_factory=list)
    results: list[tuple[bytes, ...] | None] = field(default_factory=list)
    stock_plans: list[bytes | None] = field(default_factory=list)
    stock_results: list[bytes | None] = field(default_factory=list)


def prepare(world: World, world_size: int, *, with_stock: bool) -> Sent:
    """Make what all ranks send: their plans by the real planner, their results from their final plans."""
    sent = Sent()
    schemas: dict[bytes, Any] = {}
    columns = []
    for rank in range(world_size):
        plan = local_plan_of(world.become(rank))
        frames = encode_plan(plan, strict=True)
        schema = schemas.get(frames[0]) or decode_schema(frames[0])
        schemas[frames[0]] = schema
        columns.append((schema, decode_plan_columns(schema, frames[1])))
        sent.plans.append(frames if rank else None)
        if with_stock:
            sent.stock_plans.append(pickle.dumps(plan) if rank else None)
    outcome = plan_globally(columns, to_lowest_rank=False, merges_mappings=True)
    assert outcome is not None
    for rank in range(world_size):
        final = replace(outcome.build_plan(rank), storage_data=_StoragePrefix(f"__{rank}_"))
        results = make_results(final)
        sent.results.append((encode_results(results, final, strict=True),) if rank else None)
        if with_stock:
            sent.stock_results.append(pickle.dumps(results) if rank else None)
    return sent


@dataclass
class Replies:
    """What the coordinator sent back: of stock DCP by step, of ours one record for each save."""

    to_all: dict[str, bytes] = field(default_factory=dict)
    to_each: dict[str, Any] = field(default_factory=dict)
    saves: list[_Record] = field(default_factory=list)


@dataclass
class _Record:
    """What the coordinator put into the store and sent in one of our saves.

    Attributes:
        verdicts: as bytes, in order.
        parts: by rank, the parts of replies that followed, in order.
        replies: by exchange and rank, all parts of the reply, also those that the rank knew.
    """

    verdicts: list[bytes] = field(default_factory=list)
    parts: dict[int, list[bytes]] = field(default_factory=dict)
    replies: dict[int, dict[int, dict[int, bytes]]] = field(default_factory=dict)


class _Control:
    """Takes the place of ``planner.control.ControlPlane``: everything waited for is there."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._num_read = 0

    def put(self, key: str, value: bytes) -> None:
        if "v/" in key:
            self._link.record.verdicts.append(value)
        elif value:
            self._link.envelope_nbytes += len(value)

    def wait(self, keys: Sequence[str], **_: Any) -> bool:
        return bool(keys)

    def exists(self, keys: Sequence[str]) -> bool:
        return not keys  # no alarm, nobody has left

    def present(self, keys: Sequence[str]) -> list[bool]:
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        pass

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        if not self._link.rank:
            with self._link.watch.span("simulation"):
                return [self._link.envelope_of(*map(int, key.split("/")[-2:])) for key in keys]
        self._num_read += 1
        return [self._link.record.verdicts[self._num_read - 1]]


class _Link:
    """One rank's connection to the others, ours: takes the place of ``planner.channel.Channel``."""

    coordinator, epoch, save_number, is_current, strangers = 0, 1, 0, True, ()

    def __init__(self, rank: int, sent: Sent, replies: Replies, number: int, watch: Stopwatch) -> None:
        self.rank = self.group_rank = rank
        self.is_coordinator = not rank
        self.world_size = len(sent.plans)
        self.members = tuple(range(self.world_size))  # of what is remembered, a part of the key
        self.peers = [other for other in range(self.world_size) if other != rank]
        self.turns = Turns()
        self.control = _Control(self)
        self.litter: list[str] = []
        self.activity = ""
        self.watch = watch
        self.parts: list[bytes] = []
        self.envelope_nbytes = 0
        self._incoming = (sent.plans, sent.results)
        self._before = replies.saves[number - 1] if number else None
        if not rank:
            replies.saves.append(_Record())
        self.record = replies.saves[number]
        self.received = list(self.record.parts.get(rank, ()))
        self._read = list(self.received)
        self._checkpoint = ""
        self._digests: dict[int, tuple[bytes, bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None  # signs of life and the like

    def enter(self, checkpoint: str, _deadline: Any) -> None:
        self._checkpoint = checkpoint

    def save_key(self, name: str, **_: Any) -> str:
        return f"s/{name}"

    def take_litter(self) -> list[str]:
        return []

    def _digest_of(self, part: bytes) -> bytes:
        if id(part) not in self._digests:
            self._digests[id(part)] = digest(part), part
        return self._digests[id(part)][0]

    def envelope_of(self, exchange: int, rank: int) -> bytes:
        """Return the envelope of another rank, which knows what it got in the save before."""
        parts = tuple((self._digest_of(part), len(part)) for part in self._incoming[exchange][rank] or ())
        facts: dict[str, Any] = {}
        if "known" in Envelope.__dataclass_fields__ and self._before is not None:
            reply = self._before.replies[exchange][rank]
            lasting = [reply[position] for position in range(max(1, len(reply) - 1))]
            facts["known"] = tuple(self._digest_of(part) for part in lasting)
        return Envelope(Identity("save", self._checkpoint, _STEPS[exchange]), parts, **facts).encode()

    # What planner.exchange calls of planner.transport.

    def gather(self, _group: Any, wanted: Mapping[int, Sequence[int]], **_: Any):
        exchange = len(self.record.replies)
        verdict = decode_verdict(self.record.verdicts[-1])
        for rank in wanted:
            mask = verdict.mask_of(rank)
            parts = self._incoming[exchange][rank] or ()
            yield rank, [part for bit, part in enumerate(parts) if mask >> bit & 1]

    def scatter(self, _group: Any, replies: Mapping[int, bytes], **_: Any) -> None:
        with self.watch.span("simulation"):
            for rank, part in replies.items():
                self.record.parts.setdefault(rank, []).append(part)

    def note_reply(self, reply: Any) -> None:
        """Note all that an exchange has for each rank; called when its reduction has ended."""
        with self.watch.span("simulation"):
            noted: dict[int, dict[int, bytes]] = {}
            for rank in self.peers if reply is not None else ():
                parts = reply.to_all if reply.to_each is None else reply.to_each[rank]
                parts = [parts] if isinstance(parts, bytes) else parts
                noted[rank] = dict(enumerate(parts))
            self.record.replies[len(self.record.replies)] = noted

    def send_parts(self, _group: Any, parts: Sequence[bytes], **_: Any) -> None:
        self.parts += parts

    def receive_headed(self, _group: Any, **_: Any) -> bytes:
        return self.received.pop(0)

    def nbytes_by_kind(self) -> dict[str, int]:
        found = {"envelope": self.envelope_nbytes, "verdict": sum(map(len, self.record.verdicts))}
        for part in [*self.parts, *self._read]:
            name = Kind(part[_KIND_AT]).name.lower()
            found[name] = found.get(name, 0) + len(part)
        return found


_STEPS = ("plan", "write")


_KIND_AT = 6  # in a frame's header


class _StockLink:
    """One rank's connection to the others, stock: c10d's object collectives without the moving."""

    def __init__(self, rank: int, incoming: list[list[bytes | None]], replies: Replies) -> None:
        self.rank = rank
        self.replies = replies
        self._incoming = incoming
        self.sent: list[int] = []
        self.received: list[int] = []

    def nbytes_by_kind(self) -> dict[str, int]:
        kinds = ("plan_body", "write_results", "final_plan", "metadata")
        return dict(zip(kinds, [*self.sent, *self.received], strict=True))

    def gather_object(self, obj: Any, object_gather_list: Any = None, **_: Any) -> None:
        own, _nbytes = _object_to_tensor(obj, _CPU, None)
        self.sent.append(len(own))
        if self.rank:
            return
        blobs = self._incoming.pop(0)
        longest = max(len(own), *(len(blob) for blob in blobs if blob is not None))
        coalesced = torch.empty(longest * len(blobs), dtype=torch.uint8)
        for rank, blob in enumerate(blobs):
            data = own if blob is None else torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            coalesced[rank * longest : rank * longest + len(data)] = data
            padded = coalesced[rank * longest : (rank + 1) * longest]
            object_gather_list[rank] = _tensor_to_object(padded, len(data), None)

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, **_: Any
    ) -> None:
        if self.rank:
            blob = self.replies.to_each["plan"][self.rank]
            self.received.append(len(blob))
            scatter_object_output_list[0] = pickle.loads(blob)
            return
        tensors = [_object_to_tensor(obj, _CPU, None)[0] for obj in scatter_object_input_list]
        longest = max(map(len, tensors))
        own = tensors[0].clone()
        # The bytes for another rank to read; c10d pads each to the longest.
        blobs = [tensor.numpy().tobytes() if rank == 1 else None for rank, tensor in enumerate(tensors)]
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in tensors]
        for whole, tensor in zip(padded, tensors, strict=True):
            whole[: len(tensor)] = tensor
        self.replies.to_each["plan"] = blobs
        scatter_object_output_list[0] = _tensor_to_object(own, len(own), None)

    def broadcast_object_list(self, object_list: list[Any], **_: Any) -> None:
        if self.rank:
            blob = self.replies.to_all["write"]
            self.received.append(len(blob))
            object_list[0] = pickle.loads(blob)
            return
        tensor, _nbytes = _object_to_tensor(object_list[0], _CPU, None)
        self.replies.to_all["write"] = tensor.numpy().tobytes()


@dataclass
class Saved:
    """What one save cost one rank.

    Attributes:
        cpu_seconds: in coordination, apart from the next two.
        finish_seconds: in the writer's finish.
        local_seconds: in setting up the planner and making the local plan.
        sent_nbytes: payload of a rank that is no coordinator; ours without the schema.
        schema_nbytes: ours: what it sent for all ranks that have the same.
        received_nbytes: payload, of the same.
        record_nbytes: ours: what it put into the store.
        nbytes_by_kind: all of these, by what they are.
        fingerprint: of what the coordinator's writer wrote, in worlds that are not too large to compare.
        switches: when it began with what, in CPU seconds of the process.
    """

    cpu_seconds: float
    finish_seconds: float
    local_seconds: float
    sent_nbytes: int = 0
    schema_nbytes: int = 0
    received_nbytes: int = 0
    record_nbytes: int = 0
    nbytes_by_kind: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    switches: list[tuple[float, str | None]] = field(default_factory=list)


def fingerprint(path: Path) -> str:
    """Tell ``.metadata`` files apart: entries and chunks in their order, mappings, and where all is."""
    metadata = pickle.loads(path.read_bytes())
    state = hashlib.blake2b(digest_size=16)
    for part in (metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data):
        for item in part.items():
            state.update(repr(item).encode())
    return state.hexdigest()


def save_as(
    side: str, rank: int, world: World, sent: Sent, replies: Replies, *, keep: Path | None = None
) -> Iterator[Saved]:
    """Be ``rank`` of a fake world; yield what one save after another costs it.

    The coordinator's saves come first: another rank gets what it sent. Its ``.metadata`` goes to ``keep``.
    """
    state_dict = world.become(rank)
    for number in count():
        watch = Stopwatch()
        planner: Any = GlooCoordinatedPlanner() if side == OURS else dcp.DefaultSavePlanner()
        # On the class: a planner with hooks of its own is another one to this library.
        hooks = {
            name: watch.around("local", getattr(type(planner), name))
            for name in ("set_up_planner", "create_local_plan")
        }
        local = mock.patch.multiple(type(planner), **hooks)
        link: Any = _StockLink(rank, [sent.stock_plans, sent.stock_results], replies)
        patched = _stock_patched(link)
        if side == OURS:
            link = _Link(rank, sent, replies, number, watch)
            patched = _ours_patched(link)
        # Ours stands in for the writer's own, which is known by being that very function.
        owner, name = (Finish, "__call__") if side == OURS else (FileSystemWriter, "finish")
        finish = mock.patch.object(owner, name, watch.around("finish", getattr(owner, name)))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, patched, finish, local:
            writer = NullWriter(folder, watch)
            with watch.span("coordination"):
                dcp.save(state_dict, storage_writer=writer, planner=planner)
            if keep is not None:
                shutil.copyfile(Path(folder, ".metadata"), keep)
            written = "" if rank or len(sent.plans) > MAX_COMPARED else fingerprint(Path(folder, ".metadata"))
        seconds = watch.seconds
        saved = Saved(seconds["coordination"], seconds.get("finish", 0.0), seconds["local"])
        saved.fingerprint = written
        saved.switches = watch.switches
        if rank:
            kinds = saved.nbytes_by_kind = link.nbytes_by_kind()
            saved.schema_nbytes = kinds.get("plan_schema", 0)
            saved.sent_nbytes = kinds.get("plan_body", 0) + kinds.get("write_results", 0)
            saved.record_nbytes = kinds.get("envelope", 0)
            saved.received_nbytes = sum(
                nbytes for kind, nbytes in kinds.items() if kind.startswith(("final_plan", "metadata"))
            )
        yield saved


@contextmanager
def _ours_patched(link: _Link) -> Iterator[None]:
    run = Exchange.run

    def run_noting_replies(exchange: Exchange, step: str, produce: Any, reduce: Any, **options: Any) -> Any:
        def reduce_and_note(received: Any) -> Any:
            reply = reduce(received)
            link.note_reply(reply)
            return reply

        return run(exchange, step, produce, reduce_and_note, **options)

    with (
        mock.patch("planner.dist_wrapper.open_channel", return_value=link),
        mock.patch.object(Exchange, "run", run_noting_replies),
        mock.patch.multiple(
            "planner.exchange",
            gather=link.gather,
            scatter=link.scatter,
            send_parts=link.send_parts,
            receive_headed=link.receive_headed,
        ),
    ):
        yield


@contextmanager
def _stock_patched(link: _StockLink) -> Iterator[None]:
    with (
        mock.patch.object(dist, "gather_object", link.gather_object),
        mock.patch.object(dist, "scatter_object_list", link.scatter_object_list),
        mock.patch.object(dist, "broadcast_object_list", link.broadcast_object_list),
    ):
        yield
