"""Coordinate torch.distributed.checkpoint saves and loads over a dedicated CPU gloo group.

``dcp.save(state_dict, checkpoint_id=..., planner=GlooCoordinatedPlanner())`` is all there is to do.
"""

from planner import seam as _seam

_seam.check()  # refuse a torch we cannot work with when we are imported, not in the middle of a save

from planner.config import CoordinationConfig  # noqa: E402
from planner.dist_wrapper import GlooDistWrapper  # noqa: E402
from planner.errors import (  # noqa: E402
    ConfigError,
    CoordinationError,
    CoordinationMismatch,
    CoordinationTimeout,
    FrameError,
    PayloadError,
    PlannerError,
    RemoteError,
    TransportError,
    UnencodableError,
    UnsupportedTorchError,
    WireError,
)
from planner.report import PhaseReport, SaveReport  # noqa: E402
from planner.save_planner import GlooCoordinatedPlanner  # noqa: E402
from planner.wire.objects import register_codec  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CoordinationConfig",
    "CoordinationError",
    "CoordinationMismatch",
    "CoordinationTimeout",
    "FrameError",
    "GlooCoordinatedPlanner",
    "GlooDistWrapper",
    "PayloadError",
    "PhaseReport",
    "PlannerError",
    "RemoteError",
    "SaveReport",
    "TransportError",
    "UnencodableError",
    "UnsupportedTorchError",
    "WireError",
    "register_codec",
]
