"""``evaluate.py`` and ``comlrl evaluate``: runs, models and baselines on held-out tasks.

Prints a Markdown table and writes JSON and Markdown, which ``docs/evaluation.md`` describes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl import files
from comlrl.errors import UserError, notice, report
from comlrl.files import tolerant_terminal
from comlrl.rollout.api_member import ApiMember
from comlrl.trainers.launch.commands.command_line import print_written
from comlrl.trainers.launch.commands.evaluation_plan import Plan, make_plan, parse_arguments, place
from comlrl.trainers.launch.wiring import api, hub, init_from, replacements, weights
from comlrl.trainers.launch.wiring.assembly import (
    build_player,
    build_rewards,
    build_sampler,
    encoders,
)
from comlrl.trainers.launch.wiring.machine import deterministic
from comlrl.trainers.launch.wiring.sampling_settings import evaluated
from comlrl.trainers.launch.wiring.task_splits import fitting

if TYPE_CHECKING:
    import torch

    from comlrl.models.team import Team
    from comlrl.programs.rollout import ProgramRollout
    from comlrl.rollout.generation import Generator
    from comlrl.rollout.grow import Rollout
    from comlrl.types import Domain, RolloutResult, Sampling, Task


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        plan = pinned(make_plan(parse_arguments(argv)))
        several = cross_play if len(plan.teams) > 1 else evaluate
        (replace_agents if plan.replaced else several)(plan)
        return 0
    except Exception as error:
        return report(error)


def pinned(plan: Plan) -> Plan:
    """Pin the checkpoints of runs without a final model."""
    option = "--cross-play" if len(plan.teams) > 1 else "--checkpoint"
    return dataclasses.replace(
        plan,
        teams=tuple(weights.pinned(team, option) for team in plan.teams),
        replaced={
            place: weights.pinned(who, "--replace") if isinstance(who, weights.Trained) else who
            for place, who in plan.replaced.items()
        },
    )


@dataclass(kw_only=True)
class Stage:
    """The loaded tasks, models and samplers of an evaluation."""

    tasks: list[Task]
    team: Team
    generator: Generator
    sampling: Sampling
    rollout: Rollout | ProgramRollout
    services: Mapping[int, ApiMember]  # agent → the service that plays it
    seconds: float = 0.0  # duration measured by ``watched``


def evaluate(plan: Plan) -> dict[str, Any]:
    """Evaluate a team or baseline, print the table, write JSON and Markdown, and return the JSON's
    content."""
    from comlrl.evaluation.estimates import estimates, task_rows
    from comlrl.loggers.episode_log import episode_lines
    from comlrl.loggers.tables import evaluation_table

    stage = build(plan, caching=False)
    with watched(plan, stage):
        if plan.teams:
            weights.load_weights(plan.teams[0], stage.team, stage.rollout.sampler)
        elif plan.config.init_from is not None:
            init_from.begin(plan.config, stage.team, stage.rollout.sampler)
        trees = grower(plan, stage)()
    domain = stage.rollout.prompts.domain
    metrics, intervals = estimates(trees, domain, plan.ks, plan.config.seed)
    fields = {
        "metrics": metrics,
        "intervals": intervals,
        "budget": budget(stage, trees) | costs(plan, stage, trees),
        "per_task": task_rows(trees, plan.ks),
    }
    _, result = write(plan, stage, fields, evaluation_table)
    if plan.export_samples is not None:
        export_samples(plan.export_samples, trees, domain)
    if plan.episodes is not None:
        lines = (json.dumps(line) + "\n" for tree in trees for line in episode_lines(tree, domain))
        files.replace(plan.episodes, "".join(lines))
        print_written(plan.episodes)
    return result


def export_samples(file: Path, trees: Sequence[RolloutResult], domain: Domain) -> None:
    """Export the solution in each answer's last turn in EvalPlus's format: ``task_id`` and
    ``solution``. Raises UserError if the domain or reward has none."""
    rows = [(tree.task.task_id, domain.solution(tree.final_score)) for tree in trees]
    if any(solution is None for _, solution in rows):
        raise UserError("--export-samples: this domain or reward exports nothing; leave it out")
    lines = [json.dumps({"task_id": name, "solution": text}) + "\n" for name, text in rows]
    files.replace(file, "".join(lines))
    print_written(file)


def cross_play(plan: Plan) -> None:
    """Evaluate the last agent of every run together with the other agents of every run; write
    matrices and a heat map."""
    from comlrl.evaluation import cross_play as pairs
    from comlrl.evaluation.estimates import estimates
    from comlrl.loggers.report.heat_map import write_heat_map
    from comlrl.loggers.tables import cross_play_table, sides
    from comlrl.loggers.views import view_of
    from comlrl.loggers.views.view import listed

    stage = build(plan, caching=True)
    sampler: Any = stage.rollout.sampler
    alone = plan.config.section.num_turns == 1  # then each run's agents sample only once
    with watched(plan, stage, len(plan.teams) ** (1 if alone else 2)):
        loaded = [team_weights(team, stage.team, "--cross-play") for team in plan.teams]
        rows = pairs.play(stage.team, sampler, loaded, grower(plan, stage))
    domain, config = stage.rollout.prompts.domain, plan.config
    cells = [[estimates(trees, domain, plan.ks, config.seed) for trees in row] for row in rows]
    common = set.intersection(*(set(metrics) for row in cells for metrics, _ in row))
    by_agent = [f"agent_{i}/reward_mean" for i in range(config.section.num_agents)]
    shown = ["reward_mean", *by_agent, *listed(view_of(config.domain).crossed, sorted(common))]
    shown = [name for name in (*shown, *(f"pass@{k}" for k in plan.ks)) if name in common]
    matrices = {name: [[metrics[name] for metrics, _ in row] for row in cells] for name in shown}
    fields = {
        "matrices": matrices,
        "intervals": {name: [[ends[name] for _, ends in row] for row in cells] for name in shown},
        "summary": {name: pairs.summary(matrix) for name, matrix in matrices.items()},
        "budget": budget(stage, [t for row in rows for trees in row for t in trees]),
    }
    out, result = write(plan, stage, fields, cross_play_table)
    names = [Path(team.name).name for team in plan.teams]
    others, last = sides(result["roles"])
    write_heat_map(
        out.with_suffix(".png"), names, names, matrices["reward_mean"], "Mean reward",
        sides=(f"{others} of", f"{last} of"),
    )  # fmt: skip


def replace_agents(plan: Plan) -> None:
    """Evaluate a team with every subset of some agents replaced; write each agent's contribution as
    JSON and Markdown."""
    from comlrl.evaluation import contributions
    from comlrl.evaluation.estimates import estimates, task_rows
    from comlrl.loggers.tables import replacement_table

    stage = build(plan, caching=True)
    sampler: Any = stage.rollout.sampler
    alone = plan.config.section.num_turns == 1  # then each agent and replacement samples once
    with watched(plan, stage, 2 if alone else 2 ** len(plan.replaced)):
        team_tensors = team_weights(plan.teams[0], stage.team)
        absent = {i: acting(plan, stage, i, team_tensors) for i in sorted(plan.replaced)}
        played = contributions.play(stage.team, sampler, team_tensors, absent, grower(plan, stage))
    domain, seed, teams = stage.rollout.prompts.domain, plan.config.seed, []
    for present, trees in played.items():
        metrics, intervals = estimates(trees, domain, plan.ks, seed)
        team = {"present": sorted(present), "metrics": metrics, "intervals": intervals}
        teams.append(team | {"budget": costs(plan, stage, trees)})
    values = {present: task_rows(trees, plan.ks) for present, trees in played.items()}
    fields = {
        "coalitions": teams,
        "contributions": contributions.summary(values, seed),
        "budget": budget(stage, [t for trees in played.values() for t in trees]),
    }
    write(plan, stage, fields, replacement_table)


def team_weights(
    trained: weights.Trained, team: Team, option: str = "--checkpoint"
) -> dict[str, dict[str, torch.Tensor]]:
    """Read the weights of a run; agents that it did not train have those of ``team`` as built."""
    held = weights.read_weights(trained, option)
    for agent in team.agents:
        if agent.adapter not in held:
            held[agent.adapter] = {n: t.clone() for n, t in agent.state_tensors().items()}
    return held


def acting(
    plan: Plan, stage: Stage, agent: int, team_tensors: Any
) -> dict[str, torch.Tensor] | None:
    """Return the weights of an agent's replacement; None if the agent is silent. Call this before
    the trained weights are loaded into the team."""
    who = plan.replaced[agent]
    if isinstance(who, weights.Trained):
        return team_weights(who, stage.team, "--replace")[f"agent_{agent}"]
    if isinstance(who, int):
        return team_tensors[f"agent_{who}"]
    if who == "silent":
        return None
    if plan.config.init_from is not None:
        init_from.begin(plan.config, stage.team, stage.rollout.sampler)
    return {name: t.clone() for name, t in stage.team.agents[agent].state_tensors().items()}


def build(plan: Plan, *, caching: bool) -> Stage:
    """Load data and models. ``caching``: for evaluations of several teams: sample each answer once,
    and do not measure which agents were needed."""
    from comlrl.evaluation.cross_play import CachingSampler
    from comlrl.models.pretrained import build_team
    from comlrl.processes.cpu_threads import LoadWatch
    from comlrl.tasks.datasets import load_tasks

    load = LoadWatch()
    deterministic()
    config, section = plan.config, plan.config.section
    services = api.members(config.agents)
    if config.generation.backend != "builtin":
        notice("generation.backend: evaluations use the builtin generator")
    data = config.dataset.name
    hub.check_data(data, config.beside)
    hub.check_reachable([("dataset.name", data), *config.agents_models], config.beside)
    tasks = load_tasks(config.dataset, config.dataset.eval_split, plan.work.domain)
    load.set_threads()
    team = build_team(config)
    generator, inner = build_sampler(config, team)
    sampler = api.mixed(inner, services)
    sampled = evaluated(config, plan.work.roles, plan.greedy)
    evaluated_work = dataclasses.replace(plan.work, program=None) if plan.baseline else plan.work
    work = evaluated_work.read_by(encoders(config.team, team))
    tasks = tasks[: section.eval_num_samples]
    tasks = fitting(tasks, work, config.dataset, sampler.encode, inner.max_length, sampled)
    chosen_sampler: Any = CachingSampler(sampler, len(team)) if caching else sampler
    reward, measuring = build_rewards(work)
    rollout = build_player(config, work, chosen_sampler, reward if caching else measuring)
    return Stage(
        tasks=tasks,
        team=team,
        generator=generator,
        sampling=sampled,
        rollout=rollout,
        services=services,
    )


@contextlib.contextmanager
def watched(plan: Plan, stage: Stage, teams: int = 1) -> Iterator[None]:
    """Time an evaluation, show the progress of its answers, and close the reward at the end.
    ``teams``: the largest number of teams that sample new answers."""
    from comlrl.evaluation import baselines
    from comlrl.loggers.console import shown
    from comlrl.loop.progress import Progress, Written

    section, progress, started = plan.config.section, Progress(), time.monotonic()
    each = section.num_turns * section.num_agents
    if plan.baseline is not None:
        each = baselines.completions(plan.baseline, section.num_agents)
    stage.generator.on_written = Written(progress, len(stage.tasks) * plan.samples * each * teams)
    try:
        with shown(progress, "evaluating"):
            yield
    finally:
        stage.seconds = time.monotonic() - started
        stage.rollout.reward.close()


def grower(plan: Plan, stage: Stage) -> Callable[[], list[RolloutResult]]:
    """Return a function that samples all tasks: by the team's turns or program, or a baseline's."""
    from comlrl.evaluation import baselines, estimates
    from comlrl.programs.rollout import ProgramRollout

    section = plan.config.section
    if plan.baseline is not None:
        size = baselines.team_size(plan.baseline, section.num_agents)
        drawn = evaluated(plan.config, plan.work.domain.roles(size), plan.greedy)
        assert not isinstance(stage.rollout, ProgramRollout)
        grow = baselines.build(plan.baseline, stage.rollout, size, drawn)
        return lambda: estimates.repeat(grow, stage.tasks, plan.samples)
    return lambda: estimates.evaluate(
        stage.rollout, stage.tasks, section.shape, stage.sampling, plan.samples
    )


def described(plan: Plan, stage: Stage) -> dict[str, Any]:
    """Return the fields that describe the evaluation's teams, data and settings."""
    from comlrl.evaluation import baselines

    config = plan.config
    agents, order = config.section.num_agents, config.section.turn_order
    if plan.baseline is not None:
        agents, order = baselines.team_size(plan.baseline, agents), baselines.order(plan.baseline)
    names = [team.name for team in plan.teams]
    checkpoint = names[0] if len(names) == 1 else None
    others = {str(i): replacements.label(who) for i, who in plan.replaced.items()}
    teams = {"runs": names} if len(names) > 1 else {"replaced": others} if others else {}
    one_model = not isinstance(config.agents, tuple) and len(set(config.agent_models)) == 1
    sampled = dataclasses.asdict(stage.sampling)
    del sampled["by_agent"]  # ``settings`` contains the differences by role
    return teams | {
        "config": plan.config_file,
        "algorithm": config.algorithm,
        "checkpoint": checkpoint,
        "weights": [team.weights for team in plan.teams],
        "init_from": None if plan.teams else config.init_from,
        "baseline": plan.baseline,
        "model": config.agent_models[0] if one_model else list(config.agent_models),
        "num_agents": agents,
        "roles": list(plan.work.domain.roles(agents) if plan.baseline else plan.work.roles),
        "num_turns": 1 if plan.baseline else config.section.num_turns,
        "turn_order": order,
        "dataset": config.dataset.name,
        "split": config.dataset.eval_split,
        "tasks": len(stage.tasks),
        "samples": plan.samples,
        "seed": config.seed,
        "sampling": sampled,
        "settings": config.to_dict(),
    }


def budget(stage: Stage, trees: Sequence[RolloutResult]) -> dict[str, float]:
    """Return the cost: API usage, generated tokens, and wall seconds of sampling and scoring."""
    generator, seconds = stage.generator, stage.seconds
    return api.metrics(stage.services) | {
        "tokens_generated": generator.tokens,
        "generation_calls": generator.calls,
        "scored_joint_actions": sum(tree.scored for tree in trees),
        "tokens_per_answer": generator.tokens / len(trees),
        "seconds": seconds,
        "seconds_per_answer": seconds / len(trees),
    }


def costs(plan: Plan, stage: Stage, trees: Sequence[RolloutResult]) -> dict[str, float]:
    """Count the calls, tokens and operations of these answers, including those that were cached."""
    from comlrl.evaluation.cost import cost, weights_of

    agents = range(plan.config.section.num_agents)
    return cost(trees, [weights_of(stage.team, agent) for agent in agents])


def write(
    plan: Plan, stage: Stage, fields: dict[str, Any], table: Callable[[dict[str, Any]], str]
) -> tuple[Path, dict[str, Any]]:
    """Write the evaluation's description and results (``fields``) as JSON, and their table as
    Markdown. Return the JSON file's path and content."""
    what = described(plan, stage)
    out, result = place(plan, what), what | fields
    text = table(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print_written(out)
    return out, result
