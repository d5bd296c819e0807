"""How DCP comes to use our wrapper, and the checks that it still can.

``_save_state_dict`` builds a ``_DistWrapper`` before it touches the planner, so both names are
replaced where the saver and the loader look them up: the function to note whose planner the call has,
the class to choose the wrapper by that note. A call with any other planner gets the stock class.

Rule of this file: everything private of torch that we rely on is checked in ``find_problems``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint import utils as dcp_utils
from torch.distributed.checkpoint.utils import _DistWrapper

from planner import async_save, names, switch
from planner.coordinated import Coordinated
from planner.dist_wrapper import GlooDistWrapper
from planner.errors import CoordinationError, CoordinationMismatch, UnsupportedTorchError
from planner.plain_finish import plain_finish_of

__all__ = ["check", "find_problems", "install"]


@dataclasses.dataclass
class _Call:
    """One save or load by one of our planners, while it runs."""

    planner: Coordinated
    operation: str
    storage: Any
    wrapper: GlooDistWrapper | None = None
    planner_turn: object | None = None


_logger = logging.getLogger(__name__)

_current_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar(
    "gloo_coordinated_planner_call", default=None
)


def _choose_dist_wrapper(
    group: dist.ProcessGroup | None,
    use_dist: bool,  # noqa: FBT001 - the signature of the stock class
    coordinator_rank: int,
) -> _DistWrapper:
    """Return ours for a call with our planner, the stock class's for any other."""
    call = _current_call.get()
    if call is None:
        _refuse_unnoted(sys._getframe(1))
        return _DistWrapper(group, use_dist, coordinator_rank)
    call.wrapper = GlooDistWrapper(
        group,
        use_dist,
        coordinator_rank,
        operation=call.operation,
        checkpoint=_checkpoint_of(call.storage),
        config=call.planner.config,
        leaves_plans=lambda: call.planner.leaves_plans(call.storage),
        is_pure=lambda: call.planner.is_pure(call.storage),
        plain_finish=lambda results: plain_finish_of(call.storage, results),
        mode_of=_mode_of,
    )
    call.planner.has_begun = True
    call.wrapper.begin(call.planner.reserved)
    _expect_world(call.planner, group, use_dist=use_dist)
    _await_planner(call)
    call.planner.storage_in_use = call.storage
    return call.wrapper


def _refuse_unnoted(caller: FrameType) -> None:
    """Refuse a call with our planner that did not come by ``_noting_the_planner``."""
    if isinstance(caller.f_locals.get("planner"), Coordinated):
        raise CoordinationError(
            f"{caller.f_code.co_name} runs with a planner of this library, but another library replaced it "
            "after planner was imported; the save or load would run over the device group",
            advice="undo that, or do it before planner is imported",
        )


def _require_wrapper(module: ModuleType, operation: str) -> None:
    """Refuse a call whose wrapper would not be ours, before anything has begun."""
    if stranger := names.check(module, "_DistWrapper"):
        raise CoordinationError(
            f"{stranger} after planner was imported; the {operation} would run over the device group",
            operation=operation,
            advice="undo that, or do it before planner is imported",
        )


def _await_planner(call: _Call) -> None:
    """Wait until no other save or load uses the same planner object: it keeps the state of one."""
    turns = call.planner.turns
    if turns.is_this_threads():
        raise CoordinationError(
            "this planner object is in another save or load in this very thread",
            advice="give each of them a planner of its own",
        )
    call.planner_turn = call.planner.planner_turn or turns.take()
    while not turns.wait(call.planner_turn, call.planner.config.progress_interval):
        _logger.warning("%s: waiting for another save or load with the same planner object", call.operation)


def _expect_world(planner: Coordinated, group: dist.ProcessGroup | None, *, use_dist: bool) -> None:
    """Refuse a save in a process whose ranks are not those of the trainer that asked for it."""
    if planner.expected_world is None:
        return
    found = (dist.get_rank(group), dist.get_world_size(group)) if use_dist else (0, 1)
    if found != planner.expected_world:
        rank, world_size = planner.expected_world
        raise CoordinationMismatch(
            f"the checkpoint process is rank {found[0]} of {found[1]}, but the save is by rank {rank} of "
            f"{world_size}: it was started for another process group",
            ranks=[found[0]],
            advice=(
                "DCP keeps one checkpoint process for the group of the first asynchronous save; use "
                "AsyncCheckpointerType.THREAD for other groups"
            ),
        )


def _noting_the_planner(
    original: Callable[..., Any], module: ModuleType, operation: str, storage_name: str
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments.get("planner")
        planner = switch.coordinate(given, operation)
        if planner is not given:
            bound.arguments["planner"] = planner
            args, kwargs = bound.args, bound.kwargs
        call = None
        if isinstance(planner, Coordinated):
            _require_wrapper(module, operation)
            call = _Call(planner, operation, bound.arguments.get(storage_name))
        token = _current_call.set(call)
        try:
            with switch.Running(operation):
                return original(*args, **kwargs) if call is None else _run_call(call, original, args, kwargs)
        finally:
            _current_call.reset(token)

    return run


def _checkpoint_of(storage: Any) -> str:
    try:
        checkpoint = getattr(storage, "checkpoint_id", None)
        return "" if checkpoint is None else str(checkpoint)
    except Exception:  # noqa: BLE001 - DCP asks again, inside the part whose failures all ranks hear of
        return ""


def _mode_of(local_step: Callable[[], Any]) -> str:
    """Say which metadata a load uses, which each rank finds out for itself in its local step."""
    code = getattr(inspect.unwrap(local_step), "__code__", None)
    if code is None or code.co_name != "local_step" or "metadata" not in code.co_freevars:
        return ""  # a save
    cells = dict(zip(code.co_freevars, inspect.unwrap(local_step).__closure__ or (), strict=True))
    return "from global metadata" if cells["use_collectives"].cell_contents else "from rank-local metadata"


def _run_call(call: _Call, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    start = time.monotonic()
    try:
        result = original(*args, **kwargs)
    except BaseException as error:
        try:
            _end_call(call, error, start)
        except Exception:  # the cause must not be lost to what follows from it
            _logger.warning("could not tell the other ranks of the error that follows", exc_info=True)
        raise
    _end_call(call, None, start)
    return result


def _end_call(call: _Call, error: BaseException | None, start: float) -> None:
    if call.planner_turn is not None:  # else it is another call's that runs
        call.planner.storage_in_use = None
    call.planner.turns.end(call.planner_turn)
    if call.wrapper is not None:
        report = call.wrapper.end(error)
        report.total_seconds = time.monotonic() - start
        (call.planner.asked_as or call.planner).report = report


_CALLS = (
    (state_dict_saver, "_save_state_dict", "save", "storage_writer"),
    (state_dict_loader, "_load_state_dict", "load", "storage_reader"),
)
_is_installed = False


def install() -> None:
    """Replace the names in the saver and the loader, once in a process; called when we are imported.

    Raises:
        UnsupportedTorchError: this torch lacks something we rely on; nothing was replaced.
    """
    global _is_installed  # noqa: PLW0603 - the seam is the one place with state of the process
    if _is_installed:
        return
    check()
    for module, function, operation, storage in _CALLS:
        ours = _noting_the_planner(names.find(module, function), module, operation, storage)
        names.replace(module, function, ours)
        names.replace(module, "_DistWrapper", _choose_dist_wrapper)
    async_save.install()
    _is_installed = True


def check() -> None:
    """Raise UnsupportedTorchError, naming everything missing, if this torch cannot be used."""
    if problems := [*find_problems(), *async_save.find_problems()]:
        raise UnsupportedTorchError([f"torch {torch.__version__}", *problems])


_METHODS = {
    "__init__": ["self", "group", "use_dist", "coordinator_rank"],
    "get_rank": ["self"],
    "get_world_size": ["self"],
    "broadcast_object": ["self", "object"],
    "gather_object": ["self", "object"],
    "all_gather_object": ["self", "object"],
    "scatter_object": ["self", "object_list"],
    "reduce_scatter": ["self", "step", "map_fun", "reduce_fun"],
    "all_reduce": ["self", "step", "map_fun", "reduce_fun"],
    "all_gather": ["self", "step", "map_fun"],
    "broadcast": ["self", "step", "map_fun"],
    "barrier": ["self"],
}


def find_problems() -> list[str]:
    """Return what this torch lacks of all that we rely on, one sentence each; empty when it can be used."""
    problems = []
    stock = dcp_utils._DistWrapper
    for name, expected in _METHODS.items():
        method = stock.__dict__.get(name)
        found = list(inspect.signature(method).parameters) if callable(method) else "nothing"
        if found != expected:
            problems.append(f"_DistWrapper.{name} has parameters {found}, expected {expected}")
    known = {"_run", "_decode", *_METHODS}
    unknown = [name for name, value in vars(stock).items() if inspect.isfunction(value) and name not in known]
    if unknown:
        problems.append(f"_DistWrapper has methods that are new to us: {sorted(unknown)}")
    for module, function, _, storage in _CALLS:
        where = f"{module.__name__}.{function}"
        original = getattr(module, function, None)
        if not callable(original):
            problems.append(f"{where} is missing")
            continue
        parameters = inspect.signature(original).parameters
        missing = [name for name in (storage, "process_group", "planner") if name not in parameters]
        if missing:
            problems.append(f"{where} lacks the parameters {missing}")
        code = inspect.unwrap(original).__code__
        if "_DistWrapper" not in code.co_names:
            problems.append(f"{where} does not look up _DistWrapper by name")
        public = getattr(module, function.split("_")[1])
        if function not in inspect.unwrap(public).__code__.co_names:
            problems.append(f"{module.__name__}.{public.__name__} does not call {function} by name")
    for owner, name in (
        (dist.distributed_c10d, "_get_default_store"),
        (Store, "clone"),
        (Store, "compare_set"),
        (Store, "multi_set"),
        (Store, "check"),
        (Store, "multi_get"),
        (Store, "add"),
        (Store, "delete_key"),
        (ProcessGroupGloo, "_Options"),
        (ProcessGroupGloo, "create_device"),
        (ProcessGroupGloo, "create_default_device"),
        (ProcessGroupGloo, "send"),
        (ProcessGroupGloo, "recv"),
    ):
        if not hasattr(owner, name):
            problems.append(f"{owner.__name__}.{name} is missing")
    return problems
