"""The six algorithm sections as frozen dataclasses.

No torch here, so that a mistake is answered before anything heavy loads. Symbols and equations
are in the docstrings of the trainers.
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
EXTRA_SECTIONS = {"marlhf": ("magrpo", "ppo")}  # read beside the algorithm's own
# Keys that MARLHF's online stage does not take from `marlhf:`; each has one value in its section.
SINGLE_TURN_KEYS = ("num_turns", "joint_mode", "handoff", "handoff_width")


def sections_of(algorithm: str, algorithms: Algorithms = SECTIONS) -> dict[str, type[CommonConfig]]:
    """Return the sections that a file of this algorithm may have, the algorithm's first."""
    names = (algorithm, *EXTRA_SECTIONS.get(algorithm, ()))
    return {name: algorithms[name] for name in names}
