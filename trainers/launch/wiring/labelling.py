"""Builds the collector of a run's preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comlrl.config.algorithms import PreferenceConfig

if TYPE_CHECKING:
    from comlrl.preferences.collector import Collector
    from comlrl.trainers.launch.wiring.assembly import Run


def build_collector(run: Run[PreferenceConfig]) -> Collector:
    from comlrl.preferences.collector import Collector
    from comlrl.rollout.grow import Rollout

    assert isinstance(run.rollout, Rollout), "check_program refuses others"
    return Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling.with_sets(None),  # preferences are of the whole policies
        run.loop.schedule.tasks_of,
        seed=run.config.seed,
        resume=run.resume,
    )
