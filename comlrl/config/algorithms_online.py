"""The sections of the algorithms that learn online from the task's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from comlrl.config.algorithms_common import Advantage, CommonConfig
from comlrl.config.keys import key


@dataclass(frozen=True, kw_only=True)
class MAGRPOConfig(CommonConfig):
    """MAGRPO, arXiv 2508.04652."""

    paper: ClassVar[str] = "MAGRPO (arXiv 2508.04652)"
    no_programs: ClassVar[str] = ""

    advantage: Advantage = key(
        "mean",
        "baseline of a return: the siblings' mean, the others' mean, their maximum, the return "
        "of a greedy rollout, or none",
    )
    advantage_normalization: bool = key(False, "divide by the siblings' standard deviation")
    entropy_coef: float = key(
        0.0,
        "weight of the entropy bonus, summed over a completion's tokens",
        at_least=0,
    )
    update_epochs: int = key(
        1,
        "passes over a step's nodes; 1: each sample is used once, as published",
        at_least=1,
    )
    clip_range: float = key(
        0.2,
        "clipping of the importance ratio around 1, with several passes",
        above=0,
    )

    @property
    def takes_ratios(self) -> bool:
        return self.update_epochs > 1

    @property
    def passes(self) -> int:
        return self.update_epochs

    @property
    def samples_greedily(self) -> bool:
        return self.advantage == "greedy"


@dataclass(frozen=True)
class GRPOConfig(MAGRPOConfig):
    """MAGRPO with one agent that does all the work alone."""

    paper: ClassVar[str] = "GRPO (arXiv 2402.03300), as MAGRPO with one agent"

    num_agents: int = key(1)


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(CommonConfig):
    """Keys that PPO and SHPPO share; ``train_batch_size`` is the size of a minibatch, in nodes."""

    ppo_epochs: int = key(4, "passes over a step's samples", at_least=1)
    clip_range: float = key(0.2, "clipping of the importance ratio around 1", above=0)
    value_clip_range: float | None = key(
        0.2,
        "clipping of a value around its old one; null: none",
        above=0,
    )
    value_learning_rate: float = key(1e-3, "learning rate of the critic", above=0)
    entropy_coef: float = key(0.0, "weight of the entropy bonus", at_least=0)
    gae_lambda: float = key(0.95, "λ of generalized advantage estimation", at_least=0, at_most=1)
    target_kl: float | None = key(
        None,
        "mean KL(old ‖ new) of an epoch that ends the epochs",
        above=0,
    )
    normalize_advantages: bool = key(
        True, "standardize advantages to mean 0 and deviation 1 within a step"
    )

    chains: ClassVar[bool] = True

    @property
    def takes_ratios(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return self.ppo_epochs


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig):
    """Proximal policy optimization; with several agents IPPO or MAPPO."""

    paper: ClassVar[str] = "PPO (arXiv 1707.06347)"
    may_share_policy: ClassVar[bool] = True
    no_programs: ClassVar[str] = ""

    num_agents: int = key(1)
    critic: Literal["independent", "centralized"] = key(
        "independent",
        "V reads the history of its agent, or those of all agents",
    )
    granularity: Literal["token", "turn"] = key("token", "unit of a value and an advantage")
    kl_in: Literal["reward", "loss"] = key(
        "reward", "whether kl_coef applies to the reward or the loss"
    )
    critic_model: str | None = key(
        None,
        "language model that reads histories for V; null: a small head on the policy's own states",
    )
    shared_policy: bool = key(
        False, "all agents act by one adapter, distinguished by their prompts"
    )
    gamma_token: float = key(1.0, "discount between the tokens of a turn", at_least=0, at_most=1)
    kl_target: float | None = key(
        None,
        "mean KL of a token to which kl_coef adapts; null: fixed",
        above=0,
    )
    kl_horizon: int = key(10000, "joint actions over which kl_coef may grow by a fifth", at_least=1)

    @property
    def one_policy(self) -> bool:
        return self.shared_policy

    @property
    def critics(self) -> int:
        """A critic for each policy, or one for the team."""
        return 1 if self.critic == "centralized" else self.policies


@dataclass(frozen=True, kw_only=True)
class SHPPOConfig(ActorCriticConfig):
    """Scalable heterogeneous PPO, arXiv 2404.03869."""

    paper: ClassVar[str] = "SHPPO (arXiv 2404.03869)"

    discount: float = key(0.95)
    gae_lambda: float = key(
        0.9, "λ of generalized advantage estimation, over turns", at_least=0, at_most=1
    )
    latents: Literal["learned", "zero", "sampled"] = key(
        "learned",
        "an agent's latent: computed from its history, always 0, or drawn from N(0, 1)",
    )
    latent_gradient: Literal["inference", "policy"] = key(
        "inference",
        "gradient of the encoder: the inference net's value of μ and σ, as published, or the "
        "policy gradient of the drawn latents, with the turn's advantage",
    )
    latent_dim: int = key(8, "size of an agent's latent", at_least=1)
    latent_hidden: int = key(
        64,
        "width of the encoder's and the inference net's layers",
        at_least=1,
    )
    heterogeneous_rank: int = key(16, "rank of A and B, size of the generated matrix", at_least=1)
    lambda_e: float = key(0.01, "weight of the latents' entropy", at_least=0)
    lambda_d: float = key(0.1, "weight of the distance between agents' latents", at_least=0)
    latent_learning_rate: float = key(1e-3, "learning rate of the encoder", above=0)
    inference_learning_rate: float = key(1e-3, "learning rate of the inference net", above=0)

    heterogeneous: ClassVar[bool] = True
    one_reward: ClassVar[str] = "its critic and inference net value the whole team by one number"
    no_programs: ClassVar[str] = "its latents are of states that all agents reach together"
