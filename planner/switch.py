"""Coordination for a whole process: every save and load of DCP, whatever planner it has, or none.

For engines that pass no planner, or one of their own. While this is on, planner.seam wraps the planner
of each call, and ``_DistWrapper`` makes one of ours, for code that imports it by name.

A stack of layers says what holds: the one of ``enable`` below, those of ``coordinated`` above it, the
latest on top. It belongs to the process, not to a thread or context: DCP saves in threads of its own.
What a call is coordinated with is settled when it begins; changes after that are for the next one.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.utils import _DistWrapper

from planner import names
from planner.config import CoordinationConfig
from planner.coordinated import Coordinated
from planner.dist_wrapper import GlooDistWrapper
from planner.errors import ConfigError, SwitchError
from planner.load_planner import GlooCoordinatedLoadPlanner
from planner.save_planner import GlooCoordinatedPlanner
from planner.turns import Turns

__all__ = ["Running", "active_config", "coordinate", "coordinated", "disable", "enable"]

_VARIABLE = "DCP_COORDINATION"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Layer:
    config: CoordinationConfig
    source: str


_lock = threading.RLock()
_enabled: _Layer | None = None
_blocks: list[_Layer] = []
_unannounced: _Layer | None = None  # turned on before anybody listened at level INFO
_has_announced_a_block = False


def active_config() -> CoordinationConfig | None:
    """Return what a call that begins now is coordinated with; None where that is left to its planner."""
    with _lock:
        layer = _blocks[-1] if _blocks else _enabled
    return None if layer is None or layer.config.coordination != "gloo" else layer.config


def enable(config: CoordinationConfig | None = None) -> None:
    """Coordinate every save and load of this process from now on.

    Covers ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` (in threads and processes, with the start of
    the latter's daemon) with no planner or any, which is wrapped as ``inner``, through whatever name they
    were imported; and each ``_DistWrapper`` that code makes while this is on, through whatever name. A
    planner of this library stays as it is, with its own configuration.

    Call it on all ranks, at the same point between saves, before or after the process groups are made.
    No collective, never blocks. Again with an equal ``config`` it does nothing, with another that one
    holds from then on; ``disable`` ends it however often it was called.

    Args:
        config: how to coordinate; None for the defaults. One with ``coordination="default"`` leaves all
            calls as they are, and says so in the log.

    Raises:
        ConfigError: ``config`` is no configuration.
        SwitchError: a save or load of this process is running, or another library keeps ours from being
            reached. Nothing was changed.
    """
    _enable(_checked(config) or CoordinationConfig(), f"planner.enable() at {_caller()}")


def _enable(config: CoordinationConfig, source: str) -> None:
    global _enabled  # noqa: PLW0603 - the switch is what has state of the process
    with _lock:
        if _enabled is not None and _enabled.config == config:
            return
        _refuse_while_running("enable")
        _check_names(config)
        _enabled = _Layer(config, source)
        _put_names()
        _announce(_enabled)


def disable() -> None:
    """End what ``enable`` began, and put back every name that it replaced.

    Call it on all ranks, at the same point between saves. No collective, never blocks. Where nothing
    is on it does nothing. A block of ``coordinated`` that is open stays in force.

    Raises:
        SwitchError: a save or load of this process is running, and nothing was changed; or another
            library has replaced a name since ``enable``: then coordination is off, and the name is left
            as it is.
    """
    global _enabled, _unannounced  # noqa: PLW0603 - see enable
    with _lock:
        if _enabled is None:
            return
        _refuse_while_running("disable")
        was_on = active_config() is not None
        _enabled = _unannounced = None
        if was_on and active_config() is None:
            _logger.info("torch.distributed.checkpoint: calls of this process are stock DCP's again")
        if stranger := _put_names():
            raise SwitchError(
                f"coordination is off, but {stranger} after it was turned on, and was left there; what "
                "this library had put there does nothing any more. Undo patches in the opposite order"
            )


@contextmanager
def coordinated(config: CoordinationConfig | None = None) -> Iterator[None]:
    """Coordinate every save and load of this process that begins inside the block; see ``enable``.

    Enter and leave it on all ranks at the same point of the program. Blocks may nest, the innermost
    holds, and overlap in threads: they count for the whole process. A save that is running when a block
    is entered or left, as after ``dcp.async_save``, goes on as it began.

    Args:
        config: how to coordinate; None for what holds outside, or for the defaults where nothing is on.
            One with ``coordination="default"`` leaves the calls of the block to stock DCP.

    Raises:
        ConfigError: ``config`` is no configuration.
        SwitchError: another library keeps ours from being reached; nothing was changed.
    """
    layer = _Layer(
        _checked(config) or active_config() or CoordinationConfig(),
        f"planner.coordinated() at {_caller(depth=3)}",  # below contextlib
    )
    _enter(layer)
    try:
        yield
    finally:
        _leave(layer)


def _enter(layer: _Layer) -> None:
    global _has_announced_a_block  # noqa: PLW0603 - once in a process, since a block may be around each save
    with _lock:
        _check_names(layer.config)
        _blocks.append(layer)
        _put_names()
        if not _has_announced_a_block:
            _has_announced_a_block = True
            _announce(layer)


def _leave(layer: _Layer) -> None:
    with _lock:
        _blocks.remove(layer)
        if stranger := _put_names():  # an error here would hide what the block raised
            _logger.warning("at the end of %s: %s meanwhile, and was left there", layer.source, stranger)


def _checked(config: object) -> CoordinationConfig | None:
    if config is not None and not isinstance(config, CoordinationConfig):
        raise ConfigError([f"config must be a CoordinationConfig, not {type(config).__name__}"])
    return config


def _caller(depth: int = 2) -> str:
    frame = sys._getframe(depth)  # noqa: SLF001 - for a log line, without the cost of inspect.stack
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _announce(layer: _Layer) -> None:
    """Say that it is on, now or as soon as somebody listens: this may be before logging is set up."""
    global _unannounced  # noqa: PLW0603 - see enable
    _unannounced = layer
    if _logger.isEnabledFor(logging.INFO):
        _unannounced = None
        is_on = layer.config.coordination == "gloo"
        _logger.info(
            "torch.distributed.checkpoint: saves and loads of this process are %s, by %s",
            "coordinated over gloo" if is_on else "left to stock DCP",
            layer.source,
        )


def enable_from_environment(*, default: str = "default", source: str = "") -> None:
    """Turn coordination on if DCP_COORDINATION says ``gloo``; called when planner is imported.

    How is for the other variables of ``CoordinationConfig.from_env``, which are looked at only then.

    Args:
        default: what holds where DCP_COORDINATION says nothing.
        source: who asks, for the log, where it is not the variable alone.

    Raises:
        ConfigError: what is wrong with the variables; nothing was changed.
    """
    if os.environ.get(_VARIABLE, default) == "default":
        return
    config = CoordinationConfig.from_env(over=CoordinationConfig())
    _enable(config, source or f"the environment variable {_VARIABLE}")


# -- what is running ---------------------------------------------------------------------------------


_running: set[Running] = set()


class Running:
    """One save or load of this process, of whatever planner, from its call to its end."""

    def __init__(self, operation: str) -> None:
        self.description = f"{operation} of thread {threading.current_thread().name!r}"
        with _lock:
            _running.add(self)

    def end(self, *_: object) -> None:
        """Note that it has ended."""
        with _lock:
            _running.discard(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()


def _refuse_while_running(what: str) -> None:
    if _running:
        running = ", ".join(sorted(each.description for each in _running))
        raise SwitchError(
            f"planner.{what}() came while this process is in: {running}; nothing was changed. Call it "
            "between saves, after the futures of asynchronous ones"
        )


# -- what a call gets --------------------------------------------------------------------------------

_WRAPPERS: dict[str, Any] = {"save": GlooCoordinatedPlanner, "load": GlooCoordinatedLoadPlanner}
_turns: dict[int, tuple[weakref.ref[Any], Turns]] = {}  # of planners that we wrap, by their id


def coordinate(planner: Any, operation: str) -> Any:
    """Return the planner that a call which begins now runs with; ``planner`` itself where nothing is on."""
    config = active_config()
    if config is None or isinstance(planner, Coordinated):
        return planner
    if _unannounced is not None:
        _announce(_unannounced)
    ours = _WRAPPERS[operation](planner, config=config)
    if planner is not None:
        ours.turns = _turns_of(planner)
    return ours


def _turns_of(planner: Any) -> Turns:
    """Return the turns of a planner, which keeps the state of one call: the same for all its calls."""
    with _lock:
        known = _turns.get(id(planner))
        if known is not None and known[0]() is planner:
            return known[1]
        turns = Turns()
        key = id(planner)
        try:
            _turns[key] = (weakref.ref(planner, lambda _: _turns.pop(key, None)), turns)
        except TypeError:  # its class has slots
            return turns
        return turns


# -- _DistWrapper, for code that makes its own -------------------------------------------------------


def _make_coordinated(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: _DistWrapper, *args: Any, **kwargs: Any) -> None:
        config = active_config()
        if config is None or isinstance(self, GlooDistWrapper):
            original(self, *args, **kwargs)
            return
        self.__class__ = _coordinated_class(type(self))  # type: ignore[arg-type]  # classes are hashable
        GlooDistWrapper.__init__(self, *args, config=config, **kwargs)  # type: ignore[arg-type]

    return init


@functools.cache
def _coordinated_class(stock: type[_DistWrapper]) -> type[GlooDistWrapper]:
    """Return our class for instances of ``stock``, below what a subclass of somebody else overrides."""
    if stock is _DistWrapper:
        return GlooDistWrapper
    return type(stock.__name__, (stock, GlooDistWrapper), {"__module__": stock.__module__})


def _is_reached() -> bool:
    return isinstance(_DistWrapper(None, False, 0), GlooDistWrapper)  # noqa: FBT003 - the stock signature


_has_names = False


def _check_names(config: CoordinationConfig) -> None:
    """Refuse where another library has taken away what calls must find."""
    if config.coordination != "gloo":
        return
    for name, stranger in names.check_all():
        if name == "_DistWrapper":
            raise SwitchError(
                f"{stranger} after this library came to it; saves would run over the device group. Undo "
                "that, or do it before planner is imported; nothing was changed"
            )
        _logger.warning(
            "%s after this library came to it; calls that end there are not coordinated", stranger
        )


def _put_names() -> str | None:
    """Have names replaced exactly while something is on; return who is in the way of putting one back."""
    global _has_names  # noqa: PLW0603 - see enable
    if active_config() is not None:
        if not _has_names or not _is_reached():
            names.replace(_DistWrapper, "__init__", _make_coordinated(names.find(_DistWrapper, "__init__")))
        _has_names = True
        return None
    stranger = names.restore(_DistWrapper, "__init__") if _has_names else None
    _has_names = False
    return stranger
