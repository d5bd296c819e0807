"""The example engine: one line of its configuration, or one variable of the environment, and no caller."""

import logging
import os
from pathlib import Path

import torch.distributed as dist
import yaml

import engine
from tests.support.python import run_python
from tests.support.ranks import run_ranks

TEXT = Path(engine.__file__).with_name("engine.yaml").read_text()
ON = TEXT.replace("    coordination: default", "    coordination: gloo")


def settings(text, folder):
    options = yaml.safe_load(text.replace("layers: 8", "layers: 1"))
    options["checkpoint"]["folder"] = folder
    return options["checkpoint"]


def save_and_load(rank, folder):
    from engine.checkpoint.dcp import load_model, load_optimizer, save_model, save_optimizer
    from engine.checkpoint.distributed import CheckpointConfig
    from planner.demo.load import unequal
    from planner.demo.model import build, full_state, make_meshes, train

    meshes = make_meshes()
    model, optimizer = build(1, meshes, seed=0)
    train(model, optimizer, 2, meshes.group)
    trained = full_state(model, optimizer)
    ends = []
    for number, (text, variable) in enumerate([(TEXT, ""), (ON, ""), (TEXT, "gloo"), (ON, "default")]):
        os.environ.pop("DCP_COORDINATION", None)
        if variable:
            os.environ["DCP_COORDINATION"] = variable
        config = CheckpointConfig.from_mapping(settings(text, f"{folder}/{number}"))
        try:
            save_model(model, config)
        except Exception as error:  # noqa: BLE001 - of the default group, which refuses
            ends.append(type(error).__name__)
            continue
        save_optimizer(model, optimizer, config)
        fresh, its_optimizer = build(1, meshes, seed=1)
        load_model(fresh, config)
        load_optimizer(fresh, its_optimizer, config)
        ends.append(unequal(full_state(fresh, its_optimizer), trained))
    return ends


def test_one_line_or_the_environment_turns_coordination_on_and_off(tmp_path):
    assert [line for line in ON.splitlines() if line not in TEXT.splitlines()] == [
        "    coordination: gloo # gloo turns it on, this one line; DCP_COORDINATION=gloo does it from outside"
    ]
    for outcome in run_ranks(save_and_load, 2, str(tmp_path)):
        off, on, on_by_variable, off_by_variable = outcome.value
        assert on == on_by_variable == []
        assert off == off_by_variable
        assert off.endswith("Error")


def run_train(rank, path, port):
    from engine.train import main

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun, whose agent has the store
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("planner").addHandler(handler)
    main(path)
    return [line.split(" on 2 ranks")[0] for line in lines if "coordination over gloo took" in line]


def test_training_goes_on_with_coordination_from_what_was_saved_without(tmp_path):
    path = tmp_path / "engine.yaml"
    folder = str(tmp_path / "checkpoints")
    for text, expected in (
        (TEXT, []),
        (ON, [f"{operation} of '{folder}/{what}'" for operation in ("load", "save") for what in WHATS]),
    ):
        path.write_text(text.replace("layers: 8", "layers: 1").replace("folder: ", f"folder: {tmp_path}/"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        coordinator, _ = run_ranks(run_train, 2, str(path), store.port, backend="")
        assert coordinator.value == expected


WHATS = ("model", "optimizer")


def test_the_reports_experiment_prints_its_table():
    done = run_python("-m", "engine.ab", "--ranks", "2", "--layers", "1", "--saves", "2", timeout=150)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("no device")]
    assert [row.split("  ")[0] for row in rows] == ["coordination: gloo", "process_group: gloo", "default"]
    assert "2 processes, 48 entries a rank; default group: gloo" in done.stdout
