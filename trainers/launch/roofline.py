"""``--dry-run --hardware``: seconds of a training step and of the run.

A roofline: each part takes as long as its products at the hardware's rate or its bytes at the
bandwidth, whichever is longer, and its operations take a fixed time each however small they are.
Nothing is timed but, for ``cpu``, the machine's own peaks. Everything that a run does beside
(loading, evaluation, logging) comes on top.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from comlrl.config.sections import Config, ConfigError, LoraSection
from comlrl.preferences.pairs import tasks_at_once
from trainers import configs
from trainers.launch import dry_run, memory
from trainers.launch.dry_run_checks import prompt_tokens
from trainers.launch.growth import Level, growth, levels, scored

# Operations of a layer: while decoding a token, and forth and back in an update.
DECODING, LEARNING = 40, 150
PROMPT = 300  # tokens, where the data is not at hand
ATTENTION = 3.5  # times forward, forth and back
PASSES = 4  # over what a layer leaves for the backward pass: written and read, forth and back
SAMPLING = 24  # bytes a word of the vocabulary: softmax, sums and the draw, in float32
FEEDBACK = 100  # tokens between an agent's turns
CARDS_A_NODE, NETWORK = 8, 50e9  # bytes a second and card between nodes


@dataclass(frozen=True)
class Hardware:
    """What one card (or CPU) does, how many there are, and what is assumed of the work."""

    flops: float  # products: floating-point operations a second, in the weights' precision
    bandwidth: float  # bytes a second from and to memory
    memory: float  # bytes
    attention: float = 0  # its floating-point operations a second; 0: a quarter of ``flops``
    link: float = NETWORK  # bytes a second between the cards of a node
    launch: float = 1e-5  # seconds of an operation, however small
    cards: float = 1
    workers: float = 16  # sandbox workers a card
    rewards: float = 250  # joint actions that a worker scores in a second
    prompt: float = 0  # tokens of a first prompt; 0: those of the data, where it is at hand
    tokens: float = 0  # of a completion; 0: max_new_tokens
    word: float = 0  # bytes of a weight; 0: as configured


# What is reached of data sheets: 60% of the dense bfloat16 products, 80% of the bandwidth.
KINDS = {
    "a100": Hardware(0.6 * 312e12, 0.8 * 2.0e12, 80e9, link=300e9),
    "h100": Hardware(0.6 * 989e12, 0.8 * 3.35e12, 80e9, link=450e9),
    "h200": Hardware(0.6 * 989e12, 0.8 * 4.8e12, 141e9, link=450e9),
}
NAMES = [f.name for f in fields(Hardware)]


def hardware(text: str, config: Config) -> Hardware:
    """``[8x]KIND[,name=number,…]`` or numbers alone. Raises ConfigError naming what is wrong."""
    first, *rest = text.split(",")
    count, kind = re.fullmatch(r"(?:(\d+)x)?(.*)", first).groups()  # type: ignore[union-attr]
    given: dict[str, Any] = {"cards": float(count)} if count else {}
    if "=" in kind:
        kind, rest = "", [first, *rest]
    elif kind not in (*KINDS, "cpu"):
        raise ConfigError(f"--hardware: '{kind}'; give {', '.join(KINDS)}, cpu or NAME=NUMBER,…")
    for item in rest:
        name, _, value = item.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = math.nan
        if name not in NAMES or not 0 < given[name] < math.inf:
            raise ConfigError(f"--hardware: '{item}'; give numbers above 0 for {', '.join(NAMES)}")
    if kind == "cpu":
        return replace(measured(config), **given)
    if kind:
        return replace(KINDS[kind], **given)
    if missing := [name for name in NAMES[:3] if name not in given]:
        raise ConfigError(f"--hardware: '{text}' gives no {missing[0]}; give one, or a kind")
    return Hardware(**given)


def measured(config: Config) -> Hardware:
    """This machine's peaks: the model's own product, attention, a copy, and a small operation."""
    import torch
    import torch.nn.functional as F

    from comlrl.models.loading import dtype_of

    memory.keep_freed()  # as a run does; else results of 128 KiB may be mapped anew each time
    dims = Dims.of(dry_run.models_of(config)[0])
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


@dataclass(frozen=True)
class Dims:
    """The sizes of a decoder."""

    layers: int
    width: int
    inner: int  # of the feed-forward part
    heads: int  # numbers of all query heads of a token
    kv: int  # of all key heads
    vocabulary: int
    tied: bool = True  # the embedding is the language-model head too
    guessed: bool = False  # from the size in a name

    @classmethod
    def of(cls, name: str) -> Dims:
        """From a model's ``config.json`` or, where none is at hand, a usual decoder of the size in
        its name. Raises ConfigError where there is neither."""
        folder = dry_run.model_folder(name)
        file = None if folder is None else folder / "config.json"
        if file is None or not file.is_file():
            size = dry_run.model_size(name, LoraSection()).parameters
            if size is None:
                raise ConfigError(f"--hardware: the sizes of '{name}' are not known here")
            layers = round((size / 76800) ** (1 / 3))  # 12 · layers · width², width = 80 · layers
            width = 80 * layers
            return cls(layers, width, 3 * width, width, width // 6, 151_936, guessed=True)
        found = json.loads(file.read_text(encoding="utf-8"))
        width = found.get("hidden_size") or found.get("n_embd")
        layers = found.get("num_hidden_layers") or found.get("n_layer")
        heads = found.get("num_attention_heads") or found.get("n_head")
        if not (width and layers and heads):
            raise ConfigError(f"--hardware: the config.json of '{name}' has no sizes as known here")
        each = found.get("head_dim") or width // heads
        kv = found.get("num_key_value_heads") or heads
        inner = found.get("intermediate_size") or 4 * width * 2 // 3  # two matrices, as if three
        tied = bool(found.get("tie_word_embeddings", True))
        return cls(layers, width, inner, heads * each, kv * each, found["vocab_size"], tied)

    @property
    def linear(self) -> int:
        """Weights that every token is multiplied with, without the language-model head."""
        attention = 2 * self.width * (self.heads + self.kv)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """Of the whole model, without norms and biases."""
        return self.linear + self.head * (1 if self.tied else 2)

    @property
    def left(self) -> int:
        """Numbers that a token leaves for the backward pass, as in ``update/accumulate.py``."""
        return self.layers * (8 * self.width + 3 * self.inner)

    @property
    def cache(self) -> int:
        """Numbers that a token has in the key/value cache."""
        return 2 * self.layers * self.kv


@dataclass(frozen=True)
class Work:
    """One card's part of a training step."""

    config: Config
    section: Any  # the one that samples online
    dims: Dims
    on: Hardware
    size: int  # tasks

    @property
    def tokens(self) -> float:
        return min(self.on.tokens or math.inf, self.section.max_new_tokens)

    @property
    def bytes(self) -> float:
        """Of a weight."""
        return self.on.word or dry_run.BYTES[self.config.agent_model.torch_dtype]

    @property
    def shared(self) -> bool:
        """Whether one base serves all agents."""
        return self.config.agents is None and self.config.lora.enabled

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
        agents = len(level.stage)
        prompts = self.size * level.nodes * (agents if self.shared else 1)
        rows, read = prompts * level.own, self.read(level)
        longest = self.section.max_new_tokens
        held = prompts * read + rows * longest
        chunks = math.ceil(held / self.config.generation.max_batch_tokens)
        dims, written = self.dims, rows * self.tokens
        products = 2 * (dims.linear + dims.head) * written
        keys = self.tokens * (prompts * read + rows * self.tokens / 2) * dims.cache
        moved = chunks * longest * (dims.linear + dims.head) + keys + dims.left * written
        once = max(
            products / self.on.flops,
            (moved * self.bytes + SAMPLING * dims.vocabulary * written) / self.on.bandwidth,
        )
        once += self.attention(written, read + longest)
        if self.config.generation.backend == "builtin":  # an engine captures its operations
            once += chunks * (longest + 1) * dims.layers * DECODING * self.on.launch
        once += 2 * dims.linear * prompts * read / self.on.flops
        once += self.attention(prompts * read, read / 2)
        return once if self.shared else once * agents

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
            nodes, longest = self.size * level.nodes * len(level.stage), section.max_new_tokens
            read += nodes * self.read(level)
            written += nodes * level.own * self.tokens
            seen += self.attention(nodes * level.own * longest, self.read(level) + longest)
            seen += self.attention(nodes * self.read(level), self.read(level))
        back = 1 if self.config.lora.enabled else 2  # gradients of activations, and of weights
        epochs = getattr(section, "ppo_epochs", getattr(section, "update_epochs", 1))
        again = self.config.agent_model.gradient_checkpointing
        before = (section.kl_coef > 0) + (section.takes_ratios and epochs > 1)
        passes = epochs * (1 + back + again) + before
        products = 2 * dims.linear * (read + written) * passes
        products += 2 * dims.head * written * (epochs * (1 + back) + before)
        moved = PASSES * dims.left * (read + written) * epochs * self.bytes
        moved += PASSES * 4 * dims.vocabulary * written * epochs  # logits and their gradients
        batches = math.ceil((read + written) / self.micro_batch) * epochs * dims.layers
        return (
            max(products / self.on.flops, moved / self.on.bandwidth)
            + seen * (epochs * (ATTENTION + again) + before)
            + batches * LEARNING * self.on.launch
            + self.trained * 4 * 8 / self.on.bandwidth  # Adam reads and writes
        )

    @property
    def trained(self) -> int:
        """Weights of all agents that are trained."""
        if not self.config.lora.enabled:
            return self.section.policies * self.dims.parameters
        dims, r = self.dims, self.config.lora.r
        layer = 4 * dims.width + 2 * (dims.heads + dims.kv) + 3 * (dims.width + dims.inner)
        return self.section.policies * r * dims.layers * layer

    def exchange(self) -> float:
        """Seconds of the all-reduce of gradients, in float32."""
        cards = self.on.cards
        link = self.on.link if cards <= CARDS_A_NODE else min(self.on.link, NETWORK)
        return 2 * (cards - 1) / cards * 4 * self.trained / link

    @property
    def micro_batch(self) -> int:
        from comlrl.update.accumulate import MICRO_BATCH_TOKENS

        return MICRO_BATCH_TOKENS["cpu" if self.on.word else "cuda"]

    def memory(self) -> dict[str, float]:
        """Bytes of a card, by what holds them; critics and reward models come on top."""
        from comlrl.update.accumulate import ACTIVATION_BYTES

        dims, section = self.dims, self.section
        base = dims.parameters * self.bytes * (1 if self.shared else section.num_agents)
        held = {"weights": base, "adapters": self.trained * dry_run.ADAPTER_BYTES}
        if not self.config.lora.enabled:
            del held["adapters"]
            adds, _ = dry_run.training_adds(int(self.bytes))
            held["gradients and moments"] = self.trained * adds
            held["reference"] = base * (section.kl_coef > 0)
        level = max(levels(section), key=lambda level: level.nodes)
        prompts = self.size * level.nodes * (len(level.stage) if self.shared else 1)
        slots = prompts * (self.read(level) + level.own * section.max_new_tokens)
        slots = min(slots, self.config.generation.max_batch_tokens)
        held["cache"] = slots * dims.cache * self.bytes
        most = ACTIVATION_BYTES["cpu" if self.on.word else "cuda"]
        held["activations"] = min(most, self.micro_batch * dims.left * self.bytes)
        return held


def work_of(config: Config, on: Hardware, tasks: int | None = None) -> Work:
    """A card's part of a step; ``tasks``: how many there are, where known. Raises ConfigError."""
    section, dims = configs.online_section(config), Dims.of(dry_run.models_of(config)[0])
    on = replace(on, prompt=on.prompt or prompt_tokens(config) or PROMPT)
    size = section.batch_size if tasks is None else min(section.batch_size, tasks)
    return Work(config, section, dims, on, math.ceil(size / on.cards))


def estimate(config: Config, text: str) -> str:
    """What is told behind ``dry_run.describe``; ``text``: of ``hardware``. Raises ConfigError."""
    if config.distributed.strategy == "fsdp":
        raise ConfigError("--hardware: distributed.strategy=fsdp is not estimated; give replicate")
    tasks, _ = dry_run.count_tasks(config.dataset.name, config.dataset.train_split)
    steps = dry_run.steps_of(config, tasks)
    work = work_of(config, hardware(text, config), tasks)
    dims, on = work.dims, work.on
    before, parts = 0.0, {"generation": 0.0, "reward": 0.0}
    if config.section.trained_online:
        parts = {"generation": work.generation(), "reward": work.reward()}
    if isinstance(config.section, configs.PreferenceConfig):
        before = _collecting(work, config.section, tasks or 0)
        if not config.section.trained_online:
            work = replace(work, section=_pairs(config.section))
    parts |= {"update": work.update(), "all-reduce": work.exchange()}
    parts["together"] = sum(parts.values())
    named = f"{on.cards:g} × {on.flops / 1e12:.3g} TFLOP/s, {on.bandwidth / 1e9:.4g} GB/s"
    lines = ["", f"{'estimated for ' + named:<44}{'a training step':>16}{'the run':>12}"]
    for label, seconds in parts.items():
        whole = None if steps is None else steps * seconds + before * (label == "together")
        lines.append(f"{label:<44}{_time(seconds):>16}{_time(whole):>12}")
    if before:
        lines.insert(-1, f"{'preferences, before it':<44}{'':>16}{_time(before):>12}")
    held = work.memory()
    total = sum(held.values())
    shares = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in held.items() if value)
    guessed = ", a usual decoder of the size in the model's name" if dims.guessed else ""
    fits = "fits" if total < on.memory else "does NOT fit"
    lines += [
        f"memory of each: {total / 2**30:.1f} of {on.memory / 2**30:.1f} GiB, {fits} ({shares})",
        f"assumed: prompts of {on.prompt:.0f} tokens, completions of {work.tokens:.0f}, "
        f"{on.workers:g} sandbox workers of {on.rewards:g} joint actions a second on each{guessed}",
    ]
    return "\n".join(lines)


def _pairs(section: Any) -> Any:
    """A step of MADPO as one of the samples that its pairs are made of."""
    own, kept = section.preference_num_candidates, section.preference_pairs_per_sample
    return replace(section, num_generations=own if kept is None else min(own, 2 * kept))


def _collecting(work: Work, section: Any, tasks: int) -> float:
    """Seconds until all candidates are sampled and scored."""
    if section.preferences is not None:
        return 0.0
    own = section.preference_num_candidates
    size = min(tasks_at_once(section.batch_size, own), tasks)
    each = replace(
        work,
        section=replace(section, num_generations=own, num_turns=1),
        size=math.ceil(size / work.on.cards),
    )
    return math.ceil(tasks / size) * (each.generation() + each.reward()) if tasks else 0.0


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
