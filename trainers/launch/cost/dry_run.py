"""``--dry-run``: what a run will cost, told from its configuration alone.

No weights and no data are loaded and no network is used: tasks are counted where the split's text
or a local file tells their number, parameters where a model's safetensors header is at hand (its
shapes, not its weights) or its name gives a size. What cannot be known so is said to be unknown.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl.config.resolved import Config
from comlrl.errors import UserError

from comlrl.builtin import DATASETS, MODELS
from comlrl.config import algorithms as configs
from comlrl.loop.course import Course
from comlrl.preferences.pairs import tasks_at_once
from comlrl.tasks.datasets import FILE_KINDS, split_size
from trainers.launch.cost.tree_size import growth, scored, training_steps
from trainers.launch.wiring.assembly import build_course

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
ADAPTER_BYTES = 4 * 4  # float32 weight, gradient and Adam's two moments
EXCLUDED = re.compile(r"embed|wte|wpe|lm_head|score")  # never among LoRA's "all-linear"


def describe(config: Config) -> str:
    """Agents, then calls, joint actions and tokens of a training step and of the run, then memory.

    Counts marked ``≤`` are those of a run in which no branch ends early and every completion is
    as long as it may be. Raises UserError for a builtin that does not exist.
    """
    lines = [*_who(config), ""]
    tasks, found = count_tasks(config.dataset.name, config.dataset.train_split)
    lines += [f"{'training tasks':<22}{_number(tasks)}  {found}"]
    if isinstance(config.section, configs.PreferenceConfig):
        lines += _preferences(config, tasks)
    if config.section.trained_online:
        lines += _online(config, config.online, tasks)
    lines += _evaluations(config, tasks)
    return "\n".join([*lines, "", *_memory(config)])


def steps_of(config: Config, tasks: int | None) -> int | None:
    """Of the run; ``tasks``: how many there are, where that is known."""
    section = config.online
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    actions = size * scored(section, growth(section))
    return training_steps(section, tasks, actions, _rounds(config, tasks))


def count_tasks(name: str, split: str) -> tuple[int | None, str]:
    """(rows of the split or None, how that is known). Counts the lines of a local .jsonl."""
    base, _, piece = split.partition("[")
    if name.startswith("builtin:") and name not in DATASETS:
        raise UserError(f"dataset.name: '{name}'; the builtin are {', '.join(DATASETS)}")
    file = DATASETS[name].get(base) if name in DATASETS else Path(name)
    if file is None:
        raise UserError(f"dataset: '{name}' has no split '{base}'; it has train, eval")
    if file.suffix in FILE_KINDS and not file.is_file():
        raise UserError(f"dataset.name: '{name}' does not exist; give a file that does")
    window = re.fullmatch(r"(-?\d*):(-?\d*)\]", piece)
    count, how = split_size(split), "as the slice says"
    if file.suffix == ".jsonl" and (window or not piece):
        with file.open("rb") as handle:
            rows = sum(1 for line in handle if line.strip())
        ends = [int(end) if end else None for end in window.groups()] if window else [None, None]
        count, how = len(range(rows)[slice(*ends)]), "counted"
    if count == 0:
        raise UserError(f"dataset split '{split}' of '{name}' has no row; give another slice")
    if count is None:
        return None, f"{split} of {name}: known once the data is loaded"
    return count, f"{split} of {name}, {how}"


@dataclass(frozen=True, slots=True)
class Size:
    """A model's size; None: unknown."""

    parameters: int | None
    adapter: int | None  # parameters of one agent's LoRA adapter
    cache: int | None  # numbers in the key/value cache for each token
    source: str


def model_size(name: str, lora: Any) -> Size:
    """From the header of local or cached weights, else from a size such as ``3B`` in the name."""
    shapes = _shapes(model_folder(name))
    if shapes:
        linear = [s for n, s in shapes.items() if len(s) == 2 and _has_adapter(n, lora)]
        keys = [s[0] for n, s in shapes.items() if n.endswith("k_proj.weight")]
        return Size(
            sum(math.prod(shape) for shape in shapes.values()),
            lora.r * sum(map(sum, linear)) if linear else None,
            2 * sum(keys) or None,
            "counted in its weights' header",
        )
    said = re.findall(r"(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])", name)
    if not said:
        return Size(None, None, None, "unknown: not at hand, and its name gives no size")
    parameters = int(float(said[-1][0]) * (1e9 if said[-1][1] in "Bb" else 1e6))
    return Size(parameters, None, None, "from its name")


def _has_adapter(name: str, lora: Any) -> bool:
    if isinstance(lora.target_modules, str):
        return not EXCLUDED.search(name)
    return name.split(".")[-2] in lora.target_modules


def model_folder(name: str) -> Path | None:
    """Where a model lies: the builtin's folder, a local one, or the hub's cache; None: nowhere."""
    if name.startswith("builtin:"):
        if name not in MODELS:
            raise UserError(f"agent_model.name: '{name}'; the builtin are {', '.join(MODELS)}")
        return MODELS[name]
    if Path(name).is_dir():
        return Path(name)
    home = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub"))
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    return max(snapshots.glob("*"), key=lambda p: p.stat().st_mtime, default=None)


def _shapes(folder: Path | None) -> dict[str, Sequence[int]]:
    """Tensor name → shape, read from safetensors headers: 8 bytes of length, then JSON."""
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        shapes |= {n: t["shape"] for n, t in header.items() if n != "__metadata__"}
    return shapes


def models_of(config: Config) -> Sequence[str]:
    return config.agents or (config.agent_model.name,) * config.section.num_agents


def _who(config: Config) -> list[str]:
    count, names = config.section.num_agents, list(dict.fromkeys(models_of(config)))
    what = f"LoRA r={config.lora.r}" if config.lora.enabled else "all weights trained"
    shared = config.agents is None and config.lora.enabled and count > 1
    held = ", one base held once" if shared else ""
    agents = f"{count} agent{'s' if count > 1 else ''}"
    return [f"{config.algorithm}: {agents} of {' and '.join(names)} ({what}{held})"]


def _online(config: Config, section: Any, tasks: int | None) -> list[str]:
    """The table of the online loop: a step, and the whole run."""
    tree = growth(section)
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    actions = size * scored(section, tree)
    steps = steps_of(config, tasks)
    nodes = size * tree.nodes
    decoders, levels = _decoders(config), section.num_turns * len(section.shape.stages)
    calls = decoders * levels
    if getattr(section, "advantage", None) == "greedy":  # a greedy chain from every state
        calls += decoders * levels * (levels + 1) // 2
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
        "sampled tokens ≤": completions * section.max_new_tokens,
    }
    if not section.chains:
        rows = {**rows, "optimizer updates ≤": parts * section.update_epochs}
    run = f"{section.num_train_epochs} epochs" if steps is None else f"{steps:,} steps"
    lines = ["", f"{'':<22}{'a training step':>18}{f'the run, {run}':>26}"]
    for label, each in rows.items():
        whole = None if steps is None else each * steps
        if label == "tasks" and whole is not None and tasks is not None:
            whole = _tasks_seen(steps or 0, size, tasks)
        lines.append(f"{label:<22}{_number(each):>18}{_number(whole):>26}")
    if not section.takes_ratios and parts > 1:
        lines.append(
            f"notice: up to {parts} updates from one sampling (train_batch_size="
            f"{section.train_batch_size}): not strictly on-policy"
        )
    return lines


def _decoders(config: Config) -> int:
    """Generation calls of a level: agents of one base decode together, others one by one."""
    shared = config.agents is None and config.lora.enabled
    stages = len(config.section.shape.stages)
    return 1 if shared else config.section.num_agents // stages


def _tasks_seen(steps: int, size: int, tasks: int) -> int:
    """The last step of an epoch takes what is left over."""
    epochs, rest = divmod(steps, math.ceil(tasks / size))
    return epochs * tasks + rest * size


def _rounds(config: Config, tasks: int | None) -> Course | None:
    """The course of a run in rounds; None: of another, or of unknown tasks."""
    if tasks is None or not isinstance(config.section, configs.PreferenceConfig):
        return None
    return build_course(config, range(tasks))


def _preferences(config: Config, tasks: int | None) -> list[str]:
    """Candidates that are sampled, and the pairs kept of them."""
    section, rounds = config.section, _rounds(config, tasks)
    if section.preferences is not None:
        return [f"{'preferences':<22}read from {section.preferences}; nothing is sampled for them"]
    own, kept = section.preference_num_candidates, section.preference_pairs_per_sample
    candidates = own**section.num_agents if section.joint_mode == "cross" else own
    pairs = math.comb(candidates, 2) if kept is None else min(kept, math.comb(candidates, 2))
    each = None if rounds is None else [rounds.length_of(r) for r in range(section.num_iterations)]
    labelled = None if each is None else sum(each)
    size = tasks_at_once(section.batch_size, own)
    calls = None if each is None else sum(math.ceil(n / size) for n in each) * _decoders(config)
    sampled = None if labelled is None else labelled * own * section.num_agents
    tokens = None if sampled is None else sampled * section.max_new_tokens
    lines = [
        f"{'candidates':<22}{_number(_times(labelled, candidates))}  {candidates} for each task, "
        f"in {_number(calls)} generation calls, ≤ {_number(tokens)} tokens",
        f"{'preference pairs ≤':<22}{_number(_times(labelled, pairs))}  {pairs} of each task",
    ]
    if section.num_iterations > 1:
        of = "of all tasks" if rounds is None else f"of {rounds.length_of(0)} tasks"
        lines.append(f"{'rounds':<22}{section.num_iterations}  {of} each")
    return lines


def _evaluations(config: Config, tasks: int | None) -> list[str]:
    section = config.online
    if not section.eval_interval:
        return ["", f"{'evaluations':<22}none"]
    rows, _ = count_tasks(config.dataset.name, config.dataset.eval_split)
    limits = [n for n in (rows, section.eval_num_samples) if n is not None]
    each = min(limits) if limits else None
    steps = steps_of(config, tasks)
    passes = None
    if steps is not None and config.section.trained_online:
        passes = 1 + math.ceil(steps / section.eval_interval)
    levels = section.num_turns * len(section.shape.stages)
    calls = _decoders(config) * levels * section.eval_answers
    return [
        "",
        f"{'evaluations':<22}{_number(passes)}  of {_number(each)} tasks, {calls} generation "
        f"calls each",
    ]


def _memory(config: Config) -> list[str]:
    """Weights, what training adds, and the cache; activations come on top."""
    width = BYTES[config.agent_model.torch_dtype]
    count = config.section.policies
    dtype = config.agent_model.torch_dtype.replace("auto", "bfloat16 (on most CPUs float32: twice)")
    names = models_of(config)
    sizes = [model_size(name, config.lora) for name in names]
    shared = config.agents is None and config.lora.enabled
    held = sizes[:1] if shared else sizes
    lines = [
        f"{'parameters':<22}{_short(size.parameters)}  {name}, {size.source}"
        for name, size in dict(zip(names, sizes, strict=True)).items()
    ]
    total = _sum([s.parameters for s in held])
    lines.append(_memory_line("weights", _times(total, width), dtype))
    if config.lora.enabled:
        adapters = _sum([s.adapter for s in sizes[:count]])
        lines.append(
            _memory_line(
                "adapters",
                _times(adapters, ADAPTER_BYTES),
                f"{count} in float32 with gradients and Adam's moments; a few % of the weights",
            )
        )
    else:
        adds, what = training_adds(width)
        lines.append(_memory_line("training adds", _times(total, adds), what))
        if config.section.kl_coef > 0:
            lines.append(_memory_line("reference adds", _times(total, width), "frozen copies"))
    if config.generation.backend == "builtin":
        slots = _cache_slots(config)
        cache = _times(max((s.cache for s in sizes if s.cache), default=None), slots * width)
        lines.append(_memory_line("generation cache ≤", cache, f"{_number(slots)} tokens at once"))
    lines += _critics(config, config.online)
    if config.section.fits_reward_model and config.section.reward_model is None:
        base = model_size(config.section.reward_model_name or names[-1], config.lora).parameters
        share = 1 if config.section.reward_freeze_backbone else 4
        lines.append(_memory_line("reward model ≤", _times(base, share * width), "while trained"))
    return [*lines, "Activations of the update's micro-batches come on top."]


def training_adds(width: int) -> tuple[int, str]:
    """Bytes for each weight of so many bytes that is trained, and what they are."""
    if width == 2:
        return 4 * 4, "float32: gradients, Adam's moments, masters of the weights"
    return 3 * width, "gradients, Adam's moments"


def _critics(config: Config, section: Any) -> list[str]:
    """Of PPO's language-model critics: weights held once, what each trains and, where adapters
    are off, everything of each."""
    name = getattr(section, "critic_model", None)
    if name is None:
        return []
    size, count = model_size(name, config.lora), section.critics
    width = BYTES[config.agent_model.torch_dtype]
    weights = _times(size.parameters, width)
    many = f"{count} critic{'s' if count > 1 else ''}"
    if not config.lora.enabled:
        each = _times(size.parameters, width + training_adds(width)[0])
        return [_memory_line("critic model", _times(each, count), f"{many} with Adam")]
    adapters = _times(size.adapter, count * ADAPTER_BYTES)
    return [
        _memory_line("critic model", weights, f"{name}, beside the agents' own"),
        _memory_line("critic adapters", adapters, f"{many} in float32 with Adam's moments"),
    ]


def _cache_slots(config: Config) -> int:
    """Tokens in the key/value cache at once: a prompt once, and its completions."""
    section = config.online
    tree = growth(section)
    prompt = config.agent_model.max_length - section.max_new_tokens
    node = prompt + section.num_generations * section.max_new_tokens
    return min(config.generation.max_batch_tokens, section.batch_size * tree.widest * node)


def _memory_line(label: str, size: int | None, why: str) -> str:
    shown = "unknown"
    if size is not None:
        shown = f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
    return f"{label:<22}{shown}  {why}"


def _sum(values: Sequence[int | None]) -> int | None:
    return None if None in values else sum(v for v in values if v is not None)


def _times(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _short(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.1f}M"
