"""Baselines without training, from the MAGRPO paper (arXiv 2508.04652, section 5).

``single``        one agent does all the work
``naive_concat``  every agent answers its own prompt without seeing the others' texts: turn 1 of
                  the untrained team
``sequential``    each agent sees the texts of earlier agents
``discussion``    all agents draft, then each sees the others' drafts once and revises its own

Each is a function (tasks, keys) → trees, so that baselines are sampled, scored and counted like
trained teams. Departure: agents have the domain's roles even without coordination.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from comlrl.evaluation.estimates import Grow
from comlrl.quoting import clean
from comlrl.rollout.grow import Rollout
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, Sampling, Shape

SEEN = "`{name}` is:\n{text}\n"
DRAFTS = """\
{drafts}
All of this must fit together.
{revision}"""


def team_size(name: str, num_agents: int) -> int:
    """Return the number of agents of a baseline: 1 for ``single``, otherwise ``num_agents``."""
    return 1 if name == "single" else num_agents


def completions(name: str, num_agents: int) -> int:
    """Return how many completions the agents of a baseline write in total for one answer."""
    return team_size(name, num_agents) * (2 if name == "discussion" else 1)


def order(name: str) -> Literal["simultaneous", "sequential"]:
    """Return the order in which a baseline's agents act in a turn."""
    return "sequential" if name == "sequential" else "simultaneous"


def build(name: str, rollout: Rollout, num_agents: int, sampling: Sampling) -> Grow:
    """Build a baseline with the rollout's sampler and reward."""
    shape = Shape(team_size(name, num_agents), 1, 1, turn_order=order(name)).chain
    if name == "discussion":
        shape = Shape(num_agents, 2, 1)
        rollout = Rollout(
            rollout.sampler, rollout.reward, partial(discuss, rollout.prompts), rollout.prompts,
            seed=rollout.seed, process=rollout.process,
        )  # fmt: skip
    return lambda tasks, keys: rollout.grow_each(tasks, shape, sampling, keys)


def discuss(prompts: Prompts, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    """Return feedback that shows each agent the others' drafts; the ``Transition`` of
    ``discussion``."""
    return [
        tuple(
            DRAFTS.format(
                drafts="\n".join(
                    SEEN.format(name=name, text=clean(text).strip())
                    for j, (name, text) in enumerate(
                        zip(prompts.parts(attempt), attempt.completions_N, strict=True)
                    )
                    if j != i
                ),
                revision=revision,
            )
            for i, revision in enumerate(prompts.revision_N(attempt))
        )
        for attempt in attempts
    ]
