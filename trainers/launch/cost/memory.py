"""The memory of a run, for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from comlrl.config.algorithms import CommonConfig
from comlrl.config.resolved import Config
from comlrl.config.sections import LoraSection
from comlrl.evaluation.batches import AT_ONCE, at_once
from comlrl.trainers.launch.cost.tree_size import Level, levels
from comlrl.trainers.launch.wiring.model_size import BYTES, ModelSize, model_size

Number = TypeVar("Number", int, float)
ADAPTER_BYTES = 4 * 4  # per parameter: float32 weight, gradient and Adam's two moments


class Held(NamedTuple):
    """One item of the memory estimate."""

    label: str
    bytes: float | None  # None: unknown
    why: str


def held(config: Config, limits_N: Sequence[int], held_out: int | None) -> list[Held]:
    """Return the memory of one process for sampling, training and evaluation with the longest
    prompts.

    Args:
        limits_N: ``max_new_tokens`` of each agent.
        held_out: this process's tasks in an evaluation; None: unknown.
    """
    model, lora, online, policies = (
        config.agent_model, config.lora, config.online, config.section.policies,
    )  # fmt: skip
    width = BYTES[model.torch_dtype]
    names, shares = config.model_names, config.shares_base
    by_name = {name: model_size(name) for name in names}
    sizes = [by_name[name] for name in (names[:1] if shares else names)]
    total = _sum([s.parameters for s in sizes])
    dtype = model.torch_dtype.replace("auto", "bfloat16 (on most CPUs float32: twice)")
    rows = [Held("weights", times(total, width), dtype)]
    moved = [agent.train for agent in config.team[:policies]]
    policies = sum(moved)
    if not shares:
        total = _sum([s.parameters for s, trained in zip(sizes, moved, strict=True) if trained])
    if lora.enabled:
        adapters = [s.adapter(lora) for s, lora in zip(sizes, config.loras, strict=False)]
        of_trained = [a for a, trained in zip(adapters, moved, strict=False) if trained]
        adapters = adapters[:1] * policies if shares else of_trained
        why = f"{policies} in float32 with gradients and Adam's moments; a few % of the weights"
        rows.append(Held("adapters", times(_sum(adapters), ADAPTER_BYTES), why))
    else:
        adds, why = training_adds(width)
        rows.append(Held("training adds", times(total, adds), why))
        if any(section.needs_reference for section in config.sections.values()):
            rows.append(Held("reference adds", times(total, width), "frozen copies"))
    if config.generation.backend == "builtin":
        prompt = model.max_length - max(limits_N)
        widest = max(levels(online), key=lambda level: level.nodes)
        trained = _slots(widest, shares, limits_N, prompt, online.batch_size)
        evaluated = _evaluated(online, shares, limits_N, prompt, held_out)
        slots = min(max(trained, evaluated), config.generation.max_batch_tokens)
        cache = max((s.cache for s in sizes if s.cache), default=None)
        where = ", in evaluations" if slots > trained else ""
        why = f"{slots:,.0f} tokens at once{where}"
        rows.append(Held("generation cache ≤", times(cache, slots * width), why))
    rows += _critics(online, lora, width)
    rows += _reward_model(config.section, names[-1], width)
    rows.append(_activations(sizes, width))
    return rows


def training_adds(width: float) -> tuple[float, str]:
    """Return the bytes that training adds per weight of ``width`` bytes, and their purpose."""
    if width == 2:
        return 4 * 4, "float32: gradients, Adam's moments, masters of the weights"
    return 3 * width, "gradients, Adam's moments"


def _slots(
    level: Level, shares_base: bool, limits_N: Sequence[int], prompt: int, tasks: int
) -> int:
    """Count the key/value slots used while sampling a level: one copy of each prompt, and its
    completions. Agents on one base are sampled together. ``prompt``: tokens of a prompt. ``tasks``:
    number of trees that grow together."""
    longest = max(limits_N[agent] for agent in level.stage)
    prompts = tasks * level.nodes * (len(level.stage) if shares_base else 1)
    return prompts * (prompt + level.completions * longest)


def _evaluated(
    section: CommonConfig,
    shares_base: bool,
    limits_N: Sequence[int],
    prompt: int,
    held_out: int | None,
) -> int:
    """Count the key/value slots of an evaluation's widest level. All answers to a task share its
    first prompt; at later turns and for later agents of a turn, each answer has its own prompt."""
    if not section.eval_interval:
        return 0
    tasks = AT_ONCE if held_out is None else held_out
    answers = min(section.eval_answers, at_once(tasks))
    most = 0
    for level in levels(section):
        first = level.turn == 1 and level.stage.start == 0
        nodes, completions = (1, answers) if first else (answers, 1)
        chains = level._replace(nodes=nodes, completions=completions)
        most = max(most, _slots(chains, shares_base, limits_N, prompt, tasks))
    return most


def _critics(section: CommonConfig, lora: LoraSection, width: float) -> Iterator[Held]:
    """Yield the memory of PPO's language-model critics: shared weights and one adapter each, or
    without LoRA, a full model each."""
    name = section.other_models.get("critic_model")
    if name is None:
        return
    size, count = model_size(name), section.critics
    many = f"{count} critic{'s' if count > 1 else ''}"
    if not lora.enabled:
        each = times(size.parameters, width + training_adds(width)[0])
        yield Held("critic model", times(each, count), f"{many} with Adam")
        return
    why = f"{name}, beside the agents' own"
    yield Held("critic model", times(size.parameters, width), why)
    adapters = times(size.adapter(lora), count * ADAPTER_BYTES)
    yield Held("critic adapters", adapters, f"{many} in float32 with Adam's moments")


def _reward_model(section: CommonConfig, agents_model: str, width: float) -> Iterator[Held]:
    if section.fitted_reward_model is not None:
        name = section.other_models.get("reward_model_name", agents_model)
        parameters = model_size(name).parameters
        share = 1 if section.fitted_reward_model == "head" else 4
        yield Held("reward model ≤", times(parameters, share * width), "while trained")


def _activations(sizes: Sequence[ModelSize], width: float) -> Held:
    """Return the activations of a micro-batch in the update on a GPU, up to the limit at which
    micro-batches are split."""
    from comlrl.update.accumulate import ACTIVATION_BYTES, ALONE, MICRO_BATCH_TOKENS

    left = max((s.left for s in sizes if s.left), default=None)
    tokens = MICRO_BATCH_TOKENS["cuda"]
    held = ALONE["cuda"] * ACTIVATION_BYTES["cuda"]
    most = None if left is None else min(held, tokens * left * width)
    return Held("activations ≤", most, f"of a micro-batch of {tokens:,} tokens in the update")


def _sum(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(v for v in values if v is not None)


def times(value: Number | None, factor: Number) -> Number | None:
    """Multiply; return None if ``value`` is None (unknown)."""
    return None if value is None else value * factor
