"""What the seam replaces, and how it refuses a torch that it does not know; each in a process of its own."""

import pytest

from tests.support.python import run_after_torch

UNKNOWN_TORCHES = {
    "a method with another parameter": (
        (
            "from torch.distributed.checkpoint.utils import _DistWrapper as W\n"
            "W.all_reduce = lambda self, step, map_fun, reduce_fun, extra: None"
        ),
        "_DistWrapper.all_reduce has parameters",
    ),
    "a new method": (
        "from torch.distributed.checkpoint.utils import _DistWrapper as W\nW.all_to_all = lambda self: None",
        "methods that are new to us: ['all_to_all']",
    ),
    "a saver without the planner": (
        (
            "import torch.distributed.checkpoint.state_dict_saver as s\n"
            "s._save_state_dict = lambda state_dict, storage_writer, process_group: s._DistWrapper"
        ),
        "lacks the parameters ['planner']",
    ),
    "a saver that makes no wrapper": (
        (
            "import torch.distributed.checkpoint.state_dict_saver as s\n"
            "s._save_state_dict = lambda state_dict, storage_writer, process_group, planner: None"
        ),
        "does not look up _DistWrapper by name",
    ),
    "a private name is gone": (
        "import torch.distributed.checkpoint.filesystem as f\ndel f._StorageInfo",
        "_StorageInfo",
    ),
    "no asynchronous executors": (
        "import torch.distributed.checkpoint._async_process_executor as a\ndel a._CHECKPOINT_PROCESS",
        "_CHECKPOINT_PROCESS is missing",
    ),
}

PROBE = """
import torch.distributed.checkpoint.state_dict_saver as saver
import torch.distributed.checkpoint.state_dict_loader as loader
{change}
before = (saver._DistWrapper, loader._DistWrapper, saver.__dict__.get("_save_state_dict"))
try:
    import planner
except ImportError as error:
    assert type(error).__name__ == "UnsupportedTorchError", repr(error)
    assert before == (saver._DistWrapper, loader._DistWrapper, saver.__dict__.get("_save_state_dict"))
    print(error)
else:
    print("imported")
"""


WITHOUT_GLOO = (
    "import torch.distributed.distributed_c10d as c10d, torch._C._distributed_c10d as module\n"
    "c10d._GLOO_AVAILABLE = False\ndel module.ProcessGroupGloo"
)


@pytest.fixture(scope="module")
def probed():
    changes = {name: change for name, (change, _) in UNKNOWN_TORCHES.items()}
    changes |= {"no gloo": WITHOUT_GLOO, "this one": ""}
    return run_after_torch({name: (PROBE.format(change=change), {}) for name, change in changes.items()})


@pytest.mark.parametrize("name", UNKNOWN_TORCHES)
def test_a_torch_that_differs_is_refused_at_import_by_name_and_left_untouched(name, probed):
    done = probed[name]
    assert done.returncode == 0, done.stderr
    assert UNKNOWN_TORCHES[name][1] in done.stdout
    assert "process_group=" in done.stdout  # the way out


def test_a_build_without_gloo_is_refused_at_import_with_what_to_install(probed):
    done = probed["no gloo"]
    assert done.returncode == 0, done.stderr
    assert "this build has no gloo. Install one that has" in done.stdout
    assert "process_group=" not in done.stdout  # needs gloo too


def test_this_torch_is_known(probed):
    assert probed["this one"].stdout == "imported\n"
