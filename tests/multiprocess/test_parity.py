"""What we write is what stock DCP writes, and each reads the other's."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from planner import CoordinationConfig, GlooCoordinatedPlanner
from tests.support.ranks import run_ranks
from tests.support.states import ALL, mesh_1d_uneven

STRICT = CoordinationConfig(strict=True)  # so that pickle on the wire would fail the test


def without_ids(metadata):
    meta = metadata.storage_meta
    return dataclasses.replace(
        metadata, storage_meta=dataclasses.replace(meta, checkpoint_id=None, save_id=None) if meta else None
    )


def emptied(value):
    if isinstance(value, DTensor):
        return DTensor.from_local(
            torch.zeros_like(value.to_local()), value.device_mesh, value.placements,
            run_check=False, shape=value.shape, stride=value.stride(),
        )  # fmt: skip
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(emptied(item) for item in value)
    return None


def bits(value):
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def load_into(state_dict, folder, group):
    target = emptied(state_dict)
    dcp.load(target, checkpoint_id=folder, process_group=group)
    return target


def save_both(rank, folder):
    group = dist.new_group(backend="gloo")
    seen = {}
    for name, make in ALL.items():
        state_dict = make(rank)
        ours = dcp.save(
            state_dict, checkpoint_id=f"{folder}/{name}/ours", planner=GlooCoordinatedPlanner(config=STRICT)
        )
        stock = dcp.save(state_dict, checkpoint_id=f"{folder}/{name}/stock", process_group=group)
        assert without_ids(ours) == without_ids(stock), name
        assert pickle.loads(pickle.dumps(ours)) == ours
        assert list(ours.storage_data) == list(stock.storage_data), name
        hints = [[index.index for index in metadata.storage_data] for metadata in (ours, stock)]
        assert hints[0] == hints[1], name
        for kind in ("ours", "stock"):
            assert bits(load_into(state_dict, f"{folder}/{name}/{kind}", group)) == bits(state_dict), (
                name,
                kind,
            )
        seen[name] = len(ours.state_dict_metadata)
    return seen


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_checkpoints_equal_those_of_stock_dcp_and_each_loads_the_other(world_size, tmp_path):
    outcomes = run_ranks(save_both, world_size, str(tmp_path), timeout=120)
    assert all(outcome.value.keys() == ALL.keys() for outcome in outcomes)
    for name in ALL:
        ours, stock = (
            pickle.loads(Path(tmp_path, name, kind, ".metadata").read_bytes()) for kind in ("ours", "stock")
        )
        assert without_ids(ours) == without_ids(stock), name
        files = [
            sorted(path.name for path in Path(tmp_path, name, kind).iterdir()) for kind in ("ours", "stock")
        ]
        assert files[0] == files[1], name
        for file in files[0]:
            if file != ".metadata":
                assert (
                    Path(tmp_path, name, "ours", file).read_bytes()
                    == Path(tmp_path, name, "stock", file).read_bytes()
                )


def save_with_writers(rank, folder):
    group = dist.new_group(backend="gloo")
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state_dict = mesh_1d_uneven(rank)
    tensors = {key: value for key, value in state_dict.items() if key in {"columns", "replicated"}}
    mapping = {"columns": 1, "replicated": 2}
    writers = {
        "threads": lambda path: (state_dict, dcp.FileSystemWriter(path, thread_count=2, sync_files=False)),
        "one_file_per_item": lambda path: (
            state_dict,
            dcp.FileSystemWriter(path, single_file_per_rank=False),
        ),
        "fsspec": lambda path: (state_dict, FsspecWriter(path)),
        "hf": lambda path: (
            tensors,
            HuggingFaceStorageWriter(path, fqn_to_index_mapping=mapping, save_distributed=True),
        ),
        "hf_consolidated": lambda path: (
            tensors,
            HuggingFaceStorageWriter(path, mapping, save_distributed=True, enable_consolidation=True),
        ),
    }
    for name, make in writers.items():
        saved = {}
        for kind in ("ours", "stock"):
            values, writer = make(f"{folder}/{name}/{kind}")
            options = (
                {"planner": GlooCoordinatedPlanner(config=STRICT)}
                if kind == "ours"
                else {"process_group": group}
            )
            saved[kind] = dcp.save(values, storage_writer=writer, **options)
        if name == "one_file_per_item":
            saved = {kind: set(metadata.state_dict_metadata) for kind, metadata in saved.items()}
        elif name == "threads":  # which thread writes first is chance, so is the order within the table
            saved = {kind: metadata.storage_data.keys() for kind, metadata in saved.items()}
        else:
            saved = {kind: without_ids(metadata) for kind, metadata in saved.items()}
        assert saved["ours"] == saved["stock"], name


def test_built_in_writers_work_without_any_pickle_on_the_wire(tmp_path):
    run_ranks(save_with_writers, 4, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "hf_consolidated/ours").glob("*.safetensors"))


def save_with_options(rank, folder):
    group = dist.new_group(backend="gloo")
    state_dict = {f"weight{number}": torch.ones(number + 1) for number in range(6)}
    for options in (
        {"dedup_save_to_lowest_rank": True},
        {"dedup_save_to_lowest_rank": False},
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"enable_plan_caching": True},
        {"enable_plan_caching": True},
    ):
        ours = dcp.save(state_dict, checkpoint_id=f"{folder}/ours", planner=GlooCoordinatedPlanner(**options))
        options.pop("enable_plan_caching", None)
        stock = dcp.save(
            state_dict,
            checkpoint_id=f"{folder}/stock",
            planner=dcp.DefaultSavePlanner(**options),
            process_group=group,
        )
        assert without_ids(ours) == without_ids(stock), options


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_option_of_the_default_planner_gives_what_it_gives_in_stock_dcp(tmp_path):
    run_ranks(save_with_options, 3, str(tmp_path))
