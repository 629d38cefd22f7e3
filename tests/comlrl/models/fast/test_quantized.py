"""Bases of bitsandbytes: the fast way against PEFT's and transformers' own layers.

Without the package, a stand-in has its place: a linear layer that holds integers and a scale.
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

BITS: dict[str, dict[str, Any]] = {
    "4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "8": {"load_in_8bit": True},
}  # fmt: skip
STAND_IN = "stand-in"
INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
REAL = pytest.mark.skipif(not INSTALLED, reason="bitsandbytes is not installed")
BASES = [
    ("qwen2", STAND_IN), ("llama", STAND_IN),
    pytest.param("qwen2", "4", marks=REAL), pytest.param("llama", "8", marks=REAL),
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


class LoadsIntegers:
    @staticmethod
    def from_pretrained(*arguments: Any, **keywords: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(*arguments, **keywords)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, module in list(part.named_children()):
                    if isinstance(module, torch.nn.Linear):
                        setattr(part, name, IntegerLinear(module))
        return model


@pytest.fixture
def quantized(monkeypatch):
    def build(kind: str, bits: str, targets: Any = "all-linear"):
        keys: dict[str, Any] = {"lora__target_modules": targets}
        if bits == STAND_IN:
            monkeypatch.setattr(pretrained, "AutoModelForCausalLM", LoadsIntegers)
            return team(kind, **keys)
        settings = {"quant_method": "bitsandbytes", **BITS[bits]}
        kwargs = {"quantization_config": settings, "device_map": {"": "cpu"}}
        return team(kind, dtype="float32", agent_model__model_kwargs=kwargs, **keys)

    return build


def gradients(agent: Agent) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy = action_logprobs(agent, pack(ROWS, PAD), 1.0)
    weights = torch.linspace(-1, 1, len(policy.logprob_A), dtype=policy.logprob_A.dtype)
    taken = torch.autograd.grad((policy.logprob_A * weights).sum(), list(agent.parameters()))
    return policy.logprob_A.detach(), list(taken)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]], ids=["all", "some"])
@pytest.mark.parametrize(("kind", "bits"), BASES)
def test_updates_are_those_of_the_layers_themselves(kind, bits, targets, quantized, monkeypatch):
    agents = quantized(kind, bits, targets)
    exact = bits == STAND_IN
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
@pytest.mark.parametrize(("kind", "bits"), BASES)
def test_sampled_tokens_are_those_of_the_layers_themselves(kind, bits, decoding, quantized):
    agents = quantized(kind, bits)
    requests = [[Request(ROWS[i].prompt_ids, ((i, 0), (i, 1)))] for i in range(2)]

    def sampled():
        groups_N = Generator(agents, decoding=decoding).sample(requests, Sampling(1.0, 12))
        return [completion.token_ids for (group,) in groups_N for completion in group]

    fast = sampled()
    for agent in agents.agents:
        agent.fast = None
    assert fast == sampled()
