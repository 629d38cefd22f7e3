"""Demonstrations of later turns: an attempt, the feedback on it, and a revised answer.

Attempts are drawn as for turn 1, scored by the real reward and answered by the real external
modes; so the words of feedback that the model learns to read are those that it will meet. A good
attempt is kept. A failed one is fixed; main often comes to see what its helpers do, while
helpers mostly stay with what they do, so that a second turn is worth something from the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from comlrl.rewards.code.prompt_templates import helper_names
from comlrl.rewards.code.reward import greatest_reward
from comlrl.tasks.history import Exchange, next_prompt
from comlrl.tasks.prompts import plain_text
from comlrl.types import Attempt, JointAction, Score, Task, Transition
from tools.coopmini.problems import Problem
from tools.tiny_coder.demonstrations import (
    PROMPTS,
    WRONG_OPERATION,
    Answer,
    Demonstration,
    Plan,
    draw_agent,
    draw_convention,
    draw_plan,
    draw_task,
    draw_team,
    slip,
    usable_together,
    with_wrong_operation,
)

TURNS = {2: 0.75, 3: 0.19, 4: 0.06}  # the turn that is demonstrated
AGREEING = 0.35  # attempts in which all agents agree and none slips
LAST_ONLY = 0.2  # conversations that show the last response only, without the problem
KEPT = 0.92  # perfect attempts that are handed in again
SLIP_SHARE = 0.5  # slips in revised answers, beside those of turn 1
HELPER_STAYS = 0.75  # helpers that keep their convention after a failure
MAIN_SEES, MAIN_STAYS = 0.5, 0.3  # mains that follow their helpers, that keep their guess
_TESTS, _BATCH = 2, 64
_LONGEST_RESPONSE, _LONGEST_PROMPT = 160, 1500  # characters

Scorer = Callable[[Sequence[JointAction]], list[Score]]


@dataclass(slots=True, kw_only=True)
class _Episode:
    """One task's conversation so far: each agent's plan, answer and past."""

    problem: Problem
    task: Task
    plans_N: list[Plan]
    texts_N: list[str]
    transition: Transition
    last_only: bool
    turns: int
    prompts_N: list[str] = field(default_factory=list)  # what each agent read last
    pasts_N: list[list[Exchange]] = field(default_factory=list)
    perfect: bool = False


def revisions(
    seed: int,
    exclude: Collection[str],
    answers: int,
    score: Scorer,
    modes: Sequence[tuple[Transition, float]],
) -> Iterator[Demonstration]:
    """Yield endless demonstrations of turns 2 to 4 on problems not in ``exclude``, by ``key``.

    ``score`` is the reward; ``modes`` are external modes and how often each is met.
    """
    rng = random.Random(f"revisions/{seed}")
    while True:
        running = [_begin(rng, exclude, modes) for _ in range(_BATCH)]
        for turn in range(2, max(TURNS) + 1):
            scores = score([JointAction(e.task, tuple(e.texts_N)) for e in running])
            for episode, scored in zip(running, scores, strict=True):
                feedback_N = _hear(episode, scored, turn - 1)
                if episode.turns == turn:
                    demonstration = _demonstrate(rng, episode, feedback_N, answers)
                    if len(demonstration.prompt) <= _LONGEST_PROMPT:
                        yield demonstration
                else:
                    _go_on(rng, episode)
            running = [e for e in running if e.turns > turn]


def _begin(
    rng: random.Random, exclude: Collection[str], modes: Sequence[tuple[Transition, float]]
) -> _Episode:
    """Return a fresh task and a first attempt at it."""
    problem, task = draw_task(rng, exclude, _TESTS)
    team = draw_team(rng)
    entry_point = task.fields["entry_point"]
    plans = [draw_plan(rng, problem, entry_point, team, agent) for agent in range(team)]
    share = 1.0
    if rng.random() < AGREEING:
        share = 0.0
        helpers = [replace(plan, problem=problem) for plan in plans[:-1]]
        plans = [*helpers, Plan(problem=problem, name=entry_point, helpers=_followed(helpers))]
    texts = [_cut(slip(rng, plan.source(), plan.name, share)) for plan in plans]
    return _Episode(
        problem=problem,
        task=task,
        plans_N=plans,
        texts_N=texts,
        transition=rng.choices([mode for mode, _ in modes], [weight for _, weight in modes])[0],
        last_only=rng.random() < LAST_ONLY,
        turns=rng.choices(list(TURNS), list(TURNS.values()))[0],
        prompts_N=list(PROMPTS.first(task, team)),
        pasts_N=[[] for _ in range(team)],
    )


def _hear(episode: _Episode, scored: Score, turn: int) -> tuple[str, ...]:
    """Add the attempt to each agent's past and return each agent's feedback."""
    task, texts = episode.task, tuple(episode.texts_N)
    feedback_N = episode.transition([Attempt(task, texts, scored, turn)])[0]
    for past, prompt, text in zip(episode.pasts_N, episode.prompts_N, texts, strict=True):
        past.append(Exchange(prompt, text))
    episode.prompts_N = list(feedback_N)
    episode.perfect = scored.value > greatest_reward(len(texts)) - 1e-6
    return feedback_N


def _demonstrate(
    rng: random.Random, episode: _Episode, feedback_N: tuple[str, ...], answers: int
) -> Demonstration:
    """Return what one agent reads, and revised answers to it."""
    agent = draw_agent(rng, len(episode.plans_N))
    messages = next_prompt(
        episode.pasts_N[agent],
        feedback_N[agent],
        history="last" if episode.last_only else "full",
    )
    revised = tuple(_revise(rng, episode, agent)[1] for _ in range(answers))
    return Demonstration(plain_text(messages), revised)


def _go_on(rng: random.Random, episode: _Episode) -> None:
    """Let every agent revise its answer."""
    revised = [_revise(rng, episode, agent) for agent in range(len(episode.plans_N))]
    episode.plans_N = [plan for plan, _ in revised]
    episode.texts_N = [_cut(answer) for _, answer in revised]


def _revise(rng: random.Random, episode: _Episode, agent: int) -> tuple[Plan, Answer]:
    """Return one agent's next plan and answer."""
    plan, text = episode.plans_N[agent], episode.texts_N[agent]
    if episode.perfect and rng.random() < KEPT:
        return plan, Answer(text)
    if not episode.perfect:
        plan = _fixed(rng, episode, agent)
    return plan, slip(rng, plan.source(), plan.name, SLIP_SHARE)


def _fixed(rng: random.Random, episode: _Episode, agent: int) -> Plan:
    """Return the plan after a failure. Without the problem in sight, only slips can be fixed."""
    plan = episode.plans_N[agent]
    if episode.last_only:
        return replace(plan, style="")
    problem = episode.problem
    if rng.random() < WRONG_OPERATION:
        problem = with_wrong_operation(rng, problem)
    if plan.convention:
        stays = rng.random() < HELPER_STAYS
        convention = plan.convention if stays else draw_convention(rng, problem, plan.name)
        return Plan(problem=problem, name=plan.name, convention=convention)
    luck, helpers = rng.random(), plan.helpers
    if luck < MAIN_SEES:
        helpers = _followed(episode.plans_N[:-1])
    elif luck > MAIN_SEES + MAIN_STAYS or not helpers:
        names = helper_names(len(episode.plans_N))
        helpers = usable_together([(name, draw_convention(rng, problem, name)) for name in names])
    return Plan(problem=problem, name=plan.name, helpers=helpers)


def _followed(helpers: Sequence[Plan]) -> dict[str, str]:
    """Return what a main that knows its helpers relies on."""
    return usable_together([(plan.name, plan.convention or "") for plan in helpers])


def _cut(answer: Answer) -> str:
    """Return the text as a conversation shows it: an endless one is cut off."""
    return answer.text if answer.ends else answer.text[:_LONGEST_RESPONSE]
