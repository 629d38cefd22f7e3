"""A reward that costs nothing and differs between completions, for benchmarks of speed.

--override reward.target=benchmarks.noise_reward:Noise
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plain_reward import noise
from comlrl.types import JointAction, Score


class Noise:
    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        values = [noise(action.completions_N) for action in actions]
        return [Score(value, {"noise": value}) for value in values]
