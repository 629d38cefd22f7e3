"""``--dry-run``: the cost of a run, estimated from its configuration alone.

No weights are loaded and no network is used. The number of tasks is known from the split's text or
from local data, the number of parameters from a local ``config.json`` or a size in the model's
name. Other quantities are printed as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from comlrl.config.resolved import CommonConfig, Config, Rounds
from comlrl.config.sections import ProgramConfig
from comlrl.errors import notice
from comlrl.evaluation.batches import AT_ONCE, at_once
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.preferences.pairs import tasks_at_once
from comlrl.tasks.datasets import split_size
from comlrl.trainers.launch.cost.memory import held, times
from comlrl.trainers.launch.cost.tree_size import growth, levels, scored, training_steps
from comlrl.trainers.launch.wiring.assembly import build_schedule
from comlrl.trainers.launch.wiring.model_size import model_size

VLLM_ROWS, VLLM_TOKENS, VLLM_PARAMETERS = 256, 1024, 14e9  # a server is advised above these


def describe(config: Config, limits_N: Sequence[int], rows: tuple[int, int] | None = None) -> str:
    """Describe the agents; the calls, joint actions and tokens of a training step and of the run;
    and the memory.

    ``limits_N`` is each agent's ``max_new_tokens``. Counts marked ``≤`` assume that no branch ends
    early and every completion has the maximum length. ``rows``: the numbers of training and
    evaluation tasks, if the data is local.
    """
    section, online, data, lora = config.section, config.online, config.dataset, config.lora
    count, models = section.num_agents, list(dict.fromkeys(config.agent_models))
    ranks = sorted({each.r for each in config.loras})
    trained = f"LoRA r={' and '.join(map(str, ranks))}" if lora.enabled else "all weights trained"
    once = ", one base held once" if config.shares_base and count > 1 else ""
    entries = config.agents.items() if isinstance(config.agents, Mapping) else ()
    untrained = [role for role, agent in entries if not (agent.train or agent.api)]
    once += f"; {' and '.join(untrained)} not trained" if untrained else ""
    services = {i: role for i, (role, agent) in enumerate(entries) if agent.api}
    once += f"; {' and '.join(services.values())} by an API" if services else ""
    agents = f"{count} agent{'s' if count > 1 else ''}"
    splits = (data.train_split, data.eval_split)
    tasks, held_out = rows or (split_size(split) or None for split in splits)
    how = "counted" if rows else "as the slice says" if tasks else "known once the data is loaded"
    schedule = schedule_of(section, tasks, config.seed)
    steps = steps_of(online, tasks, schedule)
    # Decoding calls per level: agents on one base decode together, others one by one.
    decoders = 1 if config.shares_base else count // len(section.shape.stages)
    lines = [
        f"{config.algorithm}: {agents} of {' and '.join(models)} ({trained}{once})",
        "",
        f"{'training tasks':<22}{_number(tasks)}  {data.train_split} of {data.name}, {how}",
    ]
    if section.rounds is not None:
        lines += _preferences(section, section.rounds, schedule, decoders, limits_N)
    if section.trained_online:
        lines += _online(online, config.program, tasks, steps, decoders, limits_N, services)
    limits = [held_out, online.eval_num_samples]
    held_out = min((n for n in limits if n is not None), default=None)
    if not online.eval_interval:
        lines += ["", f"{'evaluations':<22}none"]
    else:
        calls = "whose calls are known once they are played"
        if not config.program.replaces_turns:
            calls = _evaluation_calls(online, decoders, held_out)
        passes = None
        if steps is not None and section.trained_online:
            passes = 1 + math.ceil(steps / online.eval_interval)
        lines += [
            "",
            f"{'evaluations':<22}{_number(passes)}  of {_number(held_out)} tasks, {calls}",
        ]
        each = config.program.max_calls if config.program.replaces_turns else online.num_turns
        requests = times(held_out, online.eval_answers * each)
        lines += [f"{f'API calls of {r} ≤':<22}{_number(requests)} each" for r in services.values()]
    lines.append("")
    for name in models:
        size = model_size(name)
        lines.append(f"{'parameters':<22}{_short(size.parameters)}  {name}, {size.source}")
    for label, held_bytes, why in held(config, limits_N, held_out):
        shown = "unknown"
        if held_bytes is not None:
            mebi = held_bytes / 2**20
            shown = f"{mebi:.1f} MiB" if mebi < 2**10 else f"{mebi / 2**10:.1f} GiB"
        lines.append(f"{label:<22}{shown}  {why}")
    if reasons := _for_vllm(config, tasks, limits_N):
        advice = f"on a GPU, consider generation.backend=vllm (docs/gpu.md): {', '.join(reasons)}"
        lines.append(f"{'sampling':<22}{advice}")
    return "\n".join(lines)


def _for_vllm(config: Config, tasks: int | None, limits_N: Sequence[int]) -> list[str]:
    """Return the reasons why a vLLM server may sample faster than the built-in generator."""
    section = config.section
    if config.generation.backend == "vllm" or not config.lora.enabled or section.heterogeneous:
        return []
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    rows = size * max(
        level.nodes * level.completions * (len(level.stage) if config.shares_base else 1)
        for level in levels(section)
    )
    largest = max(model_size(name).parameters or 0 for name in config.agent_models)
    reasons = {
        f"{rows} rows at once": rows > VLLM_ROWS,
        f"{max(limits_N)} new tokens": max(limits_N) > VLLM_TOKENS,
        f"a model of {_short(largest)} parameters": largest >= VLLM_PARAMETERS,
    }
    return [reason for reason, holds in reasons.items() if holds]


def schedule_of(section: CommonConfig, tasks: int | None, seed: int) -> TaskSchedule | None:
    """Return the schedule of a run in rounds; None for other runs, or if the number of tasks is
    unknown."""
    if tasks is None or section.rounds is None:
        return None
    return build_schedule(section, range(tasks), seed)


def steps_of(online: CommonConfig, tasks: int | None, schedule: TaskSchedule | None) -> int | None:
    """Count the steps of the run; None if they depend on an unknown number of tasks.

    Args:
        online: the section of the online loop.
        tasks: the number of training tasks, if known.
        schedule: the schedule of a run in rounds.
    """
    size = online.batch_size if tasks is None else min(online.batch_size, tasks)
    return training_steps(online, tasks, size * scored(online, growth(online)), schedule)


def _online(
    section: CommonConfig,
    program: ProgramConfig,
    tasks: int | None,
    steps: int | None,
    decoders: int,
    limits_N: Sequence[int],
    services: Mapping[int, str],
) -> list[str]:
    """Tabulate the cost of a step and of the entire run in the online loop. ``services``: agent →
    role of the agents that services play."""
    tree = growth(section)
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    actions = size * scored(section, tree)
    nodes = size * tree.nodes
    deep = section.num_turns * len(section.shape.stages)
    calls = decoders * deep
    if section.samples_greedily:  # adds a greedy chain from every state
        calls += decoders * deep * (deep + 1) // 2
    turns = size * tree.turns
    parts = math.ceil(turns / (section.train_batch_size or turns))
    greedy = actions - size * tree.joint_actions
    completions = size * tree.completions + greedy * section.num_agents
    rows: Mapping[str, int] = {
        "tasks": size,
        "nodes ≤": nodes,
        "joint actions ≤": actions,
        "completions ≤": completions,
        "generation calls": calls,
        "sampled tokens ≤": size * _tokens(section, limits_N) + greedy * sum(limits_N),
    }
    if program.replaces_turns:
        most = actions * program.max_calls
        rows = {
            "tasks": size,
            "episodes": actions,
            "completions ≤": most,
            "sampled tokens ≤": most * max(limits_N),
        }
    for agent, role in services.items():  # without retries
        requests = sum(v.nodes * v.completions for v in levels(section) if agent in v.stage)
        calls = actions * program.max_calls if program.replaces_turns else size * requests + greedy
        rows = {**rows, f"API calls of {role} ≤": calls}
    samplings = 1 + getattr(section, "refill", 0)
    rows = {label: each if label == "tasks" else each * samplings for label, each in rows.items()}
    if not section.chains:
        rows = {**rows, "optimizer updates ≤": parts * section.passes}
    run = f"{section.num_train_epochs} epochs" if steps is None else f"{steps:,} steps"
    lines = ["", f"{'':<22}{'a training step':>18}{f'the run, {run}':>26}"]
    for label, each in rows.items():
        of_run = None if steps is None else each * steps
        if label == "tasks" and of_run is not None and tasks is not None:
            of_run = _tasks_seen(steps or 0, size, tasks)
        lines.append(f"{label:<22}{_number(each):>18}{_number(of_run):>26}")
    if not section.takes_ratios and parts > 1:
        notice(
            f"up to {parts} updates from one sampling (train_batch_size="
            f"{section.train_batch_size}): not strictly on-policy"
        )
    return lines


def _tokens(section: CommonConfig, limits_N: Sequence[int]) -> int:
    """Return the maximum number of sampled tokens in one task's tree."""
    each = ((level, sum(limits_N[i] for i in level.stage)) for level in levels(section))
    return sum(level.nodes * level.completions * tokens for level, tokens in each)


def _tasks_seen(steps: int, size: int, tasks: int) -> int:
    """Count the tasks in ``steps`` steps; the last step of an epoch has the remaining tasks."""
    epochs, rest = divmod(steps, math.ceil(tasks / size))
    return epochs * tasks + rest * size


def _preferences(
    section: CommonConfig,
    sampled: Rounds,
    schedule: TaskSchedule | None,
    decoders: int,
    limits_N: Sequence[int],
) -> list[str]:
    """Describe the candidates to sample, and the pairs formed from them."""
    if sampled.preferences is not None:
        return [f"{'preferences':<22}read from {sampled.preferences}; nothing is sampled for them"]
    count, limit = sampled.candidates, sampled.pairs
    candidates = section.shape.joint_actions(section.num_agents, count)
    pairs = math.comb(candidates, 2) if limit is None else min(limit, math.comb(candidates, 2))
    each = None if schedule is None else [schedule.length_of(r) for r in range(sampled.number)]
    labelled = None if each is None else sum(each)
    size = tasks_at_once(section.batch_size, count)
    calls = None if each is None else sum(math.ceil(n / size) for n in each) * decoders
    tokens = None if labelled is None else labelled * count * sum(limits_N)
    lines = [
        f"{'candidates':<22}{_number(times(labelled, candidates))}  {candidates} for each task, "
        f"in {_number(calls)} generation calls, ≤ {_number(tokens)} tokens",
        f"{'preference pairs ≤':<22}{_number(times(labelled, pairs))}  {pairs} of each task",
    ]
    if sampled.number > 1:
        of = "of all tasks" if schedule is None else f"of {schedule.length_of(0)} tasks"
        lines.append(f"{'rounds':<22}{sampled.number}  {of} each")
    return lines


def _evaluation_calls(section: CommonConfig, decoders: int, tasks: int | None) -> str:
    """Count the generation calls of an evaluation."""
    deep = section.num_turns * len(section.shape.stages)
    batches = math.ceil(section.eval_answers / at_once(AT_ONCE if tasks is None else tasks))
    number = decoders * deep * batches
    return f"{number} generation call{'' if number == 1 else 's'} each"


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _short(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.1f}M"
