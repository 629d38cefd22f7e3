"""Packed rows whose completions share tokens, and what an agent computes of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.types import Row
from tests.support.tiny_models import EOS, PAD, prompt


def row(start: str, *completions: str, first: int = 0) -> Row:
    count = len(completions)
    ids = tuple(tuple(EOS if c == "." else prompt(c)[0] for c in text) for text in completions)
    weights = tuple(0.5 - at for at in range(count))
    return Row(tuple(prompt(start)), ids, weights, tuple(range(first, first + count)))


# "." ends a completion; one without was cut off, and another one may continue it.
CASES = {
    "copies": [row("p:", "abc.", "abc.", "abc.")],
    "common beginnings": [row("p:", "abc.", "abd.", "axe.", "b.")],
    "one is continued": [row("p:", "ab", "abc.", "abcd", "a")],
    "of one token": [row("p:", "a", ".", "a", "ab."), row("longer:", ".", first=4)],
    "nothing in common": [row("p:", "abc.", "bc.", "c")],
    "like completions of other prompts": [
        row("p:", "abc.", "abc."), row("q:", "abc.", "abd."), row("longer:", "abc.", first=4),
    ],
    "of many lengths": [
        row("p:", "abc.", "a" * 30, "b.", "c.", "d.", "ab"), row("q:", "a" * 29 + "bc", "."),
    ],
}  # fmt: skip


def numbered(rows: list[Row]) -> list[Row]:
    """Each completion with its own number."""
    at, out = 0, []
    for one in rows:
        count = len(one.completions)
        out.append(replace(one, indices=tuple(range(at, at + count))))
        at += count
    return out


def logprobs_and_gradients(agents, rows: list[Row], fast: bool):
    """log π, entropies, and the gradients of their sum, each log π with its own weight."""
    with agents.acting(0) as agent:
        kept, agent.fast = agent.fast, agent.fast if fast else None
        policy = action_logprobs(agent, pack(rows, PAD), 0.7, entropy=True)
        agent.fast = kept
        weight_A = torch.linspace(-1, 2, len(policy.logprob_A)).to(policy.logprob_A)
        (
            (policy.logprob_A * weight_A).sum() + (policy.entropy_A * weight_A.square()).sum()
        ).backward()
        gradients = [p.grad for p in agent.parameters()]
        for parameter in agent.parameters():
            parameter.grad = None
    return policy.logprob_A, policy.entropy_A, torch.cat([g.flatten() for g in gradients])
