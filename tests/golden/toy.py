"""What the golden numbers are numbers of: a small model whose weights are a formula, a tree of two
turns, rewards. Read by the programs that make them, each in another environment, and by the tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 300
PROMPT = [1, 2, 3]
REWARDS = [[1.0, 2.0, 6.0], [0.5, 0.5, 2.0], [3.0, -1.0, 0.25]]  # siblings of three prompts
GREEDY = [2.5, 0.0, 1.0]  # of each prompt
# GAE: two completions of four and of two tokens, rewards at their ends, and values.
LENGTHS = [4, 2]
TOKEN_REWARDS = [[0.1, 0.0, 0.0, 2.0], [0.0, -1.0, 0.0, 0.0]]
VALUES = [[0.5, 0.25, -0.5, 1.0], [0.75, -0.25, 0.0, 0.0]]
GAMMA, LAMBDA = 0.9, 0.8
CANDIDATES = [[1.0, 4.0, 2.5, 4.0], [0.0, 3.0, 1.0, 0.5], [2.0] * 4, [4.0, 4.0, 1.0, 1.0]]
CHAIN = {"rewards": [0.5, 2.0, -1.0], "values": [0.25, 0.75, -0.5], "discount": 0.9}
DELTAS = [[0.5, -0.25], [1.5, 2.0], [-0.75, 0.1]]  # of three pairs, for each of two agents


def completion(node: int, agent: int, g: int) -> list[int]:
    """Tokens: three to five of them, no two alike."""
    return [5 + (31 * node + 17 * agent + 7 * g + 3 * i) % 200 for i in range(3 + (node + g) % 3)]


def prompt(node: int) -> list[int]:
    """Of the root, and of the state after its (node − 1)-th joint action."""
    return PROMPT if node == 0 else [*PROMPT, 10 + node]


def reward(node: int, action: tuple[int, ...]) -> float:
    """Of a joint action there."""
    return round(2 * math.sin(1 + 3 * node + 5 * action[0] + 2 * action[-1]), 3)


def model(number: int) -> Any:
    """A transformers model in float64; another one for each number."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=12, max_position_embeddings=64,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=256, pad_token_id=257,
    )  # fmt: skip
    made = LlamaForCausalLM(config).double()
    start = 0
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                count = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
                parameter.copy_((0.5 * torch.sin(1.7 * count + number)).view_as(parameter))
            start += parameter.numel()
    return made


def projections(gradients: list[torch.Tensor]) -> list[float]:
    """A gradient in six numbers: its products with six fixed directions."""
    flat = torch.cat([gradient.flatten().double() for gradient in gradients])
    count = torch.arange(len(flat), dtype=torch.float64)
    return [float((flat * torch.cos((0.3 + 0.2 * j) * count)).sum()) for j in range(6)]


def gradient(module: Any) -> list[float]:
    """``projections`` of the gradients of all parameters, none of which counts as 0."""
    given = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in module.parameters()]
    return projections(given)
