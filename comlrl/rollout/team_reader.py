"""Encoding of prompts, for every sampler of a team."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.models.team import Team
from comlrl.types import Message, Sampling


class TeamReader:
    """Encoder of prompts by the tokenizers of the agents' models."""

    def __init__(self, team: Team, max_length: int) -> None:
        """Initialize. ``max_length``: tokens of prompt and completion together."""
        self.team, self.max_length = team, max_length

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.team.actor(agent).encode(prompt))

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return len(prompt_ids) + sampling.max_new_tokens <= self.max_length

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        """Return each token's text, special tokens included."""
        tokenizer = self.team.actor(agent).tokenizer
        return [tokenizer.decode([token]) for token in token_ids]
