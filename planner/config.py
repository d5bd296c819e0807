"""What can be chosen about coordination, checked when it is chosen."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from planner import config_values
from planner.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

__all__ = ["CoordinationConfig"]


@dataclass(frozen=True, kw_only=True)
class CoordinationConfig:
    """Choose whether and how saves and loads are coordinated; made to be part of an engine's own config.

    Every rank of a save should use equal values; a rank's own waits follow its own values.

    Raises:
        ConfigError: a value is of the wrong type or impossible; all problems at once.
    """

    coordination: Literal["gloo", "default"] = "gloo"
    """``gloo``, or ``default`` to leave saves and loads to stock DCP, with the engine's own planner."""

    plan_timeout: timedelta = timedelta(minutes=10)
    """How long ranks may take to agree: to enter, to make a local plan, to move plans and metadata.
    Also how long a rank may show no sign of life before it is given up."""

    io_timeout: timedelta | None = None
    """How long a rank may stay inside ``write_data`` or ``read_data``; None: while it shows life."""

    progress_interval: timedelta = timedelta(seconds=30)
    """How often the coordinator logs whom it waits for."""

    strict: bool = False
    """Refuse, at its origin, an object that only pickle could carry, instead of pickling it alone."""

    remembered_nbytes: int = 256 * 2**20
    """How many bytes this process keeps of saves that succeeded, so that an unchanged save sends next to
    nothing; the bound holds for all saves of the process together. 0 remembers nothing."""

    def __post_init__(self) -> None:
        """Check every field."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if problems := config_values.problems_of(type(self), values):
            raise ConfigError(problems)

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], *, over: CoordinationConfig | None = None, path: str = ""
    ) -> CoordinationConfig:
        """Return the configuration that a mapping describes, as YAML, TOML, OmegaConf or ``asdict`` give it.

        Durations are numbers of seconds under ``plan_timeout_s`` and the like, or ``timedelta`` under
        ``plan_timeout``.

        Args:
            mapping: the values that are chosen.
            over: the others; None for the defaults.
            path: where the mapping stands in the engine's config, for errors, such as
                ``checkpoint.coordination``.

        Raises:
            ConfigError: unknown keys, wrong types or units, impossible values; all at once, each with
                its path and the nearest valid name.
        """
        return cls._over(over or cls(), *config_values.read_mapping(cls, mapping, path))

    @classmethod
    def from_env(
        cls, prefix: str = "DCP_COORDINATION_", *, over: CoordinationConfig | None = None
    ) -> CoordinationConfig:
        """Return the configuration that the environment describes.

        ``DCP_COORDINATION`` is ``gloo`` or ``default``; ``DCP_COORDINATION_PLAN_TIMEOUT_S`` and the like
        have numbers of seconds, ``none`` where that is possible, and 1 or 0.

        Args:
            prefix: of the variables' names; the first is the prefix without its last underscore.
            over: what holds where the environment says nothing; None for the defaults and
                ``coordination="default"``: what nobody turns on is off.

        Raises:
            ConfigError: unknown variables with this prefix, or impossible values; all at once.
        """
        found = config_values.read_environment(cls, os.environ, prefix, first="coordination")
        return cls._over(over or cls(coordination="default"), *found)

    @classmethod
    def _over(
        cls, over: CoordinationConfig, values: Mapping[str, Any], problems: list[str]
    ) -> CoordinationConfig:
        if problems:
            raise ConfigError(problems)
        return dataclasses.replace(over, **values)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values from which ``from_mapping`` makes an equal configuration."""
        return config_values.to_mapping(self)

    def save_planner(self, inner: SavePlanner | None = None) -> SavePlanner | None:
        """Return what to pass to ``dcp.save`` or ``dcp.async_save`` as ``planner``.

        Args:
            inner: the engine's own planner; None for DCP's.

        Returns:
            With ``coordination="gloo"`` a ``GlooCoordinatedPlanner`` around ``inner``, or ``inner`` if it
            is one; with ``"default"`` ``inner`` itself, or None.
        """
        from planner.coordinated import Coordinated  # noqa: PLC0415 - they import this module
        from planner.save_planner import GlooCoordinatedPlanner  # noqa: PLC0415 - the same

        if self.coordination == "default" or isinstance(inner, Coordinated):
            return inner
        return GlooCoordinatedPlanner(inner, config=self)

    def load_planner(self, inner: LoadPlanner | None = None) -> LoadPlanner | None:
        """Return what to pass to ``dcp.load`` as ``planner``; as ``save_planner``."""
        from planner.coordinated import Coordinated  # noqa: PLC0415 - they import this module
        from planner.load_planner import GlooCoordinatedLoadPlanner  # noqa: PLC0415 - the same

        if self.coordination == "default" or isinstance(inner, Coordinated):
            return inner
        return GlooCoordinatedLoadPlanner(inner, config=self)
