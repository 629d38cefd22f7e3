"""Teams without training, as the MAGRPO paper compares with (arXiv 2508.04652, section 5).

``single``        one agent does all the work alone
``naive_concat``  every agent answers its own prompt, nobody sees another's text: turn 1 of the
                  untrained team
``sequential``    each agent sees what those before it wrote; the last sees everything
``discussion``    all draft, then each reads the others' drafts once and revises its own

Every one is a function (tasks, key) → trees, so that it is sampled, scored and counted like a
trained team. Departure: roles are those of the domain, also without coordination.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from comlrl.evaluation.estimates import Grow
from comlrl.rollout.grow import Rollout
from comlrl.tasks.history import shorten
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    AgentTurn,
    Attempt,
    JointAction,
    Message,
    Node,
    Request,
    Sampling,
    Shape,
    Task,
    Tree,
)

NAMES = ("single", "naive_concat", "sequential", "discussion")

SEEN = "`{name}` is:\n{text}\n"
DRAFTS = """\
{drafts}
All of this must fit together.
{revision}"""


def team_size(name: str, num_agents: int) -> int:
    """Agents that a baseline needs: ``single`` one, the others what the configuration says."""
    return 1 if name == "single" else num_agents


def build(name: str, rollout: Rollout, num_agents: int, sampling: Sampling) -> Grow:
    """The baseline on the rollout's sampler and reward. ``name``: one of ``NAMES``."""
    match name:
        case "single" | "naive_concat":
            shape = Shape(team_size(name, num_agents), 1, 1)
            return lambda tasks, key: rollout.grow(tasks, shape, sampling, key)
        case "sequential":
            return lambda tasks, key: sequential(rollout, tasks, num_agents, sampling, key)
        case "discussion":
            talk = Rollout(
                rollout.sampler, rollout.reward, partial(discuss, rollout.prompts), rollout.prompts,
                seed=rollout.seed, process=rollout.process,
            )  # fmt: skip
            shape = Shape(num_agents, 2, 1)
            return lambda tasks, key: talk.grow(tasks, shape, sampling, key)
    raise ValueError(f"{name!r} is no baseline; use one of {', '.join(NAMES)}")


def discuss(prompts: Prompts, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    """What each agent is told after the drafts: those of the others. A transition."""
    return [
        tuple(
            DRAFTS.format(
                drafts="\n".join(
                    SEEN.format(name=name, text=text.strip())
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


def sequential(
    rollout: Rollout, tasks: Sequence[Task], num_agents: int, sampling: Sampling, key: tuple
) -> list[Tree]:
    """One joint action for each task, agent after agent; a generation call for each agent."""
    turns_B: list[list[AgentTurn]] = [[] for _ in tasks]
    for agent in range(num_agents):
        prompts = [
            _prompt(rollout.prompts, task, agent, num_agents, turns)
            for task, turns in zip(tasks, turns_B, strict=True)
        ]
        answers = _answers(rollout, tasks, agent, num_agents, prompts, sampling, key)
        for turns, answer in zip(turns_B, answers, strict=True):
            turns.append(answer)
    actions = [
        JointAction(task, tuple(turn.completions_G[0].text for turn in turns))
        for task, turns in zip(tasks, turns_B, strict=True)
    ]
    trees = []
    for task, turns, score in zip(tasks, turns_B, rollout.reward.score(actions), strict=True):
        joint = ((0,) * num_agents,)
        root = Node(1, -1, -1, tuple(turns), joint, (score,), (rollout.process(score.value),))
        trees.append(Tree(task, (root,), "align", None))
    return trees


def _prompt(
    prompts: Prompts, task: Task, agent: int, num_agents: int, before: Sequence[AgentTurn]
) -> tuple[Message, ...]:
    """The agent's own prompt, with what those before it wrote."""
    own = prompts.first(task, num_agents)[agent]
    names = prompts.domain.parts(task, num_agents)[: len(before)]
    seen = [
        SEEN.format(name=name, text=turn.completions_G[0].text.strip())
        for name, turn in zip(names, before, strict=True)
    ]
    return (*prompts.opening, Message("user", "\n".join([own, *seen])))


def _answers(
    rollout: Rollout,
    tasks: Sequence[Task],
    agent: int,
    num_agents: int,
    prompts: Sequence[tuple[Message, ...]],
    sampling: Sampling,
    key: tuple,
) -> list[AgentTurn]:
    """One answer of one agent to each prompt, keyed as in a rollout."""
    sampler = rollout.sampler
    fitted = [
        shorten(prompt, lambda m: sampler.fits(sampler.encode(agent, m), sampling))
        for prompt in prompts
    ]
    ids = [sampler.encode(agent, prompt) for prompt, _ in fitted]
    requests = [
        Request(prompt_ids, ((rollout.seed, *key, task.task_id, (), agent, 0),))
        for task, prompt_ids in zip(tasks, ids, strict=True)
    ]
    asked_N = [requests if i == agent else [] for i in range(num_agents)]
    said = sampler.sample(asked_N, sampling)[agent]
    return [
        AgentTurn(prompt, prompt_ids, completions, dropped)
        for (prompt, dropped), prompt_ids, completions in zip(fitted, ids, said, strict=True)
    ]
