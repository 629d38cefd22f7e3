"""The cost of answers, to compare quality at equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from comlrl.models.team import Team
from comlrl.types import RolloutResult


def weights_of(team: Team, agent: int) -> int:
    """Count the weights that each token of an agent is multiplied with: those of the model and its
    adapter, without embeddings unless they are tied to the head."""
    member = team.actor(agent)
    model: Any = member.model
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up.discard(id(model.get_output_embeddings().weight))
    count = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "lora_" not in name and id(p) not in looked_up
    )
    return count + (0 if member.peft is None else sum(p.numel() for p in member.named().values()))


def cost(trees: Sequence[RolloutResult], weights_N: Sequence[int]) -> dict[str, float]:
    """Count model calls (completed prompts), prompt and sampled tokens, and floating-point
    operations: 2 per weight and token (Kaplan et al. 2020, without attention over the context).
    Silent agents make no calls. ``weights_N``: ``weights_of`` each agent."""
    calls = read = written = flops = 0
    for _, agent, turn in (answer for tree in trees for answer in tree.answered()):
        prompt = len(turn.prompt_ids)
        if tokens := sum(len(c.token_ids) for c in turn.completions_G):
            calls, read, written = calls + 1, read + prompt, written + tokens
            flops += 2 * weights_N[agent] * (prompt + tokens)
    return {
        "model_calls": calls,
        "prompt_tokens": read,
        "tokens_generated": written,
        "flops": flops,
        "tokens_per_answer": written / len(trees),
        "flops_per_answer": flops / len(trees),
    }
