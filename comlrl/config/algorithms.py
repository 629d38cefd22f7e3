"""The six algorithm sections as frozen dataclasses.

Torch is not imported, so mistakes are reported before anything heavy loads. The trainers'
docstrings explain symbols and equations.
"""

from __future__ import annotations

from collections.abc import Mapping

from comlrl.config.algorithms_common import Advantage
from comlrl.config.algorithms_online import (
    ActorCriticConfig,
    GRPOConfig,
    MAGRPOConfig,
    PPOConfig,
    SHPPOConfig,
)
from comlrl.config.algorithms_preferences import MADPOConfig, MARLHFConfig, PreferenceConfig
from comlrl.config.resolved import CommonConfig

__all__ = [
    "EXTRA_SECTIONS",
    "SECTIONS",
    "SINGLE_TURN_KEYS",
    "ActorCriticConfig",
    "Advantage",
    "Algorithms",
    "CommonConfig",
    "GRPOConfig",
    "MADPOConfig",
    "MAGRPOConfig",
    "MARLHFConfig",
    "PPOConfig",
    "PreferenceConfig",
    "SHPPOConfig",
    "sections_of",
]

Algorithms = Mapping[str, type[CommonConfig]]  # name → class of its section

SECTIONS: dict[str, type[CommonConfig]] = {
    "grpo": GRPOConfig,
    "magrpo": MAGRPOConfig,
    "madpo": MADPOConfig,
    "marlhf": MARLHFConfig,
    "ppo": PPOConfig,
    "shppo": SHPPOConfig,
}
EXTRA_SECTIONS = {"marlhf": ("magrpo", "ppo")}  # read in addition to the algorithm's own section
# Keys that MARLHF's online stage does not share with `marlhf:`, where each is limited to one value.
SINGLE_TURN_KEYS = ("num_turns", "joint_mode", "handoff", "handoff_width")


def sections_of(algorithm: str, algorithms: Algorithms = SECTIONS) -> dict[str, type[CommonConfig]]:
    """Return the sections allowed in a file of this algorithm, the algorithm's own first."""
    names = (algorithm, *EXTRA_SECTIONS.get(algorithm, ()))
    return {name: algorithms[name] for name in names}
