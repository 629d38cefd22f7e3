"""Quantized bases: the fast way against PEFT's and transformers' own layers.

Without the packages, stand-ins have their place: bitsandbytes brings layers, torchao weights, and
both stand-ins hold integers and a scale.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from comlrl.models import pretrained
from comlrl.models.agent import Agent
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.rollout.generation import Generator
from comlrl.types import Request, Row, Sampling
from tests.support.plain import near
from tests.support.tiny_models import EOS, PAD, prompt, team

SETTINGS: dict[str, dict[str, Any]] = {
    "bitsandbytes-4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    },
    "bitsandbytes-8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "torchao-8": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}},
    },
}  # fmt: skip


def real(kind: str, base: str) -> Any:
    package = base.partition("-")[0]
    missing = importlib.util.find_spec(package) is None
    skips = pytest.mark.skipif(missing, reason=f"{package} is not installed")
    return pytest.param(kind, base, marks=skips)


BASES = [
    ("qwen2", "integer layers"), ("llama", "integer layers"), ("qwen2", "integer weights"),
    real("qwen2", "bitsandbytes-4"), real("llama", "bitsandbytes-8"), real("qwen2", "torchao-8"),
]  # fmt: skip
ROWS = [
    Row(prompt("def f(x):\n"), ((*prompt("  return x"), EOS), prompt("pass")), (0.5, -2.0), (0, 1)),
    Row(prompt("another prompt"), (prompt("b"), (*prompt("cd"), EOS)), (1.0, -1.0), (2, 3)),
]


class IntegerLinear(torch.nn.Linear):
    """A linear layer whose weights are integers of 8 bits, at one scale."""

    __module__ = "bitsandbytes.stand_in"

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        self.scale = float(linear.weight.detach().abs().max()) / 127
        integers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(integers, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(self.dtype) * self.scale, self.bias)


class IntegerWeight(torch.Tensor):
    """A weight that shows its original precision, and can only be multiplied by."""

    __module__ = "torchao.stand_in"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.as_subclass(torch.Tensor), *bias)
        if func.__name__ in ("cat", "new_zeros", "addmm"):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def with_integer_weight(linear: torch.nn.Linear) -> torch.nn.Linear:
    weight = IntegerLinear(linear)
    integers = (weight.weight.to(weight.dtype) * weight.scale).as_subclass(IntegerWeight)
    linear.weight = torch.nn.Parameter(integers, requires_grad=False)
    return linear


STAND_INS = {"integer layers": IntegerLinear, "integer weights": with_integer_weight}


def loading(quantize: Any) -> type:
    class Loads:
        @staticmethod
        def from_pretrained(*arguments: Any, **keywords: Any) -> Any:
            model = AutoModelForCausalLM.from_pretrained(*arguments, **keywords)
            for layer in model.model.layers:
                for part in (layer.self_attn, layer.mlp):
                    for name, module in list(part.named_children()):
                        if isinstance(module, torch.nn.Linear):
                            setattr(part, name, quantize(module))
            return model

    return Loads


@pytest.fixture
def quantized(monkeypatch):
    def build(kind: str, base: str, targets: Any = "all-linear"):
        keys: dict[str, Any] = {"lora__target_modules": targets}
        if base in STAND_INS:
            loads = loading(STAND_INS[base])
            monkeypatch.setattr(pretrained, "AutoModelForCausalLM", loads)
            return team(kind, **keys)
        kwargs = {"quantization_config": SETTINGS[base], "device_map": {"": "cpu"}}
        return team(kind, dtype="float32", agent_model__model_kwargs=kwargs, **keys)

    return build


def gradients(agent: Agent) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy = action_logprobs(agent, pack(ROWS, PAD), 1.0)
    weights = torch.linspace(-1, 1, len(policy.logprob_A), dtype=policy.logprob_A.dtype)
    taken = torch.autograd.grad((policy.logprob_A * weights).sum(), list(agent.parameters()))
    return policy.logprob_A.detach(), list(taken)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]], ids=["all", "some"])
@pytest.mark.parametrize(("kind", "base"), BASES)
def test_updates_are_those_of_the_layers_themselves(kind, base, targets, quantized, monkeypatch):
    agents = quantized(kind, base, targets)
    exact = base in STAND_INS
    for index in range(2):
        with agents.acting(index) as agent:
            assert agent.fast is not None and agent.fast.quantized
            logprob_A, fast = gradients(agent)
            with monkeypatch.context() as patch:
                patch.setattr(agent, "fast", None)
                wanted_A, slow = gradients(agent)
            assert near(logprob_A, wanted_A, 1e-10 if exact else 1e-4)
            tolerance = 1e-10 if exact else 1e-3
            assert all(near(a, b, tolerance) for a, b in zip(fast, slow, strict=True))


@pytest.mark.parametrize("decoding", ["growing", "static"])
@pytest.mark.parametrize(("kind", "base"), BASES)
def test_sampled_tokens_are_those_of_the_layers_themselves(kind, base, decoding, quantized):
    agents = quantized(kind, base)
    requests = [[Request(ROWS[i].prompt_ids, ((i, 0), (i, 1)))] for i in range(2)]

    def sampled():
        groups_N = Generator(agents, decoding=decoding).sample(requests, Sampling(1.0, 12))
        return [completion.token_ids for (group,) in groups_N for completion in group]

    fast = sampled()
    for agent in agents.agents:
        agent.fast = None
    assert fast == sampled()


@pytest.mark.parametrize("base", STAND_INS)
def test_updates_are_not_compiled(base, monkeypatch):
    monkeypatch.setattr(pretrained, "AutoModelForCausalLM", loading(STAND_INS[base]))
    fast = team(agent_model__update_attention="compiled").agents[0].fast
    assert fast.tree and not fast.compiled
