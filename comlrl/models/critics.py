"""Critics: small heads on the policies' states, and separate language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from comlrl.models.agent import Agent
from comlrl.models.logprobs import action_states
from comlrl.models.rows import pack, row_groups
from comlrl.processes.distributed import all_gather
from comlrl.types import Row, TokenBatch

HIDDEN = 128  # width of a critic's hidden layer
OBSERVED_TOKENS = 4096  # padded tokens per forward pass over prompts
DECAY = 0.97  # per step, of the weight of earlier steps in ``RunningMoments``
LEAST_DEVIATION = 0.01
MOST_DEVIATIONS = 5.0


class TokenCritic(nn.Module):
    """Value head: predicts V from the hidden state at which a token is chosen.

    The hidden state is detached, so value errors train the head and not the policy.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width, elementwise_affine=False),
            nn.Linear(width, HIDDEN),
            nn.Tanh(),
            zero(nn.Linear(HIDDEN, 1)),
        )

    def forward(self, hidden_AD: torch.Tensor) -> torch.Tensor:
        """Return values: (A, width) → (A,)."""
        return self.layers(hidden_AD.detach().float())[:, 0]


class RunningMoments(nn.Module):
    """Exponentially weighted means and standard deviations of W features over training steps."""

    weight: torch.Tensor
    sums: torch.Tensor  # of x and of x², (2, W)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(2, width, dtype=torch.float64))

    @torch.no_grad()
    def add(self, values_XW: torch.Tensor) -> None:
        """Update with a step's values, (X, W), of all processes. A collective call."""
        values = values_XW.double()
        local = torch.stack([values.sum(0), values.square().sum(0)]).cpu()
        counts, sums = zip(*all_gather((len(values), local)), strict=True)
        if count := sum(counts):
            mean = torch.stack(sums).sum(0).to(self.sums.device) / count
            self.weight.mul_(DECAY).add_(1 - DECAY)
            self.sums.mul_(DECAY).add_(mean, alpha=1 - DECAY)

    @property
    def mean(self) -> torch.Tensor:
        """Return the means, (W,); 0 before the first step."""
        return self.sums[0] / self.weight.clamp(min=1e-300)

    @property
    def deviation(self) -> torch.Tensor:
        """Return the standard deviations, (W,); 1 before the first step."""
        square = self.sums[1] / self.weight.clamp(min=1e-300)
        variance = (square - self.mean.square()).clamp(min=0) + LEAST_DEVIATION**2
        return torch.where(self.weight > 0, variance.sqrt(), 1.0)


class TeamCritic(nn.Module):
    """V(s) from the prompts of all agents (centralized) or of one (independent).

    V(s) = μ + σ ρ(mean_i φ(z(LN(o_i)))),   o_i = masked mean of hidden states over agent i's prompt

    z standardizes each feature with running moments (recommended in arXiv 2006.05990); μ and σ are
    the running moments of the returns (arXiv 2103.01955). Means over prompts of one template
    differ by only a few percent, so that without z, V hardly distinguishes problems.
    """

    def __init__(self, width: int, hidden: int = HIDDEN, heads: int = 1) -> None:
        """Initialize the critic. ``heads``: values per state, one per agent; 1: a shared value."""
        super().__init__()
        self.observed, self.returns = RunningMoments(width), RunningMoments(1)
        self.each = nn.Sequential(nn.Linear(width, hidden), nn.Tanh())
        self.together = nn.Sequential(
            nn.Linear(hidden, hidden), nn.Tanh(), zero(nn.Linear(hidden, heads))
        )
        self.heads = heads

    def observe(self, observation_PD: torch.Tensor) -> None:
        """Update the feature moments, before a step's values are computed. A collective call."""
        self.observed.add(F.layer_norm(observation_PD, observation_PD.shape[-1:]))

    def forward(
        self,
        observation_SND: torch.Tensor,
        agent_S: torch.Tensor | None = None,
        count_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return values: (S, N, width) → (S,).

        ``agent_S``: the agent whose head is used, if there are several. ``count_S``: number of
        observations to use, from the first; None: all N.
        """
        normed_SND = F.layer_norm(observation_SND, observation_SND.shape[-1:])
        standard_SND = (normed_SND - self.observed.mean) / self.observed.deviation
        standard_SND = standard_SND.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS).to(observation_SND)
        each_SNH = self.each(standard_SND)
        if count_S is None:
            mean_SH = each_SNH.mean(1)
        else:
            place_N = torch.arange(each_SNH.shape[1], device=each_SNH.device)
            inside_SN = (place_N < count_S[:, None]).to(each_SNH)
            mean_SH = (each_SNH * inside_SN[..., None]).sum(1) / count_S[:, None]
        value_SH = self.together(mean_SH)
        value_SH = value_SH * self.returns.deviation.to(value_SH) + self.returns.mean.to(value_SH)
        return value_SH[:, 0] if self.heads == 1 else _select_head(value_SH, agent_S)


class LanguageCritic:
    """A language model with a value head on its hidden states.

    It trains the agent's parameters (LoRA, or all weights) and the head.
    """

    def __init__(self, agent: Agent, heads: int = 1) -> None:
        """Initialize the critic.

        ``agent``: one of a team of critics. ``heads``: agents with separate values; 1: all share
        one.
        """
        self.agent, self.heads = agent, heads
        self.head = zero(nn.Linear(hidden_width(agent), heads)).to(agent.device)

    def __call__(self, batch: TokenBatch, agent_A: torch.Tensor) -> torch.Tensor:
        """Return V at each action of the batch, (A,). ``agent_A``: the agent that chooses it."""
        hidden_AD, _ = action_states(self.agent, batch)
        value_AH = self.head(hidden_AD.float())
        return value_AH[:, 0] if self.heads == 1 else _select_head(value_AH, agent_A)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.agent.parameters(), *self.head.parameters()]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        head = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        return self.agent.state_tensors() | head

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        agent_names = self.agent.state_tensors()
        self.agent.load_tensors({name: tensors[name] for name in agent_names})
        self.head.load_state_dict({n: tensors[f"head.{n}"] for n in self.head.state_dict()})


def _select_head(value_XH: torch.Tensor, head_X: torch.Tensor | None) -> torch.Tensor:
    """Select one head per row: (X, heads), (X,) → (X,)."""
    assert head_X is not None, "values of agents are asked for by agent"
    return value_XH.gather(1, head_X.to(value_XH.device)[:, None])[:, 0]


def zero(layer: nn.Linear) -> nn.Linear:
    """Zero-initialize a layer, so that the first advantages are rewards and not noise."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def hidden_width(agent: Agent) -> int:
    """Return the width of the hidden states before the language-model head."""
    return int(agent.model.get_output_embeddings().weight.shape[1])


@torch.no_grad()
def observations(agent: Agent, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the masked mean of the policy's last hidden states over each prompt.

    The result is float32 (P, width). Equal prompts are computed once.
    """
    number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    rows = [Row(prompt, (), (), (number,)) for prompt, number in number_of.items()]
    means: dict[int, torch.Tensor] = {}
    for group in row_groups(rows, OBSERVED_TOKENS):
        hidden_RLD, mask_RL = _hidden(agent, pack(group, agent.tokenizer.pad_token_id))
        total_RD = (hidden_RLD.float() * mask_RL[..., None]).sum(1)
        mean_RD = total_RD / mask_RL.sum(1, keepdim=True)
        means.update((row.indices[0], mean) for row, mean in zip(group, mean_RD, strict=True))
    if not prompts:  # a process whose shard is empty
        return torch.zeros(0, hidden_width(agent), device=agent.device)
    return torch.stack([means[number_of[prompt]] for prompt in prompts])


def _hidden(agent: Agent, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states of prompts, (R, L, width), and the padding mask, (R, L)."""
    real_RL = (batch.segment_RL >= 0).to(agent.device)
    if agent.fast is None:
        return agent.hidden(
            input_ids=batch.token_ids_RL.to(agent.device),
            attention_mask=real_RL.long(),
            position_ids=batch.positions_RL.to(agent.device),
            use_cache=False,
        ), real_RL
    packed = agent.fast.pack(batch)
    flat_TD = agent.fast.packed(packed)
    return flat_TD[packed.token_RL.to(agent.device)], real_RL
