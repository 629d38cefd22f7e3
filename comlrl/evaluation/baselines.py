"""Teams without training, as the MAGRPO paper compares with (arXiv 2508.04652, section 5).

``single``        one agent does all the work alone
``naive_concat``  every agent answers its own prompt, nobody sees another's text: turn 1 of the
                  untrained team
``sequential``    each agent sees what those before it wrote; the last sees everything
``discussion``    all draft, then each reads the others' drafts once and revises its own

Every one is a function (tasks, keys) → trees, so that it is sampled, scored and counted like a
trained team. Departure: roles are those of the domain, also without coordination.
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
    """Count the agents that a baseline needs: ``single`` one, the others what the configuration
    says."""
    return 1 if name == "single" else num_agents


def completions(name: str, num_agents: int) -> int:
    """Count the completions that all agents of a baseline write for an answer."""
    return team_size(name, num_agents) * (2 if name == "discussion" else 1)


def order(name: str) -> Literal["simultaneous", "sequential"]:
    """Return the order in which a baseline's agents act in a turn."""
    return "sequential" if name == "sequential" else "simultaneous"


def build(name: str, rollout: Rollout, num_agents: int, sampling: Sampling) -> Grow:
    """Build the baseline on the rollout's sampler and reward."""
    shape = Shape(team_size(name, num_agents), 1, 1, turn_order=order(name)).chain
    if name == "discussion":
        shape = Shape(num_agents, 2, 1)
        rollout = Rollout(
            rollout.sampler, rollout.reward, partial(discuss, rollout.prompts), rollout.prompts,
            seed=rollout.seed, process=rollout.process,
        )  # fmt: skip
    return lambda tasks, keys: rollout.grow_each(tasks, shape, sampling, keys)


def discuss(prompts: Prompts, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    """Show each agent the others' drafts after it has written. A transition."""
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
