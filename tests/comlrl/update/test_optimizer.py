"""Weights of half precision have float32 masters; others are stepped themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from comlrl.update.optimizer import AgentOptimizer

RATE = 2e-5


def optimizer(parameter: torch.nn.Parameter, **more) -> AgentOptimizer:
    return AgentOptimizer([parameter], RATE, max_grad_norm=1e9, **more)


def stepped(parameter: torch.nn.Parameter, times: int, own: AgentOptimizer | None = None):
    own = own or optimizer(parameter)
    for k in range(times):
        parameter.grad = torch.full_like(parameter, 1.0 + k, dtype=torch.float32)
        own.step(0.0)
        own.zero()
    return own


def test_steps_below_a_weight_s_precision_add_up():
    weight = torch.nn.Parameter(torch.full((4,), 0.02).bfloat16())
    # 0.02 lies in [2⁻⁶, 2⁻⁵), where bfloat16 has a number every 2⁻⁶ · 2⁻⁷ = 1.22e-4: it is held as
    # 164 · 2⁻¹³ = 0.0200195, and a step of 2e-5 alone is below half of that distance.
    start = weight.detach().clone()
    own = stepped(weight, 1)
    assert torch.equal(weight, start)
    stepped(weight, 6, own)
    # Gradients 1, then 1 … 6: Adam's steps are a rate each at most, and together some 6.5 of them:
    # 1.3e-4, a number further down.
    assert (start - weight).tolist() == [pytest.approx(2**-13)] * 4


def test_the_master_is_what_float32_alone_would_be():
    start = torch.linspace(-1, 1, 7).bfloat16()
    half, single = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    own, other = stepped(half, 5), stepped(single, 5)
    assert own.stepped[0] is not half and other.stepped[0] is single
    assert torch.equal(own.stepped[0], single)
    assert torch.equal(half, single.bfloat16())


def test_masters_begin_as_the_weights_at_the_first_update():
    weight = torch.nn.Parameter(torch.ones(3).bfloat16())
    own = optimizer(weight)
    with torch.no_grad():
        weight.copy_(torch.full((3,), 0.5))  # as when a run starts from another's weights
    assert sorted(own.state_tensors()) == ["start", "updates"]  # no masters before
    stepped(weight, 1, own)
    assert torch.allclose(own.stepped[0], torch.full((3,), 0.5 - RATE), rtol=0, atol=1e-7)


def test_after_going_back_before_the_first_update_masters_begin_as_the_weights():
    weight = torch.nn.Parameter(torch.ones(3).bfloat16())
    own = optimizer(weight)
    before = copy.deepcopy(own.state_tensors())  # as BestRound keeps a first round's
    stepped(weight, 5, own)
    own.load_tensors(before)
    with torch.no_grad():
        weight.fill_(0.5)
    stepped(weight, 1, own)
    assert torch.allclose(own.stepped[0], torch.full((3,), 0.5 - RATE), rtol=0, atol=1e-7)


def test_a_resumed_one_goes_on_to_the_bit():
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7).bfloat16())
    own = stepped(weight, 3)
    again = torch.nn.Parameter(weight.detach().clone())
    fresh = optimizer(again)
    fresh.load_tensors(copy.deepcopy(own.state_tensors()))
    stepped(weight, 4, own)
    stepped(again, 4, fresh)
    assert torch.equal(own.stepped[0], fresh.stepped[0]) and torch.equal(weight, again)


def test_a_checkpoint_of_float32_weights_goes_on_from_the_weights():
    """Theirs has no masters: they are what the weights then are."""
    single = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    own = stepped(single, 3)
    half = torch.nn.Parameter(torch.zeros(7).bfloat16())
    other = optimizer(half)
    other.load_tensors(own.state_tensors())
    with torch.no_grad():
        half.copy_(single)
    start = half.detach().float()
    stepped(half, 1, other)
    assert torch.allclose(other.stepped[0], start, rtol=0, atol=2 * RATE)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch cannot")
def test_gradients_of_micro_batches_are_summed_in_float32():
    weight = torch.nn.Parameter(torch.ones(1).bfloat16())
    optimizer(weight)
    for gradient in (1.0, 2.0**-9, 2.0**-9):  # in bfloat16 1 + 2⁻⁹ is 1
        (weight * gradient).sum().backward()
    assert weight.grad.item() == 1 + 2.0**-8
