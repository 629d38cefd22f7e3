"""Random models of real architectures, a few thousand weights each, as folders on disk."""

from __future__ import annotations

import functools
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from comlrl.config.algorithms import sections_of
from comlrl.config.loader import Loader
from comlrl.config.resolved import Config
from comlrl.config.yaml_values import Setting
from comlrl.models.pretrained import build_team
from comlrl.models.team import Team
from comlrl.trainers.launch.checks.validation import validate

VOCABULARY = 300  # bytes, specials, and rows that no text has
EOS, PAD = 256, 257
# Stopping at many ordinary bytes as well makes completions of all lengths.
ROOT_KEYS = ("agents", "agent_devices", "seed", "init_from")
STOPS = [EOS, *range(0, 240, 8)]

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "initializer_range": 0.4,  # peaked enough that completions differ in more than noise
}  # fmt: skip
_ROPE: dict[str, Any] = {"rope_theta": 100.0, "original_max_position_embeddings": 16}
_ROPES: dict[str, Any] = {
    "linear": _ROPE | {"rope_type": "linear", "factor": 3.0},
    "llama3": _ROPE
    | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": _ROPE | {"rope_type": "yarn", "factor": 4.0},
}
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: Qwen2Config(**_SHARED, **_LLAMA),
    "qwen2 of 64": lambda: Qwen2Config(**_SHARED, **(_LLAMA | {"hidden_size": 64})),
    "llama": lambda: LlamaConfig(**_SHARED, **_LLAMA),
    **{
        f"llama with {kind} ropes": functools.partial(
            LlamaConfig, **_SHARED, **_LLAMA, rope_parameters=rope
        )
        for kind, rope in _ROPES.items()
    },
    # Heads are wider than their part of the hidden width, and have norms.
    "qwen3": lambda: Qwen3Config(**_SHARED, **_LLAMA, head_dim=16),
    "qwen3 with a window": lambda: Qwen3Config(
        **_SHARED, **_LLAMA, head_dim=16, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    ),
    "gpt2": lambda: GPT2Config(
        **_SHARED, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    # Caps on attention's scores and on the logits; a window in every second layer.
    "gemma2": lambda: Gemma2Config(
        **_SHARED, **_LLAMA, head_dim=8, query_pre_attn_scalar=8, sliding_window=8,
        attn_logit_softcapping=2.0, final_logit_softcapping=10.0,
    ),
    # A window shorter than most rows: cannot be packed, cannot share prefixes.
    "mistral": lambda: MistralConfig(**_SHARED, **_LLAMA, sliding_window=8),
}  # fmt: skip
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, pad: bool = True, chat: bool = False, upper: bool = False) -> Any:
    """A byte a token. ``upper`` numbers the bytes the other way round: another tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=upper)
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {"<eos>": EOS, "<pad>": PAD}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = {"eos_token": "<eos>"} | ({"pad_token": "<pad>"} if pad else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **specials)
    if chat:
        fast.chat_template = CHAT
    return fast


@functools.cache
def folder(kind: str, *, seed: int = 0, **tokens: bool) -> Path:
    """A saved model with its tokenizer; made once a session."""
    path = Path(tempfile.mkdtemp(prefix=f"tiny_{kind.split()[0]}_"))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # they start at one, which hides them
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(path)
    tokenizer(**tokens).save_pretrained(path)
    return path


def config(algorithm: str = "magrpo", **settings: Any) -> Config:
    """A validated configuration; ``a__b=value`` sets ``a.b``, a bare name the algorithm's key."""
    loader = Loader(algorithm, sections_of(algorithm))
    defaults = {"max_new_tokens": 16, "max_steps": 2, "num_generations": 3}
    for name, value in {**defaults, **settings}.items():
        key = (
            name.replace("__", ".") if "__" in name or name in ROOT_KEYS else f"{algorithm}.{name}"
        )
        loader.set(Setting(key, value, "test"))
    built = loader.build()
    return built.with_roles(validate(built).roles)


def team(
    kind: str = "qwen2",
    *,
    dtype: str = "float64",
    reference: bool = False,
    device: str = "cpu",
    **keys: Any,
) -> Team:
    """A team on a tiny model whose adapters are not nothing: B starts at random here."""
    keys = {"agent_model__name": str(folder(kind)), "agent_model__torch_dtype": dtype} | keys
    built = build_team(config(**keys), reference=reference, device=device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for agent in built.agents:
            exact_norms(agent.model)
            if agent.peft is not None:
                for parameter in agent.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_((0.1 * noise).to(parameter))
    return built


def exact_norms(model: torch.nn.Module) -> None:
    """transformers takes these norms in float32, whatever the model's precision (and Gemma's have
    another form: they stay as they are)."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def prompt(text: str) -> tuple[int, ...]:
    """Token ids of a text, a byte a token."""
    return tuple(tokenizer()(text)["input_ids"])
