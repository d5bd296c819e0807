"""Storage and planner that fail where a test says, and exceptions that are hard to share."""

from __future__ import annotations

import threading

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Unpicklable(Exception):
    """Holds a lock, as exceptions of thread pools and clients do."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Unconstructible(Exception):
    """Takes two arguments, keeps one: unpickling it raises."""

    def __init__(self, text, number):
        super().__init__(text)
        self.number = number


class Mute(Exception):
    """Cannot even say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


class Gate(dcp.FileSystemWriter):
    """Holds the write until the test lets it go on; one in a process."""

    entered = threading.Event()
    opened = threading.Event()

    def write_data(self, plan, planner):
        self.entered.set()
        assert self.opened.wait(60)
        return super().write_data(plan, planner)


KINDS = {
    "plain": lambda: ValueError("no space left on device"),
    "unpicklable": lambda: Unpicklable("no space left on device"),
    "unconstructible": lambda: Unconstructible("no space left on device", 28),
    "mute": lambda: Mute("no space left on device"),
    "interrupt": lambda: KeyboardInterrupt("no space left on device"),
    "exit": lambda: SystemExit("no space left on device"),
    "os_error": lambda: OSError(28, "no space left on device", "/checkpoints/x"),
}

HOOKS = {
    # name: (only the coordinator calls it, it belongs to the planner)
    "storage_meta": (False, False),
    "set_up_planner": (False, True),
    "set_up_storage_writer": (False, False),
    "create_local_plan": (False, True),
    "prepare_local_plan": (False, False),
    "create_global_plan": (True, True),
    "prepare_global_plan": (True, False),
    "finish_plan": (False, True),
    "write_data": (False, False),
    "finish": (True, False),
}


def failing(cls, hook, ranks, make):
    """Return a subclass of ``cls`` whose ``hook`` calls ``make`` on ``ranks`` and raises what it returns."""

    def fail(self, *args, **kwargs):
        if dist.get_rank() in ranks:
            raise make()
        return getattr(cls, hook)(self, *args, **kwargs)

    if hook == "set_up_planner":  # DCP looks at its parameters

        def fail(self, state_dict, storage_meta=None, is_coordinator=False):
            if dist.get_rank() in ranks:
                raise make()
            cls.set_up_planner(self, state_dict, storage_meta, is_coordinator)

    return type(f"Failing{cls.__name__}", (cls,), {hook: fail})


def make_storage_and_planner(folder, hook, ranks, make):
    """Return a storage writer and an inner planner, one of which fails in ``hook`` on ``ranks``."""
    writer, planner = dcp.FileSystemWriter, dcp.DefaultSavePlanner
    if HOOKS[hook][1]:
        planner = failing(planner, hook, ranks, make)
    else:
        writer = failing(writer, hook, ranks, make)
    return writer(folder, sync_files=False), planner()
