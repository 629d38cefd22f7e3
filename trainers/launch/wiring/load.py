"""Loading a trained team for sampling, in scripts without a command line."""

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
    """Load the sampler of a run's agents (or of its ``best_model``, or of one of its checkpoints).

    With SHPPO, the sampler draws each agent's latent before it samples from the shared policy.
    Raises UserError if there are no weights.
    """
    return load_agents(weights.locate(run))[1]


def load_agents(trained: Trained) -> tuple[Team, Sampler]:
    """Load a run's team and its sampler. Raises UserError like ``load_sampler``."""
    from comlrl.models.pretrained import build_team
    from comlrl.trainers.launch.wiring.assembly import build_sampler

    config = config_of(trained)
    services = api.members(config.agents)
    team = build_team(config)
    _, sampler = build_sampler(config, team)
    weights.load_weights(trained, team, sampler)
    return team, api.mixed(sampler, services)


def config_of(trained: Trained) -> Config:
    """Return the configuration of the run that produced the weights, as stored with them.

    Raises UserError for the folder of a plain model, which does not describe a team.
    """
    if trained.config_file is None:
        raise UserError(f"'{trained.name}' has no config.yaml above it; use the folder of a run")
    algorithms = own_algorithm.all_sections(trained.run_dir)
    loader = weights.read_config(trained.config_file, algorithms)
    for setting in weights.settings(trained, loader.algorithm, algorithms, trained.name):
        loader.set(setting)
    return loader.build()
