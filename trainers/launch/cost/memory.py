"""What a run holds in memory, for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from comlrl.config.algorithms import CommonConfig
from comlrl.config.resolved import Config
from comlrl.evaluation.batches import AT_ONCE, at_once
from comlrl.trainers.launch.cost.tree_size import Level, levels
from comlrl.trainers.launch.wiring.model_size import BYTES, ModelSize, model_size

ADAPTER_BYTES = 4 * 4  # float32 weight, gradient and Adam's two moments


class Held(NamedTuple):
    """One thing that memory holds."""

    label: str
    bytes: float | None  # None: unknown
    why: str


def held(
    config: Config,
    limits_N: Sequence[int],
    prompt: float,
    tasks: int,
    held_out: int | None,
) -> list[Held]:
    """Return what one process holds while it samples, trains and evaluates.

    Args:
        limits_N: ``max_new_tokens`` of each agent.
        prompt: tokens of a prompt at the widest level of a tree.
        tasks: whose trees this process grows at once.
        held_out: tasks of an evaluation that are this process's; None: unknown.
    """
    width = BYTES[config.agent_model.torch_dtype]
    names = config.model_names
    sizes = {name: model_size(name) for name in names}
    each = [sizes[name] for name in (names[:1] if config.shares_base else names)]
    found = [_weights(config, each, width), *_trained(config, each, width)]
    if config.generation.backend == "builtin":
        widest = max(levels(config.online), key=lambda level: level.nodes)
        trained = _slots(config, widest, limits_N, prompt, tasks)
        evaluated = _evaluated(config, limits_N, prompt, held_out)
        found.append(_cache(config, each, width, trained, evaluated))
    found += _critics(config.online, config, width)
    found += _reward_model(config, names[-1], width)
    found.append(_activations(each, width))
    return found


def training_adds(width: float) -> tuple[float, str]:
    """Return the bytes for each weight of so many bytes that is trained, and what they are."""
    if width == 2:
        return 4 * 4, "float32: gradients, Adam's moments, masters of the weights"
    return 3 * width, "gradients, Adam's moments"


def _slots(
    config: Config, level: Level, limits_N: Sequence[int], prompt: float, tasks: int
) -> float:
    """Return key/value slots while a level is sampled: each prompt once, and its completions.
    Agents of one base are sampled together."""
    longest = max(limits_N[agent] for agent in level.stage)
    prompts = tasks * level.nodes * (len(level.stage) if config.shares_base else 1)
    return prompts * (prompt + level.own * longest)


def _evaluated(
    config: Config, limits_N: Sequence[int], prompt: float, held_out: int | None
) -> float:
    """Count the key/value slots of an evaluation's widest level. All answers read a task's
    prompt once; at later turns, and where agents act in order, each reads its own."""
    section = config.online
    if not section.eval_interval:
        return 0
    tasks = AT_ONCE if held_out is None else held_out
    answers = min(section.eval_answers, at_once(tasks))
    most = 0.0
    for level in levels(section):
        first = level.turn == 1 and level.stage.start == 0
        nodes, own = (1, answers) if first else (answers, 1)
        chains = level._replace(nodes=nodes, own=own)
        most = max(most, _slots(config, chains, limits_N, prompt, tasks))
    return most


def _weights(config: Config, sizes: Sequence[ModelSize], width: float) -> Held:
    dtype = config.agent_model.torch_dtype.replace("auto", "bfloat16 (on most CPUs float32: twice)")
    return Held("weights", _times(_sum([s.parameters for s in sizes]), width), dtype)


def _trained(config: Config, sizes: Sequence[ModelSize], width: float) -> Iterator[Held]:
    count = config.section.policies
    if config.lora.enabled:
        adapters = [s.adapter(config.lora) for s in sizes]
        adapters = adapters * count if config.shares_base else adapters[:count]
        why = f"{count} in float32 with gradients and Adam's moments; a few % of the weights"
        yield Held("adapters", _times(_sum(adapters), ADAPTER_BYTES), why)
        return
    total = _sum([s.parameters for s in sizes])
    adds, what = training_adds(width)
    yield Held("training adds", _times(total, adds), what)
    if any(section.needs_reference for section in config.sections.values()):
        yield Held("reference adds", _times(total, width), "frozen copies")


def _cache(
    config: Config, sizes: Sequence[ModelSize], width: float, trained: float, evaluated: float
) -> Held:
    slots = min(max(trained, evaluated), config.generation.max_batch_tokens)
    cache = max((s.cache for s in sizes if s.cache), default=None)
    where = ", in evaluations" if slots > trained else ""
    why = f"{slots:,.0f} tokens at once{where}"
    return Held("generation cache ≤", _times(cache, slots * width), why)


def _critics(section: CommonConfig, config: Config, width: float) -> Iterator[Held]:
    """Return the memory of PPO's language-model critics: weights held once, what each trains
    and, where adapters are off, everything of each."""
    name = section.other_models.get("critic_model")
    if name is None:
        return
    size, count = model_size(name), section.critics
    many = f"{count} critic{'s' if count > 1 else ''}"
    if not config.lora.enabled:
        each = _times(size.parameters, width + training_adds(width)[0])
        yield Held("critic model", _times(each, count), f"{many} with Adam")
        return
    why = f"{name}, beside the agents' own"
    yield Held("critic model", _times(size.parameters, width), why)
    adapters = _times(size.adapter(config.lora), count * ADAPTER_BYTES)
    yield Held("critic adapters", adapters, f"{many} in float32 with Adam's moments")


def _reward_model(config: Config, agents_model: str, width: float) -> Iterator[Held]:
    section = config.section
    if section.fitted_reward_model is not None:
        name = section.other_models.get("reward_model_name", agents_model)
        parameters = model_size(name).parameters
        share = 1 if section.fitted_reward_model == "head" else 4
        yield Held("reward model ≤", _times(parameters, share * width), "while trained")


def _activations(sizes: Sequence[ModelSize], width: float) -> Held:
    """Return those of the update's micro-batch, which is made to fit, on a GPU."""
    from comlrl.update.accumulate import ACTIVATION_BYTES, ALONE, MICRO_BATCH_TOKENS

    left = max((s.left for s in sizes if s.left), default=None)
    tokens = MICRO_BATCH_TOKENS["cuda"]
    held = ALONE["cuda"] * ACTIVATION_BYTES["cuda"]
    most = None if left is None else min(held, tokens * left * width)
    return Held("activations ≤", most, f"of a micro-batch of {tokens:,} tokens in the update")


def _sum(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(v for v in values if v is not None)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
