"""``--dry-run --hardware``: seconds of a training step and of the run.

A roofline: each part takes as long as its products at the hardware's rate or its bytes at the
bandwidth, whichever is longer, and its operations take a fixed time each however small they are.
Nothing is timed but, for ``cpu``, the machine's own peaks. Everything that a run does beside
(loading, evaluation, logging) comes on top.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from comlrl.config.algorithms import CommonConfig, PreferenceConfig
from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.preferences.pairs import tasks_at_once
from trainers.launch.cost.dry_run import count_tasks, held_out_tasks, steps_of
from trainers.launch.cost.memory import held, prompts_at_once, slots, widest
from trainers.launch.cost.model_size import BYTES, Dims, ModelSize, model_size
from trainers.launch.cost.tree_size import Level, growth, levels, scored
from trainers.launch.wiring import allocator

# Operations of a layer: while decoding a token, and forward and backward in an update.
DECODING, LEARNING = 40, 150
FEW = 32  # rows
PROMPT = 300  # tokens, where the data is not at hand
ATTENTION = 3.5  # forward and backward, in forward passes
PASSES = 4  # over what a layer leaves for the backward pass: a write and a read, both ways
SAMPLING = 24  # bytes a word of the vocabulary: softmax, sums and the draw, in float32
FEEDBACK = 100  # tokens between an agent's turns
GPUS_A_NODE, NETWORK = 8, 50e9  # bytes a second and GPU between nodes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What one GPU (or CPU) does, how many there are, and what is assumed of the work."""

    flops: float  # products: floating-point operations a second, in the weights' precision
    bandwidth: float  # bytes a second from and to memory
    memory: float  # bytes
    attention: float = 0  # its floating-point operations a second; 0: a quarter of ``flops``
    few: float = 0  # ``flops`` of products of few rows, while decoding; 0: the same
    link: float = NETWORK  # bytes a second between the GPUs of a node
    launch: float = 4e-5  # seconds of an operation, however small: as decoding took on an H200
    gpus: float = 1
    workers: float = 16  # sandbox workers a GPU
    rewards: float = 250  # joint actions that a worker scores in a second
    prompt: float = 0  # tokens of a first prompt; 0: those of the data, where it is at hand
    tokens: float = 0  # of a completion; 0: max_new_tokens
    word: float = 0  # bytes of a weight; 0: as configured


# What is reached of data sheets: 60% of the dense bfloat16 products, 80% of the bandwidth.
KINDS = {
    "a100": Hardware(flops=0.6 * 312e12, bandwidth=0.8 * 2.0e12, memory=80e9, link=300e9),
    "h100": Hardware(flops=0.6 * 989e12, bandwidth=0.8 * 3.35e12, memory=80e9, link=450e9),
    "h200": Hardware(flops=0.6 * 989e12, bandwidth=0.8 * 4.8e12, memory=141e9, link=450e9),
}
NAMES = [f.name for f in fields(Hardware)]


def hardware(text: str, config: Config) -> Hardware:
    """``[8x]KIND[,name=number,…]`` or numbers alone. Raises UserError naming what is wrong."""
    first, *rest = text.split(",")
    count, kind = re.fullmatch(r"(?:(\d+)x)?(.*)", first).groups()  # type: ignore[union-attr]
    given: dict[str, Any] = {"gpus": float(count)} if count else {}
    if "=" in kind:
        kind, rest = "", [first, *rest]
    elif kind not in (*KINDS, "cpu"):
        raise UserError(f"--hardware: '{kind}'; give {', '.join(KINDS)}, cpu or NAME=NUMBER,…")
    for item in rest:
        name, _, value = item.partition("=")
        name = "gpus" if name == "cards" else name  # its older name
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = math.nan
        if name not in NAMES or not 0 < given[name] < math.inf:
            raise UserError(f"--hardware: '{item}'; give numbers above 0 for {', '.join(NAMES)}")
    if kind == "cpu":
        return replace(measured(config), **given)
    if kind:
        return replace(KINDS[kind], **given)
    if missing := [name for name in NAMES[:3] if name not in given]:
        raise UserError(f"--hardware: '{text}' gives no {missing[0]}; give one, or a kind")
    return Hardware(**given)


def measured(config: Config) -> Hardware:
    """This machine's peaks: the model's own product, attention, a copy, and a small operation."""
    import torch
    import torch.nn.functional as F

    from comlrl.models.pretrained import dtype_of

    allocator.keep_freed()  # as a run does; else results of 128 KiB may be mapped anew each time
    dims = _model(config).dims
    assert dims is not None
    dtype = dtype_of(config.agent_model, "cpu")
    x, weight = torch.rand(2048, dims.width).to(dtype), torch.rand(dims.inner, dims.width).to(dtype)
    query = torch.rand(32, 4, 128, 64)  # float32, as attention is on a CPU
    here, there = torch.zeros(2, 1 << 25)
    small = torch.zeros(128, dims.width)
    product = _shortest(lambda: F.linear(x, weight))
    attention = _shortest(lambda: F.scaled_dot_product_attention(query, query, query))
    return Hardware(
        flops=2 * 2048 * weight.numel() / product,
        attention=4 * 128 * query.numel() / attention,
        few=2 * FEW * weight.numel() / _shortest(lambda: F.linear(x[:FEW], weight)),
        bandwidth=2 * here.nbytes / _shortest(lambda: here.copy_(there)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        launch=_shortest(lambda: [small.mul(small) for _ in range(1000)]) / 1000,
        word=dtype.itemsize,
        workers=config.sandbox.workers or os.cpu_count() or 1,
    )


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of twenty."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One GPU's part of a training step."""

    config: Config
    limits_N: Sequence[int]  # ``max_new_tokens`` of each agent
    section: CommonConfig  # the one that samples online
    model: ModelSize  # of each agent
    on: Hardware
    size: int  # tasks

    @property
    def dims(self) -> Dims:
        assert self.model.dims is not None
        return self.model.dims

    @property
    def tokens(self) -> float:
        return self.written(range(self.section.num_agents))

    def written(self, stage: range) -> float:
        """Tokens of a completion, the mean over these agents."""
        most = self.on.tokens or math.inf
        return sum(min(most, self.limits_N[agent]) for agent in stage) / len(stage)

    def longest(self, stage: range) -> int:
        return max(self.limits_N[agent] for agent in stage)

    @property
    def bytes(self) -> float:
        """Of a weight."""
        return self.on.word or BYTES[self.config.agent_model.torch_dtype]

    def read(self, level: Level) -> float:
        """Tokens of a prompt: at later turns what was written before and what was answered."""
        before = level.turn - 1
        if self.config.external.history == "last":
            before = min(before, 1)
        return self.on.prompt + before * (self.tokens + FEEDBACK)

    def generation(self) -> float:
        return sum(self._sampled(level) for level in levels(self.section))

    def _sampled(self, level: Level) -> float:
        """Seconds of a level: prompts are read, then all rows grow a token at a time."""
        prompts = prompts_at_once(self.config, level, self.size)
        rows, read = prompts * level.own, self.read(level)
        longest, tokens = self.longest(level.stage), self.written(level.stage)
        held = slots(self.config, level, self.limits_N, read, self.size)
        chunks = math.ceil(held / self.config.generation.max_batch_tokens)
        dims, written = self.dims, rows * tokens
        products = 2 * (dims.linear + dims.head) * written
        keys = tokens * (prompts * read + rows * tokens / 2) * dims.cache
        moved = chunks * longest * (dims.linear + dims.head) + keys + dims.left * written
        once = max(
            products / (self.on.few or self.on.flops),
            (moved * self.bytes + SAMPLING * dims.vocabulary * written) / self.on.bandwidth,
        )
        once += self.attention(written, read + longest)
        if self.config.generation.backend == "builtin":  # an engine captures its operations
            once += chunks * (longest + 1) * dims.layers * DECODING * self.on.launch
        once += 2 * dims.linear * prompts * read / self.on.flops
        once += self.attention(prompts * read, read / 2)
        return once if self.config.shares_base else once * len(level.stage)

    def attention(self, queries: float, keys: float) -> float:
        """Seconds, where each of so many tokens looks at so many."""
        products = 4 * self.dims.layers * self.dims.heads * queries * keys
        return products / (self.on.attention or self.on.flops / 4)

    def reward(self) -> float:
        actions = self.size * scored(self.section, growth(self.section))
        return actions / (self.on.workers * self.on.rewards)

    def update(self) -> float:
        """Seconds of all agents' updates, and of what is read before them."""
        section, dims = self.section, self.dims
        read = written = seen = 0.0
        for level in levels(section):
            nodes, longest = self.size * level.nodes * len(level.stage), self.longest(level.stage)
            parts = self._parts(self.read(level), level.own, longest)
            read += nodes * parts * self.read(level)
            written += nodes * level.own * self.written(level.stage)
            seen += self.attention(nodes * level.own * longest, self.read(level) + longest)
            seen += self.attention(nodes * parts * self.read(level), self.read(level))
        back = 1 if self.config.lora.enabled else 2  # gradients of activations, and of weights
        epochs = section.passes
        again = self.config.agent_model.gradient_checkpointing
        before = (section.kl_coef > 0) + (section.takes_ratios and epochs > 1)
        passes = epochs * (1 + back + again) + before
        products = 2 * dims.linear * (read + written) * passes
        products += 2 * dims.head * written * (epochs * (1 + back) + before)
        moved = PASSES * dims.left * (read + written) * epochs * self.bytes
        moved += PASSES * 4 * dims.vocabulary * written * epochs  # logits and their gradients
        batches = math.ceil((read + written) / self.micro_batch) * epochs * dims.layers
        computing = max(products / self.on.flops, moved / self.on.bandwidth)
        computing += seen * (epochs * (ATTENTION + again) + before)
        starting = batches * LEARNING * self.on.launch
        # A GPU computes while the next operations are started.
        both = computing + starting if self.device == "cpu" else max(computing, starting)
        return both + self.trained * 4 * 8 / self.on.bandwidth  # Adam reads and writes

    @property
    def trained(self) -> int:
        """Weights of all agents that are trained."""
        each = self.model.parameters
        if self.config.lora.enabled:
            each = self.model.adapter(self.config.lora)
        assert each is not None, "step_cost refuses others"
        return self.section.policies * each

    def exchange(self) -> float:
        """Seconds of the all-reduce of gradients, in float32."""
        gpus = self.on.gpus
        link = self.on.link if gpus <= GPUS_A_NODE else min(self.on.link, NETWORK)
        return 2 * (gpus - 1) / gpus * 4 * self.trained / link

    def _parts(self, prompt: float, own: int, longest: int) -> int:
        """In how many rows a prompt's completions are, each of which reads it again."""
        from comlrl.update.accumulate import ALONE

        most = ALONE[self.device] * self.micro_batch
        fitting = max(1, int((most - prompt) // longest))
        return math.ceil(own / fitting)

    @property
    def micro_batch(self) -> int:
        """Tokens."""
        from comlrl.update.accumulate import tokens_at_once

        return tokens_at_once(self.device, self.dims.left * self.bytes)

    @property
    def device(self) -> str:
        return "cpu" if self.on.word else "cuda"

    def memory(self) -> dict[str, float]:
        """Bytes of a GPU, by what holds them, as far as that is known."""
        prompt = self.read(widest(self.section))
        held_out = held_out_tasks(self.config)
        if held_out is not None:
            held_out = math.ceil(held_out / self.on.gpus)
        parts = held(
            self.config, self.limits_N, prompt, self.size, held_out, self.bytes, self.device
        )
        return {part.label: part.bytes for part in parts if part.bytes is not None}


def _model(config: Config) -> ModelSize:
    """Of the agents' model. Raises UserError where its sizes are not known."""
    name = config.agent_models[0]
    size = model_size(name)
    if size.dims is None:
        raise UserError(
            f"--hardware: the sizes of '{name}' are not known here: it has no config.json at hand "
            "with sizes as known here, and no size in its name"
        )
    if config.lora.enabled and size.adapter(config.lora) is None:
        raise UserError(
            f"lora.target_modules: {config.lora.target_modules} with --hardware: the sizes "
            f"of these modules of '{name}' are not known here; download the model, or leave "
            "--hardware out"
        )
    return size


def step_cost(
    config: Config, limits_N: Sequence[int], on: Hardware, tasks: int | None = None
) -> StepCost:
    """A GPU's part of a step; ``tasks``: how many there are, where known. Raises UserError."""
    section, model = config.online, _model(config)
    on = replace(on, prompt=on.prompt or PROMPT)
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    return StepCost(
        config=config,
        limits_N=limits_N,
        section=section,
        model=model,
        on=on,
        size=math.ceil(size / on.gpus),
    )


def estimate(
    config: Config, limits_N: Sequence[int], text: str, prompt_tokens: float | None = None
) -> str:
    """What follows ``dry_run.describe``. Raises UserError.

    Args:
        limits_N: ``max_new_tokens`` of each agent.
        text: as for ``hardware``.
        prompt_tokens: mean length of the first prompts; None where the data is not at hand.
    """
    if config.distributed.strategy == "fsdp":
        raise UserError("--hardware: distributed.strategy=fsdp is not estimated; give replicate")
    tasks, _ = count_tasks(config.dataset.name, config.dataset.train_split)
    steps = steps_of(config, tasks)
    found = hardware(text, config)
    found = replace(found, prompt=found.prompt or prompt_tokens or 0)
    step = step_cost(config, limits_N, found, tasks)
    dims, on = step.dims, step.on
    before, parts = 0.0, {"generation": 0.0, "reward": 0.0}
    if config.section.trained_online:
        parts = {"generation": step.generation(), "reward": step.reward()}
    if isinstance(config.section, PreferenceConfig):
        before = _collecting(step, config.section, tasks or 0)
        if not config.section.trained_online:
            step = replace(step, section=_pairs(config.section))
    parts |= {"update": step.update(), "all-reduce": step.exchange()}
    parts["together"] = sum(parts.values())
    named = f"{on.gpus:g} × {on.flops / 1e12:.3g} TFLOP/s, {on.bandwidth / 1e9:.4g} GB/s"
    lines = ["", f"{'estimated for ' + named:<44}{'a training step':>16}{'the run':>12}"]
    for label, seconds in parts.items():
        whole = None if steps is None else steps * seconds + before * (label == "together")
        lines.append(f"{label:<44}{_time(seconds):>16}{_time(whole):>12}")
    if before:
        lines.insert(-1, f"{'preferences, before it':<44}{'':>16}{_time(before):>12}")
    held = step.memory()
    total = sum(held.values())
    shares = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in held.items() if value)
    guessed = ", a usual decoder of the size in the model's name" if dims.guessed else ""
    fits = "fits" if total < on.memory else "does NOT fit"
    lines += [
        f"memory of each: {total / 2**30:.1f} of {on.memory / 2**30:.1f} GiB, {fits} ({shares})",
        f"assumed: prompts of {on.prompt:.0f} tokens, completions of {step.tokens:.0f}, "
        f"{on.workers:g} sandbox workers of {on.rewards:g} joint actions a second on each{guessed}",
    ]
    return "\n".join(lines)


def _pairs(section: PreferenceConfig) -> PreferenceConfig:
    """A step of MADPO as one of the samples that its pairs are made of."""
    own, kept = section.preference_num_candidates, section.preference_pairs_per_sample
    return replace(section, num_generations=own if kept is None else min(own, 2 * kept))


def _collecting(step: StepCost, section: PreferenceConfig, tasks: int) -> float:
    """Seconds until all candidates are sampled and scored."""
    if section.preferences is not None:
        return 0.0
    own = section.preference_num_candidates
    size = min(tasks_at_once(section.batch_size, own), tasks)
    each = replace(
        step,
        section=replace(section, num_generations=own, num_turns=1),
        size=math.ceil(size / step.on.gpus),
    )
    return math.ceil(tasks / size) * (each.generation() + each.reward()) if tasks else 0.0


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
