"""A trained team, ready to act: what a script of one's own begins with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comlrl.types import Sampler


def load_sampler(run: str | Path) -> Sampler:
    """What samples for the agents of a run (or its ``best_model``, or a checkpoint of it).

    With SHPPO it gives each agent its latent before it asks the shared policy. Raises UserError
    where there are no weights.
    """
    from comlrl.models.loading import build_team
    from trainers.launch.commands.evaluation_plan import make_plan, parse_arguments
    from trainers.launch.wiring import weights
    from trainers.launch.wiring.assembly import build_sampler

    plan = make_plan(parse_arguments(["--checkpoint", str(run)]))
    team = build_team(plan.config)
    _, sampler = build_sampler(plan.config, team)
    weights.load_weights(plan.teams[0], team, sampler)
    return sampler
