"""The sections of the algorithms that learn online from the task's reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from comlrl.config.algorithms_common import Advantage
from comlrl.config.keys import Unused, key
from comlrl.config.resolved import CommonConfig, Config, Networks
from comlrl.config.unused import ALONE

ON_POLICY = Unused(
    "the only update of a step is that of the policy that sampled: its ratio is 1",
    lambda s, _: s.ppo_epochs == 1 and s.train_batch_size is None,
)
ONE_VALUE = Unused(
    "λ is over turns here, and there is one",
    lambda s, c: s.num_turns == 1 and not s.values_tokens and not c.program.replaces_turns,
)
NOT_LEARNED = Unused("these latents are not learned", lambda s, _: s.latents != "learned")


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
    partner_credit: Literal["mean", "optimistic", "lenient"] = key(
        "mean",
        "what a completion is credited with: the mean over the joint actions that contain it, the "
        "best of them and of those with a sibling of the same tokens, or first the best and "
        "linearly more of the mean until the end",
        unused_if=(
            Unused("programs have no joint actions", lambda _, c: c.program.replaces_turns),
        ),
    )
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
        unused_if=(
            Unused(
                "update_epochs=1: each sample is used once, without a ratio",
                lambda s, _: not s.takes_ratios,
            ),
        ),
    )

    refill: int = key(
        0,
        "how often a step samples further tasks in place of those whose siblings all have the "
        "same return; 0: such tasks teach nothing",
        at_least=0,
        unused_if=(
            Unused(
                "this advantage does not compare siblings",
                lambda s, _: s.advantage in ("raw", "greedy"),
            ),
        ),
    )

    def leniency(self, progress: float) -> float:
        return {"mean": 0.0, "optimistic": 1.0, "lenient": 1 - progress}[self.partner_credit]

    @property
    def takes_ratios(self) -> bool:
        return self.update_epochs > 1

    @property
    def passes(self) -> int:
        return self.update_epochs

    @property
    def baseline(self) -> Advantage:
        return self.advantage

    def with_advantage(self, advantage: Advantage | None) -> MAGRPOConfig:
        return self if advantage is None else replace(self, advantage=advantage)

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        wanted = config.section.online_advantage
        if wanted is not None and self.advantage not in (MAGRPOConfig.advantage, wanted):
            yield (
                f"{name}.advantage: '{self.advantage}', and {config.algorithm} learns online with "
                f"'{wanted}'; leave it out"
            )
        if (wanted or self.advantage) == "raw":
            return
        sizes = {"num_generations": self.num_generations}
        if self.turn_order == "sequential":
            sizes["num_generations_sequential"] = self.num_generations_sequential
        for key_name, size in sizes.items():
            if size < 2:
                yield (
                    f"{name}.{key_name}: {size} leaves no siblings to compare with; use at least "
                    "2, or set advantage=raw"
                )


@dataclass(frozen=True)
class GRPOConfig(MAGRPOConfig):
    """MAGRPO with one agent that does all the work alone."""

    paper: ClassVar[str] = "GRPO (arXiv 2402.03300), as MAGRPO with one agent"

    num_agents: int = key(1)

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        if self.num_agents != 1:
            yield (
                f"{name}.num_agents: {self.num_agents}; GRPO trains a single agent: set it to 1, "
                "or train with magrpo"
            )


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(CommonConfig):
    """Keys that PPO and SHPPO share; ``train_batch_size`` is the size of a minibatch, in nodes."""

    ppo_epochs: int = key(4, "passes over a step's samples", at_least=1)
    clip_range: float = key(
        0.2, "clipping of the importance ratio around 1", above=0, unused_if=(ON_POLICY,)
    )
    value_clip_range: float | None = key(
        0.2, "clipping of a value around its old one; null: none", above=0, unused_if=(ON_POLICY,)
    )
    value_learning_rate: float = key(1e-3, "learning rate of the critic", above=0)
    entropy_coef: float = key(0.0, "weight of the entropy bonus", at_least=0)
    gae_lambda: float = key(
        0.95, "λ of generalized advantage estimation", at_least=0, at_most=1, unused_if=(ONE_VALUE,)
    )
    target_kl: float | None = key(
        None,
        "mean KL(old ‖ new) of an epoch that ends the epochs",
        above=0,
        unused_if=(
            Unused("ppo_epochs=1 leaves no epoch to end early", lambda s, _: s.ppo_epochs == 1),
        ),
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

    @property
    def values_tokens(self) -> bool:
        """Return whether the critic has a value for each token, not only for each turn."""
        return False

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        if self.joint_mode != "align":
            yield f"{name}.joint_mode: '{self.joint_mode}'; rollouts are chains: align"
        if self.handoff is not None:
            yield (
                f"{name}.handoff: '{self.handoff}'; rollouts are chains, so that every sample is "
                "followed: set it to null"
            )
        if self.one_policy and isinstance(config.agents, tuple):
            yield (
                f"agents: {list(config.agents)}; these agents share one policy: set "
                "agent_model.name, and agents=null"
            )


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
        "reward",
        "whether kl_coef applies to the reward or the loss",
        unused_if=(Unused("kl_coef=0: no KL is paid", lambda s, _: s.kl_coef == 0),),
    )
    critic_model: str | None = key(
        None,
        "language model that reads histories for V; null: a small head on the policy's own states",
    )
    shared_policy: bool = key(
        False, "all agents act by one adapter, distinguished by their prompts", unused_if=(ALONE,)
    )
    gamma_token: float = key(
        1.0,
        "discount between the tokens of a turn",
        at_least=0,
        at_most=1,
        unused_if=(Unused("values are of turns here", lambda s, _: s.granularity == "turn"),),
    )
    kl_target: float | None = key(
        None,
        "mean KL of a token to which kl_coef adapts; null: fixed",
        above=0,
    )
    kl_horizon: int = key(
        10000,
        "joint actions over which kl_coef may grow by a fifth",
        at_least=1,
        unused_if=(Unused("kl_coef is fixed without kl_target", lambda s, _: s.kl_target is None),),
    )

    @property
    def one_policy(self) -> bool:
        return self.shared_policy

    @property
    def critics(self) -> int:
        """Return the number of critics: one for each policy, or one for the team."""
        return 1 if self.critic == "centralized" else self.policies

    @property
    def values_tokens(self) -> bool:
        return self.granularity == "token"

    @property
    def other_models(self) -> Mapping[str, str]:
        return {} if self.critic_model is None else {"critic_model": self.critic_model}

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        if self.critic == "centralized" and self.granularity == "token":
            yield (
                f"{name}.granularity: token with {name}.critic=centralized; what all agents see "
                f"changes from turn to turn, not within one: set {name}.granularity=turn"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            yield (
                f"{name}.kl_target: {self.kl_target} adapts kl_coef by factors, and 0 stays 0; set "
                f"{name}.kl_coef above 0"
            )
        if self.critic_model is not None and config.distributed.strategy == "fsdp":
            yield (
                f"{name}.critic_model: '{self.critic_model}' with distributed.strategy=fsdp, which "
                "would hold it whole in every process; set distributed.strategy=replicate"
            )
        if self.shared_policy and name != config.algorithm:
            yield (
                f"{name}.shared_policy: true with {config.algorithm}, whose candidates come from "
                "separate policies; set it to false"
            )


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
        unused_if=(NOT_LEARNED,),
    )
    latent_dim: int = key(8, "size of an agent's latent", at_least=1)
    latent_hidden: int = key(
        64,
        "width of the encoder's and the inference net's layers",
        at_least=1,
        unused_if=(NOT_LEARNED,),
    )
    heterogeneous_rank: int = key(16, "rank of A and B, size of the generated matrix", at_least=1)
    lambda_e: float = key(
        0.01, "weight of the latents' entropy", at_least=0, unused_if=(NOT_LEARNED,)
    )
    lambda_d: float = key(
        0.1,
        "weight of the distance between agents' latents",
        at_least=0,
        unused_if=(
            ALONE,
            NOT_LEARNED,
        ),
    )
    latent_learning_rate: float = key(
        1e-3, "learning rate of the encoder", above=0, unused_if=(NOT_LEARNED,)
    )
    inference_learning_rate: float = key(
        1e-3,
        "learning rate of the inference net",
        above=0,
        unused_if=(
            NOT_LEARNED,
            Unused(
                "latent_gradient=policy has no inference net",
                lambda s, _: s.latent_gradient == "policy",
            ),
        ),
    )

    heterogeneous: ClassVar[bool] = True
    one_reward: ClassVar[str] = "its critic and inference net value the whole team by one number"
    no_programs: ClassVar[str] = "its latents are of states that all agents reach together"

    @property
    def networks(self) -> Networks:
        return Networks(self.latent_dim, self.latent_hidden, self.heterogeneous_rank, self.latents)
