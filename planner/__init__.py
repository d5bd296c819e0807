"""Coordinate torch.distributed.checkpoint saves and loads over a dedicated CPU gloo group.

``dcp.save(state_dict, checkpoint_id=..., planner=GlooCoordinatedPlanner())`` is all there is to do; for
engines that pass no planner, or their own, ``planner.enable()``.
"""

import torch as _torch
import torch.distributed as _dist

from planner.errors import UnsupportedTorchError

if not (_dist.is_available() and _dist.is_gloo_available()):
    raise UnsupportedTorchError(
        [f"torch {_torch.__version__}", "this build has no gloo"],
        "Install one that has: those of pytorch.org do, and one from source with USE_GLOO=1",
    )

try:
    from planner import seam as _seam
except (ImportError, AttributeError) as _error:  # a private name that we import is gone
    raise UnsupportedTorchError([str(_error)]) from _error

# Now, so that a torch we cannot work with is refused here and not in the middle of a save, and so that
# in the process of an asynchronous save the arrival of a planner is enough.
_seam.install()

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
    SwitchError,
    TransportError,
    UnencodableError,
    WireError,
)
from planner.load_planner import GlooCoordinatedLoadPlanner  # noqa: E402
from planner.report import PhaseReport, SaveReport  # noqa: E402
from planner.save_planner import GlooCoordinatedPlanner  # noqa: E402
from planner.switch import coordinated, disable, enable, enable_from_environment  # noqa: E402
from planner.wire.objects import register_codec  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CoordinationConfig",
    "CoordinationError",
    "CoordinationMismatch",
    "CoordinationTimeout",
    "FrameError",
    "GlooCoordinatedLoadPlanner",
    "GlooCoordinatedPlanner",
    "GlooDistWrapper",
    "PayloadError",
    "PhaseReport",
    "PlannerError",
    "RemoteError",
    "SaveReport",
    "SwitchError",
    "TransportError",
    "UnencodableError",
    "UnsupportedTorchError",
    "WireError",
    "coordinated",
    "disable",
    "enable",
    "register_codec",
]

enable_from_environment()
