"""A trained team, ready to act, for scripts that have no command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.trainers.launch.wiring import api, own_algorithm, weights
from comlrl.trainers.launch.wiring.weights import Trained

if TYPE_CHECKING:
    from comlrl.models.team import Team
    from comlrl.types import Sampler


def load_sampler(run: str | Path) -> Sampler:
    """Load what samples for the agents of a run (or its ``best_model``, or a checkpoint of it).

    With SHPPO it gives each agent its latent before it asks the shared policy. Raises UserError
    where there are no weights.
    """
    return load_agents(weights.locate(run))[1]


def load_agents(trained: Trained) -> tuple[Team, Sampler]:
    """Load a run's team, and what samples for it. Raises UserError as ``load_sampler``."""
    from comlrl.models.pretrained import build_team
    from comlrl.trainers.launch.wiring.assembly import build_sampler

    config = config_of(trained)
    services = api.members(config.agents)
    team = build_team(config)
    _, sampler = build_sampler(config, team)
    weights.load_weights(trained, team, sampler)
    return team, api.mixed(sampler, services)


def config_of(trained: Trained) -> Config:
    """Return the configuration of the run that made the weights, as stored with them.

    Raises UserError for a plain model's folder, which says nothing of a team.
    """
    if trained.config_file is None:
        raise UserError(f"'{trained.name}' has no config.yaml above it; use the folder of a run")
    algorithms = own_algorithm.all_sections(trained.run_dir)
    loader = weights.read_config(trained.config_file, algorithms)
    for setting in weights.settings(trained, loader.algorithm, algorithms, trained.name):
        loader.set(setting)
    return loader.build()
