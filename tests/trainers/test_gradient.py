"""MAGRPO's batched, packed update against its definition: one completion at a time, in float64.

The plain side knows nothing of packing, of the trainer or of PEFT's switching: it walks a tree by
recursion, runs one unpadded sequence through the model at a time and calls backward on each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.models.fast.decoder import FastDecoder
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.models.team import Team
from comlrl.rollout.generation import Generator
from comlrl.rollout.grow import Rollout
from comlrl.types import Row, Sampling, Tree
from comlrl.update import accumulate
from comlrl.update.minibatches import like_parts
from tests.support.fakes import PROMPTS, SEED, FakeReward, FakeTransition, task
from tests.support.gradients import SAMPLING, fast, flat, shift
from tests.support.marks import some_slow
from tests.support.plain import relative, truncated
from tests.support.tiny_models import PAD, STOPS, config, folder, prompt, team

TRUNCATED = Sampling(0.8, 16, top_p=0.9, top_k=40, max_support=300)
DISCOUNT = 0.9


class RealReward(FakeReward):
    """Any number that two completions do not share."""

    def one(self, action):
        return (
            sum(i * sum(map(ord, text)) for i, text in enumerate(action.completions_N, 1))
            % 997
            / 250
        )


def grown(
    agents: Team, section: MAGRPOConfig, names: str = "AB", sampling: Sampling = SAMPLING
) -> list[Tree]:
    rollout = Rollout(
        Generator(agents), RealReward(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=SEED
    )
    return rollout.grow([task(name) for name in names], section.shape, sampling, ("train", 1))


def joint_return(tree: Tree, index: int, k: int) -> float:
    """R_k(t) = r_k + γ · mean over the joint returns of k's child; in a turn without γ and r_k."""
    node, children = tree.nodes[index], tree.children(index)
    child = children.get(k) if tree.handoff is None else next(iter(children.values()), None)
    if child is None:
        return node.rewards_K[k]
    count = len(tree.nodes[child].joint_actions_K)
    future = sum(joint_return(tree, child, j) for j in range(count)) / count
    if tree.nodes[child].turn == node.turn:
        return future
    return node.rewards_K[k] + DISCOUNT * future


def by_completion(
    agents: Team, trees: Sequence[Tree], index: int, of: Callable[..., torch.Tensor]
) -> dict[tuple, torch.Tensor]:
    """``of`` (agent, prompt, completion) for all that an agent has sampled, by tree, node and
    generation."""
    with torch.no_grad(), agents.acting(index) as agent:
        return {
            (b, s, g): of(agent, node.agents_N[index].prompt_ids, completion.token_ids)
            for b, tree in enumerate(trees)
            for s, node in enumerate(tree.nodes)
            for g, completion in enumerate(node.agents_N[index].completions_G)
        }


def plain(
    agents: Team,
    section: MAGRPOConfig,
    trees: Sequence[Tree],
    index: int,
    old: Mapping[tuple, torch.Tensor] | None = None,
    part: range | None = None,
    left: Mapping[tuple, torch.Tensor] = {},
) -> torch.Tensor:
    """The gradient of L_i = −(1/|nodes|) Σ w_t (1/G) Σ_g Â_ig Σ log π + β k3 − c H, term by term;
    with ``old``, of Σ min(ρ Â, clip(ρ, 1 ± ε) Â) in place of Â Σ log π. Nodes are those at which
    agent i acts. ``part``: of these nodes. ``left``: what truncation left to choose from."""
    every = [node for tree in trees for node in tree.nodes]
    part = part or range(len(every))
    nodes, number = sum(index in every[n].acting for n in part), -1
    weights = section.turn_gradient_weights or [1.0] * section.num_turns
    with agents.acting(index) as agent:
        for parameter in agent.parameters():
            parameter.grad = None
        for b, tree in enumerate(trees):
            for at, node in enumerate(tree.nodes):
                number += 1
                if number not in part or index not in node.acting:
                    continue
                own_place = node.acting.index(index)
                turn = node.agents_N[own_place]
                count = len(turn.completions_G)
                returns = []
                for g in range(count):
                    own = [k for k, a in enumerate(node.joint_actions_K) if a[own_place] == g]
                    returns.append(sum(joint_return(tree, at, k) for k in own) / len(own))
                for g, completion in enumerate(turn.completions_G):
                    advantage = returns[g] - sum(returns) / count
                    scale = weights[node.turn - 1] / (count * nodes)
                    spoken = turn.prompt_ids, completion.token_ids, left.get((b, at, g))
                    logprobs = _logprobs(agent, *spoken)
                    gain = advantage * logprobs
                    if old is not None:
                        ratio, most = (logprobs - old[b, at, g]).exp(), section.clip_range
                        near = ratio.clip(1 - most, 1 + most)
                        gain = torch.minimum(advantage * ratio, advantage * near)
                    loss = -scale * gain.sum()
                    if section.kl_coef:
                        with torch.no_grad(), agent.peft.disable_adapter():
                            before = _logprobs(agent, *spoken)
                        agents._train_all_adapters(agent.peft)
                        ratio = before - logprobs
                        k3 = (ratio.exp() - ratio - 1).sum()
                        loss = loss + section.kl_coef * k3 / (count * nodes)
                    if section.entropy_coef:
                        entropy = _entropies(agent, *spoken).sum()
                        loss = loss - section.entropy_coef * entropy / (count * nodes)
                    loss.backward()
        return flat(agent)


def _logits(agent, prompt_ids, ids) -> torch.Tensor:
    logits = agent.model(torch.tensor([[*prompt_ids, *ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1] / SAMPLING.temperature


def _logprobs(agent, prompt_ids, ids, left_LV: torch.Tensor | None = None) -> torch.Tensor:
    logits = _logits(agent, prompt_ids, ids)
    if left_LV is not None:
        logits = logits.masked_fill(~left_LV, -torch.inf)
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def _entropies(agent, prompt_ids, ids, left_LV: torch.Tensor | None = None) -> torch.Tensor:
    """Of the distribution that each token was drawn from."""
    found = []
    for at, logits in enumerate(_logits(agent, prompt_ids, ids)):
        logprobs = (logits if left_LV is None else logits[left_LV[at]]).log_softmax(-1)
        found.append(-(logprobs.exp() * logprobs).sum())
    return torch.stack(found)


def _left(agent, prompt_ids, ids) -> torch.Tensor:
    """What truncation leaves at each position, bool (L, vocabulary)."""
    probabilities = _logits(agent, prompt_ids, ids).softmax(-1).numpy()
    return torch.tensor(np.stack([truncated(p, TRUNCATED) for p in probabilities])) > 0


CASES = {
    "align": {"num_turns": 2},
    "cross": {"joint_mode": "cross", "num_generations": 2},
    "handoff": {"num_turns": 3, "handoff": "random"},
    "weighted turns": {"num_turns": 2, "turn_gradient_weights": [1.2, 0.8]},
    "early end": {"num_turns": 2, "early_termination_threshold": 1.7},
    "divergence": {"num_turns": 2, "kl_coef": 0.3},
    "three agents": {"num_agents": 3},
    "entropy": {"num_turns": 2, "entropy_coef": 0.1},
    "entropy, in order": {"turn_order": "sequential", "entropy_coef": 0.1, "kl_coef": 0.3},
    "entropy, a window": {"kind": "mistral", "entropy_coef": 0.1},
    "entropy, all weights": {"lora__enabled": False, "entropy_coef": 0.1},
    "in order": {"turn_order": "sequential", "num_turns": 2, "kl_coef": 0.3},
    "three in order": {"turn_order": "sequential", "num_agents": 3, "num_generations": 2},
    "one agent": {"num_agents": 1, "algorithm": "grpo", "num_turns": 2},
    "all weights": {"lora__enabled": False},
    "gpt2": {"kind": "gpt2", "num_turns": 2},
    "qwen3": {"kind": "qwen3", "num_turns": 2, "lora__r": 8},
    "qwen3, all weights": {"kind": "qwen3", "lora__enabled": False},
    "a window": {"kind": "mistral", "num_turns": 2},  # rows that cannot be packed
    "checkpointing": {"agent_model__gradient_checkpointing": True},
    "modules": {"decoder": False, "num_turns": 2},  # transformers' own way through the model
    "rounded": {"step": 64, "num_turns": 2},  # shapes rounded up, as on a CPU in bfloat16
    "truncated": {"top_p": 0.9, "num_turns": 2, "kl_coef": 0.3},  # the reference over these too
    "truncated, entropy": {"top_p": 0.9, "entropy_coef": 0.1},
    "truncated, a window": {"top_p": 0.9, "kind": "mistral"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", some_slow(CASES, "in order", "entropy", "entropy, a window"))
def test_the_batched_gradient_is_the_sum_of_single_losses(case, monkeypatch):
    keys = dict(CASES[case])
    kind, decoder, step = keys.pop("kind", "qwen2"), keys.pop("decoder", True), keys.pop("step", 1)
    monkeypatch.setattr(
        "comlrl.models.fast.decoder.shape_step", lambda device, dtype, weights: step
    )
    agents = team(kind, discount=DISCOUNT, **keys)
    for agent in agents.agents:
        assert (agent.fast is not None) == kind.startswith("qwen")
        agent.fast = agent.fast if decoder else None
    section = config(discount=DISCOUNT, **keys).section
    sampling = TRUNCATED if "truncated" in case else SAMPLING
    trees = grown(agents, section, sampling=sampling)
    if case == "early end":
        assert len({len(tree.nodes) for tree in trees}) > 1  # some trees ended, some went on
    ends = [c.finished for t in trees for n in t.nodes for a in n.agents_N for c in a.completions_G]
    assert any(ends) and not all(ends)  # completions that stopped, and some that were cut
    expected = []
    for index in range(len(agents)):
        left = by_completion(agents, trees, index, _left) if "truncated" in case else {}
        expected.append(plain(agents, section, trees, index, left=left))
    for limit, threads in ((100_000, 1), (150, 1), (150, 3)):  # one micro-batch, and many
        monkeypatch.setitem(accumulate.MICRO_BATCH_TOKENS, "cpu", limit)
        monkeypatch.setattr(accumulate, "worker_threads", lambda device, threads=threads: threads)
        for (gradient,), one_by_one in zip(
            fast(agents, section, trees, sampling=sampling), expected, strict=True
        ):
            assert relative(gradient, one_by_one) < 1e-9


REUSE = {
    "turns": {"num_turns": 2},
    "parts": {"num_turns": 2, "train_batch_size": 3},
    "cross": {"joint_mode": "cross", "num_generations": 2},
    "divergence": {"num_turns": 2, "kl_coef": 0.3, "turn_gradient_weights": [1.2, 0.8]},
    "three agents": {"num_agents": 3},
    "one agent": {"num_agents": 1, "algorithm": "grpo", "num_turns": 2},
    "all weights": {"lora__enabled": False},
    "entropy": {"num_turns": 2, "entropy_coef": 0.1, "train_batch_size": 3},
    "a window": {"kind": "mistral", "num_turns": 2},
    "truncated": {"top_p": 0.9, "num_turns": 2, "kl_coef": 0.3, "train_batch_size": 3},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", some_slow(REUSE, "parts", "entropy", "a window", "turns"))
def test_later_passes_follow_the_clipped_ratio(case, monkeypatch):
    """Three passes, each from where the one before has led, against the loss written out."""
    keys = dict(REUSE[case]) | {"update_epochs": 3}
    agents, moved = team(keys.pop("kind", "qwen2"), discount=DISCOUNT, **keys), 0.3
    section = config(discount=DISCOUNT, **keys).section
    sampling = TRUNCATED if case == "truncated" else SAMPLING
    trees = grown(agents, section, sampling=sampling)
    total = sum(len(tree.nodes) for tree in trees)
    parts = like_parts(total, section.train_batch_size) * 3
    left: list[dict] = [{} for _ in agents.agents]
    if case == "truncated":  # sets are those of the policy that sampled, wherever it moves
        left = [by_completion(agents, trees, index, _left) for index in range(len(agents))]

    def logprobs_of(index: int) -> dict[tuple, torch.Tensor]:
        sets = iter(left[index].values())
        return by_completion(
            agents, trees, index, lambda *spoken: _logprobs(*spoken, next(sets, None))
        )

    old = [logprobs_of(index) for index in range(len(agents))]
    monkeypatch.setitem(accumulate.MICRO_BATCH_TOKENS, "cpu", 150)
    monkeypatch.setattr(accumulate, "worker_threads", lambda device: 2)
    for index, gradients in enumerate(fast(agents, section, trees, moved, sampling)):
        assert len(gradients) == len(parts)
        agent, ratios = agents.agents[index], []
        for gradient in reversed(gradients):  # back to the weights that sampled
            shift(agent, moved * gradient / gradient.norm())
        for part, gradient in zip(parts, gradients, strict=True):
            expected = plain(agents, section, trees, index, old[index], part, left[index])
            assert relative(gradient, expected) < 1e-9
            shift(agent, -moved * gradient / gradient.norm())
            now = logprobs_of(index)
            ratios += [(now[at] - old[index][at]).exp() for at in now]
        clipped = ((torch.cat(ratios) - 1).abs() > section.clip_range).double().mean()
        assert 0.05 < clipped < 0.95  # some are cut off, and some are not


@pytest.mark.parametrize("decoder", [True, False], ids=["fast", "modules"])
def test_checkpointing_recomputes_each_layer_in_the_update_and_nowhere_else(decoder, monkeypatch):
    counted, layer_of = 0, FastDecoder.layer

    def count(*arguments, **keywords):
        nonlocal counted
        counted += 1
        return layer_of(*arguments, **keywords) if decoder else None

    monkeypatch.setattr(FastDecoder, "layer", count)
    calls = {}
    for on in (False, True):
        agents = team(agent_model__gradient_checkpointing=on)
        section = config(discount=DISCOUNT).section
        for agent in agents.agents if not decoder else ():
            agent.fast = None
        trees = grown(agents, section)
        counted = 0
        for layer in agents.agents[0].model.get_decoder().layers if not decoder else ():
            layer.mlp.register_forward_pre_hook(lambda *_: count())
        fast(agents, section, trees)
        calls[on] = counted
        counted = 0
        assert grown(agents, section) == trees
        calls[on, "sampling"] = counted
    assert calls[True] == 2 * calls[False]  # forward, and again on the way back
    assert calls[True, "sampling"] == calls[False, "sampling"]


@pytest.mark.parametrize("keys", [{"kind": "mistral"}, {"kind": "qwen2", "lora__dropout": 1e-9}])
@pytest.mark.parametrize("index", [0, 1])
def test_recomputation_in_another_thread_has_the_adapter_of_the_forward_pass(keys, index):
    """On a GPU, autograd recomputes in its own thread, where no adapter was chosen."""
    row = Row(prompt("hello there"), (prompt("abc def"),), (1.0,), (0,))
    gradients = []
    for on in (False, True):
        agents = team(**keys, agent_model__gradient_checkpointing=on)
        with agents.acting(index) as agent, agent.learning():
            loss = -action_logprobs(agent, pack([row], PAD), 1.0).logprob_A.sum()
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
            gradients.append(torch.cat([p.grad.flatten() for p in agent.parameters()]))
    assert gradients[0].norm() > 0 and torch.equal(*gradients)


@pytest.mark.parametrize("keys", [{}, {"kind": "gpt2"}, {"agents": True}], ids=str)
def test_dropout_is_on_in_the_update_alone(keys):
    keys = dict(keys)
    kind = keys.pop("kind", "qwen2")
    if keys:
        keys = {"agents": [str(folder(kind))] * 2}
    without, with_dropout = team(kind, **keys), team(kind, lora__dropout=0.5, **keys)
    section = config(discount=DISCOUNT).section
    trees = grown(without, section)
    assert grown(with_dropout, section) == trees
    gradients = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        gradients.append(fast(with_dropout, section, trees)[0][0])
    assert torch.equal(gradients[0], gradients[1])
    assert relative(gradients[0], gradients[2]) > 0.01
    assert grown(with_dropout, section) == trees


def test_several_updates_from_one_sampling_split_the_nodes():
    agents = team()
    section = config(num_turns=2, train_batch_size=3, discount=DISCOUNT).section
    trees = grown(agents, section)
    nodes = [node for tree in trees for node in tree.nodes]
    assert len(nodes) == 2 * (1 + 3)  # 3 + 3 + 2
    steps = fast(agents, section, trees)
    whole = fast(agents, replace(section, train_batch_size=None), trees)
    for agent, (total,) in zip(steps, whole, strict=True):
        assert len(agent) == 3
        # Each update is the mean over its own nodes: 3, 3 and 2 of 8.
        again = (3 * agent[0] + 3 * agent[1] + 2 * agent[2]) / 8
        assert relative(again, total) < 1e-9


def test_several_updates_keep_a_sequential_turn_together():
    """5 turns, 1 + 4 of a task, at 2: updates of 2, 2 and 1, each over its own nodes."""
    agents = team(num_generations=2)
    keys = {"num_turns": 2, "num_generations": 2, "turn_order": "sequential"}
    section = config(**keys, train_batch_size=2, discount=DISCOUNT).section
    trees = grown(agents, section, "A")
    assert [sum(i in n.acting for n in trees[0].nodes) for i in range(2)] == [1 + 4, 2 + 8]
    whole = fast(agents, replace(section, train_batch_size=None), trees)
    for agent, (total,) in zip(fast(agents, section, trees), whole, strict=True):
        assert len(agent) == 3
        assert relative((2 * agent[0] + 2 * agent[1] + agent[2]) / 5, total) < 1e-9


def test_parts_of_an_update_are_of_like_size():
    """A tree of 1 + 4 nodes at 4: updates of 3 and 2 nodes, never 4 and 1."""
    agents = team(num_generations=4)
    section = config(num_turns=2, num_generations=4, train_batch_size=4, discount=DISCOUNT).section
    trees = grown(agents, section, "A")
    assert len(trees[0].nodes) == 5
    whole = fast(agents, replace(section, train_batch_size=None), trees)
    for agent, (total,) in zip(fast(agents, section, trees), whole, strict=True):
        assert len(agent) == 2
        assert relative((3 * agent[0] + 2 * agent[1]) / 5, total) < 1e-9


def test_the_end_of_sequence_and_the_last_token_have_a_gradient_of_their_own():
    agents = team()
    section = config(discount=DISCOUNT).section
    trees = grown(agents, section, "A")
    (gradient,), _ = fast(agents, section, trees)
    node = trees[0].nodes[0]
    for g, completion in enumerate(node.agents_N[0].completions_G):
        last = completion.token_ids[-1]
        assert completion.finished == (last in STOPS)
        shorter = replace(completion, token_ids=completion.token_ids[:-1])
        if not shorter.token_ids:
            continue
        cut = list(node.agents_N[0].completions_G)
        cut[g] = shorter
        cut_turn = replace(node.agents_N[0], completions_G=tuple(cut))
        changed = replace(trees[0], nodes=(replace(node, agents_N=(cut_turn, *node.agents_N[1:])),))
        (without,), _ = fast(agents, section, [changed])
        assert relative(without, gradient) > 1e-3  # the token made a difference
        assert relative(without, plain(agents, section, [changed], 0)) < 1e-9


def test_padding_has_no_gradient():
    agents = team(lora__enabled=False)
    section = config(lora__enabled=False, discount=DISCOUNT).section
    trees = grown(agents, section)
    for agent in agents.agents:  # input embeddings, not tied to the head
        assert agent.model.get_input_embeddings() is not agent.model.get_output_embeddings()
    for agent, (gradient,) in zip(agents.agents, fast(agents, section, trees), strict=True):
        at = 0
        for name, parameter in agent.model.named_parameters():
            part = gradient[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
            if "embed_tokens" in name:
                turns = [n.agents_N[agent.index] for tree in trees for n in tree.nodes]
                seen = {token for turn in turns for token in turn.prompt_ids}
                seen |= {t for turn in turns for c in turn.completions_G for t in c.token_ids}
                assert PAD not in seen
                assert part[PAD].abs().max() == 0
                assert int((part.abs().amax(1) > 0).sum()) <= len(seen)


def test_each_agent_learns_at_the_temperature_and_over_the_sets_that_it_sampled_by():
    """As where all agents sample as it does: the same completions, gradients agent by agent."""
    own_N = (SAMPLING, replace(TRUNCATED, temperature=1.3))
    agents = team()
    section = config(discount=DISCOUNT, kl_coef=0.1, entropy_coef=0.1).section
    apart = replace(SAMPLING, by_agent=own_N)
    trees = grown(agents, section, sampling=apart)
    turns_N = zip(*((turn for turn in tree.nodes[0].agents_N) for tree in trees), strict=True)
    for turns, own in zip(turns_N, own_N, strict=True):
        for completion in (c for turn in turns for c in turn.completions_G):
            assert (completion.support is not None) == own.truncates
    found = fast(agents, section, trees, sampling=apart)
    for index, own in enumerate(own_N):
        alone = fast(agents, section, trees, sampling=own)
        assert torch.equal(found[index][0], alone[index][0])
        assert relative(found[1 - index][0], alone[1 - index][0]) > 0.01
