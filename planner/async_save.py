"""How asynchronous saves come to us: what DCP looks up by name on the caller's thread.

``async_save`` hands the planner to an executor, which saves in a thread, or in a process of its own
through a daemon. The save itself then meets planner.seam as any other does. What must happen before,
on the caller's thread, is here: a turn is taken in the order of the calls, the daemon's address is
agreed on over the store, and DCP's assertion that the default group has a CPU backend is answered,
since a save by our planners needs none.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor, state_dict_saver
from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.distributed_c10d import _get_default_group

from planner import names, switch
from planner.channel import Channel, open_channel
from planner.config import CoordinationConfig
from planner.coordinated import Coordinated
from planner.dist_wrapper import GlooDistWrapper
from planner.errors import CoordinationMismatch
from planner.turns import Turns

__all__ = ["find_problems", "install"]

_starting_daemon: contextvars.ContextVar[CoordinationConfig | None] = contextvars.ContextVar(
    "gloo_coordinated_planner_starting_daemon", default=None
)
_daemon_turns = Turns()
_A_LONG_TIME = timedelta(minutes=10)
_daemon_members: list[tuple[int, ...]] = []  # of the one daemon of this process, once we have started it


class _Coordinating:
    """Settles on the caller's thread what a save is coordinated with."""

    def execute_save(self, staging_future_or_state_dict: Any, **options: Any) -> Future[Any]:
        running = switch.Running("asynchronous save")
        try:
            planner = options["planner"] = switch.coordinate(options.get("planner"), "save")
            save = partial(super().execute_save, staging_future_or_state_dict)  # type: ignore[misc]
            is_ours = isinstance(planner, Coordinated)
            future: Future[Any] = self._save(planner, save, options) if is_ours else save(**options)
        except BaseException:
            running.end()
            raise
        future.add_done_callback(running.end)
        return future

    def _save(
        self, planner: Coordinated, save: Callable[..., Future[Any]], options: dict[str, Any]
    ) -> Future[Any]:
        raise NotImplementedError


class _ThreadExecutor(_Coordinating, _ThreadBasedAsyncCheckpointExecutor):
    """Takes the save's turn on the caller's thread."""

    def _save(
        self, planner: Coordinated, save: Callable[..., Future[Any]], options: dict[str, Any]
    ) -> Future[Any]:
        channel = _channel_of(options)
        reserved = None if channel is None else (channel, channel.turns.take())
        options["planner"] = ours = planner.copy_for_one_save(reserved=reserved)

        def end_turns(future: Future[Any] | None = None) -> None:
            planner.turns.end(ours.planner_turn)
            if reserved is None:
                return
            try:
                if future is not None and not ours.has_begun:
                    _leave_save(reserved, planner.config, options.get("process_group"), future)
            finally:
                reserved[0].turns.end(reserved[1])

        try:
            future = save(**options)
        except BaseException:
            end_turns()
            raise
        future.add_done_callback(end_turns)
        return future


class _ProcessExecutor(_Coordinating, _ProcessBasedAsyncCheckpointExecutor):
    """Starts the daemon without the device group, and refuses one that has other ranks."""

    _turn: object | None = None

    def _save(
        self, planner: Coordinated, save: Callable[..., Future[Any]], options: dict[str, Any]
    ) -> Future[Any]:
        group = options.get("process_group")
        members = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
        is_running = _async_process_executor._CHECKPOINT_PROCESS is not None
        if is_running and _daemon_members and _daemon_members[0] != members:
            raise CoordinationMismatch(
                f"the checkpoint process of this rank was started for global ranks "
                f"{list(_daemon_members[0])}, but this save is by global ranks {list(members)}",
                operation="save",
                checkpoint=str(options.get("checkpoint_id") or ""),
                phase="enter",
                ranks=[dist.get_rank(group)],
                advice=(
                    "DCP keeps one checkpoint process for the group of the first asynchronous save; use "
                    "AsyncCheckpointerType.THREAD for other groups"
                ),
            )
        expected = (dist.get_rank(group), len(members)) if dist.is_initialized() else None
        no_dist = bool(options.get("no_dist"))
        # The copy that arrives in the daemon has turns of its own there; only who asked travels along.
        options["planner"] = ours = planner.copy_for_one_save(expected_world=None if no_dist else expected)
        planner.turns.end(ours.planner_turn)
        self._turn = _daemon_turns.take()
        token = _starting_daemon.set(planner.config)
        try:
            future = save(**options)
        except BaseException:
            _daemon_turns.end(self._turn)
            raise
        finally:
            _starting_daemon.reset(token)
        if not is_running:
            _daemon_members[:] = [members]
        return future

    def _execute_save_impl(self, **options: Any) -> Any:  # type: ignore[override]  # submitted as self._execute_save_impl
        """Save through the daemon, in the background thread of this one save."""
        turn = self._turn
        if turn is None:
            return super()._execute_save_impl(**options)
        try:
            # DCP starts a second daemon where two first saves overlap, and does not tell their answers apart.
            while not _daemon_turns.wait(turn, _A_LONG_TIME):
                pass
            return super()._execute_save_impl(**options)
        finally:
            _daemon_turns.end(turn)


def _leave_save(
    reserved: tuple[Channel, object],
    config: CoordinationConfig,
    group: dist.ProcessGroup | None,
    future: Future[Any],
) -> None:
    """Tell the other ranks of a save that ended here before it began, as when staging fails."""
    error = CancelledError() if future.cancelled() else future.exception()
    if error is None or not reserved[0].is_current:  # without process groups there is nobody to tell
        return
    # Without a checkpoint's name, which only its storage knows: a failure is told all the same.
    wrapper = GlooDistWrapper(group, use_dist=True, coordinator_rank=0, operation="save", config=config)
    try:
        wrapper.begin(reserved)
    except CheckpointException:
        return  # then they know better than we why it ended
    wrapper.end(error)


def _channel_of(options: dict[str, Any]) -> Channel | None:
    """Return the channel of a save's ranks, or None where it has none: alone, or no member."""
    group = options.get("process_group")
    if options.get("no_dist") or not dist.is_initialized():
        return None
    if dist.get_rank(group) < 0 or dist.get_world_size(group) == 1:
        return None
    return open_channel(group, 0)  # async_save has no other coordinator


def _choose_dist_wrapper_for_daemon(
    group: dist.ProcessGroup | None,
    use_dist: bool,  # noqa: FBT001 - the signature of the stock class
    coordinator_rank: int,
) -> _DistWrapper:
    config = _starting_daemon.get()
    if config is None:
        return _DistWrapper(group, use_dist, coordinator_rank)
    return GlooDistWrapper(
        group, use_dist, coordinator_rank, operation="start of the checkpoint process", config=config
    )


class _WithCpu:
    """What ``async_save`` sees of a default group without a CPU backend: it asks for nothing else."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._device_types = [*group._device_types, torch.device("cpu")]


def _default_group_for_async_save() -> Any:
    group = _get_default_group()
    caller = sys._getframe(1)
    is_asking = caller.f_code.co_name == "async_save" and "pg" in caller.f_code.co_varnames
    is_ours = isinstance(caller.f_locals.get("planner"), Coordinated) or switch.active_config() is not None
    if is_asking and is_ours:
        return _WithCpu(group)
    return group


def install() -> None:
    """Replace the names that asynchronous saves look up; called once, by planner.seam."""
    for module, name, ours in (
        (state_dict_saver, "_ThreadBasedAsyncCheckpointExecutor", _ThreadExecutor),
        (state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor", _ProcessExecutor),
        (state_dict_saver, "_get_default_group", _default_group_for_async_save),
        (_async_process_executor, "_DistWrapper", _choose_dist_wrapper_for_daemon),
    ):
        names.replace(module, name, ours)


def find_problems() -> list[str]:
    """Return what this torch lacks of what asynchronous saves rely on, one sentence each."""
    looked_up = inspect.unwrap(state_dict_saver.async_save).__code__.co_names
    problems = [
        f"async_save does not look up {name} by name"
        for name in (
            "_get_default_group",
            "_ThreadBasedAsyncCheckpointExecutor",
            "_ProcessBasedAsyncCheckpointExecutor",
        )
        if name not in looked_up
    ]
    if not hasattr(_async_process_executor, "_CHECKPOINT_PROCESS"):
        problems.append("_async_process_executor._CHECKPOINT_PROCESS is missing")
    init = _async_process_executor._ProcessGroupInitInfo.__init__
    if "_DistWrapper" not in init.__code__.co_names:
        problems.append("_ProcessGroupInitInfo does not look up _DistWrapper by name")
    return problems
