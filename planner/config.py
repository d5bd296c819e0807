"""What can be chosen about coordination, checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from planner.errors import ConfigError

__all__ = ["CoordinationConfig"]


@dataclass(frozen=True, kw_only=True)
class CoordinationConfig:
    """Choose how one save or load is coordinated.

    Every rank of a save should use equal values; a rank's own waits follow its own values.

    Raises:
        ConfigError: a value is of the wrong type or impossible; all problems at once.
    """

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
        problems = []
        for name in ("plan_timeout", "io_timeout", "progress_interval"):
            value = getattr(self, name)
            if value is None and name == "io_timeout":
                continue
            if not isinstance(value, timedelta):
                problems.append(
                    f"{name} must be a datetime.timedelta, not {type(value).__name__} {value!r}; "
                    f"write {name}=timedelta(seconds=...)"
                )
            elif value <= timedelta(0):
                problems.append(f"{name} must be positive, not {value}")
        if not isinstance(self.strict, bool):
            problems.append(f"strict must be True or False, not {self.strict!r}")
        if type(self.remembered_nbytes) is not int or self.remembered_nbytes < 0:
            problems.append(
                f"remembered_nbytes must be a number of bytes, 0 or more, not {self.remembered_nbytes!r}"
            )
        if problems:
            raise ConfigError(problems)
