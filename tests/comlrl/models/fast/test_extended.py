"""Adapters inside the base's products, against the base and each adapter by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from comlrl.models.fast.extended import extended_linear
from tests.support.plain import near
from tests.support.tiny_models import team

TARGETS = {"all": "all-linear", "some": ["q_proj", "v_proj", "down_proj"]}


def products(fast):
    return [p for layer in fast.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]


@torch.no_grad()
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("agents", [1, 3])
def test_a_product_is_the_base_and_the_adapter_of_each_row(targets, agents):
    built = team("qwen2", num_agents=agents, lora__target_modules=TARGETS[targets])
    fast = built.agents[0].fast
    adapter_R = torch.arange(7) % agents
    owner_RN = (adapter_R[:, None] == torch.arange(agents)).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        fast.extended.refresh()
        for product in products(fast):
            x, parts = torch.randn(7, product.linears[0].in_features, generator=generator), []
            x = x.double()
            for layer, linear in zip(product.layers, product.linears, strict=True):
                y = F.linear(x, linear.weight, linear.bias)
                for row, agent in enumerate(adapter_R.tolist()):
                    if (name := f"agent_{agent}") in getattr(layer, "lora_A", ()):
                        low = layer.lora_A[name].weight @ x[row]
                        y[row] += layer.scaling[name] * (layer.lora_B[name].weight @ low)
                parts.append(y)
            extended, wanted = fast.extended.of_product[product], torch.cat(parts, 1)
            assert near(extended_linear(x, extended, owner_RN), wanted)
            residual = torch.randn(wanted.shape, generator=generator).double()
            added = extended_linear(x, extended, owner_RN, residual)
            assert near(added, wanted + residual)
        for agent in built.agents:  # the second time, after an update
            for parameter in agent.parameters():
                parameter.add_(0.1)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("agents", [1, 3])
def test_gradients_of_a_product_are_autograds(targets, agents):
    fast = team("qwen2", num_agents=agents, lora__target_modules=TARGETS[targets]).agents[0].fast
    name = f"agent_{agents - 1}"
    fast.extended.refresh()
    generator = torch.Generator().manual_seed(0)
    for product in products(fast):
        if (product, name) not in fast.extended.adapters:
            continue
        x = torch.randn(7, product.linears[0].in_features, generator=generator).double()
        inputs, parts = [x.requires_grad_()], []
        for layer, linear in zip(product.layers, product.linears, strict=True):
            y = F.linear(x, linear.weight, linear.bias)
            if name in getattr(layer, "lora_A", ()):
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                y = y + layer.scaling[name] * (x @ down.t() @ up.t())
                inputs += [down, up]
            parts.append(y)
        wanted = torch.cat(parts, 1)
        computed = fast.extended.adapters[product, name].product(x)
        assert near(computed, wanted)
        weights = torch.randn(wanted.shape, generator=generator).double()
        gradients = torch.autograd.grad(computed, inputs, weights)
        for gradient, each in zip(
            gradients, torch.autograd.grad(wanted, inputs, weights), strict=True
        ):
            assert near(gradient, each)


@torch.no_grad()
def test_nothing_is_held_twice_and_weights_stay_where_they_are():
    agent = team("qwen2").agents[0]
    extended = agent.fast.extended
    before = {p: (e.weight.data_ptr(), e.down.data_ptr()) for p, e in extended.of_product.items()}
    loaded = {name: weight + 1 for name, weight in agent.model.state_dict().items()}
    agent.model.load_state_dict(loaded)
    extended.refresh()
    for product, each in extended.of_product.items():
        assert (each.weight.data_ptr(), each.down.data_ptr()) == before[product]
        start = 0
        for layer, linear in zip(product.layers, product.linears, strict=True):
            rows = each.weight[start : start + len(linear.weight)]
            assert linear.weight.data_ptr() == rows.data_ptr()
            assert torch.equal(rows[:, : linear.in_features], linear.weight)
            start += len(linear.weight)
            assert layer.base_layer is linear


@torch.no_grad()
def test_weights_that_are_trained_are_copied_anew():
    agent = team("qwen3", lora__enabled=False).agents[0]
    extended, product = agent.fast.extended, agent.fast.layers[0].qkv
    extended.refresh()
    for parameter in agent.parameters():
        parameter.add_(1)
    x = torch.randn(3, product.linears[0].in_features, dtype=torch.float64)
    extended.refresh()
    assert near(extended_linear(x, extended.of_product[product], x[:, :0]), product.base(x))
