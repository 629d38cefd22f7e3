"""The six algorithm sections as frozen dataclasses, and the relations between their keys.

No torch here, so that a mistake is answered before anything heavy loads. Symbols and equations
are in the docstrings of the trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from comlrl.config.keys import key
from comlrl.types import JointMode, Shape

Advantage = Literal["mean", "rloo", "max", "greedy", "raw"]


@dataclass(frozen=True)
class CommonConfig:
    """Keys that every algorithm section has."""

    num_agents: int = key(2, "number of agents, in the order of the domain's roles", at_least=1)
    num_turns: int = key(1, "attempts, with feedback between them", at_least=1)
    num_generations: int = key(4, "G: completions of each agent at a node", at_least=1)
    joint_mode: JointMode = key(
        "align",
        "joint actions: the g-th completions of all agents, every combination, or the first with"
        " every replacement of one agent's completion by a sibling",
    )
    handoff: Literal["random", "best"] | None = key(
        None, "which joint action is continued; null: every one"
    )
    handoff_width: int = key(1, "joint actions of a turn that are continued", at_least=1)
    turn_order: Literal["simultaneous", "sequential"] = key(
        "simultaneous",
        "agents act at once, or one after the other and read the texts before theirs",
    )
    num_generations_sequential: int = key(
        2,
        "completions of every agent but the first, for each text that it reads",
        at_least=1,
    )
    discount: float = key(0.9, "between turns", at_least=0, at_most=1)
    turn_gradient_weights: list[float] | None = key(None, "weight of each turn; null: 1")
    early_termination_threshold: float | None = key(
        None, "processed reward above which a branch ends; null: none"
    )
    num_train_epochs: int | None = key(
        1,
        "passes over the training tasks; null: no limit",
        at_least=0,
    )
    max_steps: int | None = key(None, "maximum training steps; null: no limit", at_least=0)
    max_env_steps: int | None = key(
        None, "maximum scored joint actions; null: no limit", at_least=0
    )
    batch_size: int = key(16, "tasks whose trees are grown together in a training step", at_least=1)
    train_batch_size: int | None = key(
        None,
        "maximum nodes in an optimizer update (a sequential turn counts as one), in parts of "
        "similar size; null: the whole step, on-policy",
        at_least=1,
    )
    learning_rate: float = key(
        2e-4,
        "for LoRA; use about a tenth if you train all weights",
        above=0,
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "after the warm-up: constant, or falling to 0 at the end of the run",
    )
    warmup_steps: int = key(
        0,
        "optimizer updates in which the learning rate rises to its full value",
        at_least=0,
    )
    max_grad_norm: float = key(1.0, "maximum norm of each agent's gradient", above=0)
    kl_coef: float = key(0.0, "weight of the k3 KL to the reference policy", at_least=0)
    max_new_tokens: int = key(256, "maximum tokens of a completion", at_least=1)
    temperature: float | None = key(None, "null: agent_model's", above=0)
    top_p: float | None = key(None, "null: agent_model's", above=0, at_most=1)
    top_k: int | None = key(None, "null: agent_model's", at_least=1)
    logging_steps: int = key(1, "training steps between records", at_least=1)
    eval_interval: int = key(0, "training steps between evaluations; 0: none", at_least=0)
    eval_num_samples: int | None = key(
        4, "tasks of an evaluation; null: the whole split", at_least=1
    )
    eval_answers: int = key(1, "answers of the team to each of these tasks", at_least=1)
    save_steps: int = key(0, "training steps between checkpoints; 0: none", at_least=0)
    save_total_limit: int | None = key(
        2, "number of newest checkpoints to keep; null: all", at_least=1
    )

    # What an algorithm is like, for those who must not ask for its name.
    chains: ClassVar[bool] = False  # rollouts: G samples at turn 1, one at each turn after it
    heterogeneous: ClassVar[bool] = False  # one policy, whose agents are distinguished by latents
    trained_online: ClassVar[bool] = True  # samples come from the policy as it moves
    fits_reward_model: ClassVar[bool] = False  # before its online stage
    no_programs: ClassVar[str] = (
        "its trainer reads trees of turns"  # why it cannot learn from a program; empty: it can
    )
    one_reward: ClassVar[str] = (
        ""  # why agents cannot learn from rewards of their own; "": they can
    )
    paper: ClassVar[str] = ""

    @property
    def shape(self) -> Shape:
        """The form of a training rollout."""
        return Shape(
            self.num_agents,
            self.num_turns,
            self.num_generations,
            self.joint_mode,
            self.handoff,
            self.early_termination_threshold,
            1 if self.chains else None,
            self.handoff_width,
            self.turn_order,
            1 if self.chains else self.num_generations_sequential,
        )

    @property
    def learns_by(self) -> str | None:
        """The section of the algorithm that learns online in this one's place; None: itself."""
        return None

    @property
    def online_advantage(self) -> Advantage | None:
        """The advantage that ``learns_by`` takes whatever its section says; None: its own."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that training starts from is asked."""
        return self.kl_coef > 0

    @property
    def takes_ratios(self) -> bool:
        """Whether the policy is compared with the one that sampled."""
        return False

    @property
    def passes(self) -> int:
        """Passes of the update over a step's samples."""
        return 1

    @property
    def samples_greedily(self) -> bool:
        """Whether returns are compared with those of greedy rollouts."""
        return False

    @property
    def one_policy(self) -> bool:
        """Whether all agents act by one policy, so that their number may change."""
        return self.heterogeneous

    @property
    def policies(self) -> int:
        """How many are trained: one for each agent, or one for all."""
        return 1 if self.one_policy else self.num_agents


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PreferenceConfig(CommonConfig):
    """Keys that MADPO and MARLHF share."""

    preference_num_candidates: int = key(16, "joint candidates sampled for each task", at_least=2)
    preference_pairs_per_sample: int | None = key(
        4,
        "maximum pairs for each task; null: all",
        at_least=1,
    )
    pair_selection: Literal["reward_gap", "random", "all"] = key(
        "reward_gap",
        "choice of pairs; all needs preference_pairs_per_sample: null",
    )
    preference_holdout: float = key(
        0.1, "share of the tasks whose pairs are only for measuring", at_least=0, below=1
    )
    comparator: str = key(
        "reward",
        "decides which of two is better: reward (the task reward); model: NAME, URL or URL#NAME, "
        "an OpenAI-compatible service; earlier: RUN, by how many answers of that team each beats",
    )
    preferences: str | None = key(
        None, "preferences.jsonl (or a run's folder) to read instead of sampling"
    )
    num_iterations: int = key(
        1,
        "rounds of sampling candidates, labelling and learning",
        at_least=1,
    )
    round_tasks: int | None = key(
        None,
        "tasks labelled in a round; null: all, divided among the rounds",
        at_least=1,
    )
    replay: Literal["current", "last_k", "all", "lambda_decay"] = key(
        "current",
        "pairs of earlier rounds to learn from again: none, the last, all, or each with λ^age",
    )
    replay_rounds: int | None = key(
        None,
        "number of earlier rounds for last_k, and the maximum for lambda_decay",
        at_least=1,
    )
    replay_lambda: float = key(
        0.5,
        "λ: weight of a pair of the previous round; λ² for two rounds before, …",
        above=0,
        at_most=1,
    )
    discount: float = key(1.0)

    one_reward: ClassVar[str] = "preferences compare joint actions by one number"
    no_programs: ClassVar[str] = (
        "preferences compare answers to the same prompts, and a program's differ by episode"
    )

    @property
    def comparison(self) -> tuple[str, str]:
        """The kind of ``comparator``, and the name that it gives."""
        kind, _, name = self.comparator.partition(":")
        return kind.strip(), name.strip()


@dataclass(frozen=True)
class MADPOConfig(PreferenceConfig):
    """Multi-agent direct preference optimization."""

    paper: ClassVar[str] = (
        "MADPO: direct preference optimization (arXiv 2305.18290) of joint answers"
    )

    dpo_beta: float = key(0.1, "weight of the joint log-ratio", above=0)
    dpo_reference: Literal["start", "round", "none"] = key(
        "none",
        "reference of the log-ratio: the first policies, those at the round's start, or none",
    )
    label_smoothing: float = key(
        0.0,
        "share of pairs assumed to be the wrong way round",
        at_least=0,
        at_most=1,
    )
    use_environment_step: bool = key(True, "x-axis: 2 · pairs trained; false: candidates scored")
    train_agents: list[int] | None = key(None, "agents that learn; null: all; [1]: only the second")

    trained_online: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        return self.dpo_reference == "start" or super().needs_reference


@dataclass(frozen=True)
class MARLHFConfig(PreferenceConfig):
    """Preferences → joint reward model → online reinforcement learning.

    The common keys hold for the collection, the loop and the online stage alike; they may stand
    here or in the RL algorithm's section (``share_common_keys``).
    """

    paper: ClassVar[str] = "MARLHF: a joint reward model from preferences, then online RL"

    rl_algorithm: Literal["magrpo", "reinforce", "rloo", "remax", "ppo"] = key(
        "magrpo",
        "algorithm of the online stage",
    )
    reward_model: str | None = key(None, "read this reward model instead of training one")
    reward_model_name: str | None = key(None, "base of the reward model; null: the agents' base")
    reward_learning_rate: float = key(1e-5, "learning rate of the reward model", above=0)
    reward_num_train_epochs: int = key(1, "passes over the pairs", at_least=1)
    reward_train_batch_size: int = key(4, "pairs in an update", at_least=1)
    reward_max_length: int = key(2048, "maximum tokens of a joint text", at_least=8)
    reward_prompts: Literal["each", "first"] = key(
        "each",
        "position of the prompts in a joint text: each before its response, or all first (read "
        "once for all candidates of a task)",
    )
    reward_margin: float = key(
        0.0,
        "required lead of a winner's score for each point of task reward; 0: any lead",
        at_least=0,
    )
    reward_freeze_backbone: bool = key(False, "train the score head alone")
    reward_min_accuracy: float = key(
        0.55,
        "accuracy on held-out pairs of the first round below which the run stops",
    )
    refit_below: float | None = key(
        None,
        "order agreement of a training step below which its round ends; null: none",
        at_least=0,
        at_most=1,
    )

    preference_holdout: float = key(0.1, above=0, below=1)  # a reward model has to be measured

    fits_reward_model: ClassVar[bool] = True

    @property
    def learns_by(self) -> str:
        return "ppo" if self.rl_algorithm == "ppo" else "magrpo"

    @property
    def online_advantage(self) -> Advantage | None:
        advantages: dict[str, Advantage] = {
            "reinforce": "raw", "rloo": "rloo", "remax": "greedy",
        }  # fmt: skip
        return advantages.get(self.rl_algorithm)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Proximal policy optimization; with several agents IPPO or MAPPO."""

    paper: ClassVar[str] = "PPO (arXiv 1707.06347)"
    no_programs: ClassVar[str] = "its critics value the turns of a tree, not a program's calls"

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


@dataclass(frozen=True)
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


SECTIONS: dict[str, type[CommonConfig]] = {
    "grpo": GRPOConfig,
    "magrpo": MAGRPOConfig,
    "madpo": MADPOConfig,
    "marlhf": MARLHFConfig,
    "ppo": PPOConfig,
    "shppo": SHPPOConfig,
}
EXTRA_SECTIONS = {"marlhf": ("magrpo", "ppo")}  # read beside the algorithm's own
# Keys that MARLHF's online stage does not take from `marlhf:`; each has one value in its section.
SINGLE_TURN_KEYS = ("num_turns", "joint_mode", "handoff", "handoff_width")


def sections_of(
    algorithm: str, algorithms: Mapping[str, type[CommonConfig]] = SECTIONS
) -> dict[str, type[CommonConfig]]:
    """The sections that a file of this algorithm may have, its own first. ``algorithms``: the
    section of each."""
    names = (algorithm, *EXTRA_SECTIONS.get(algorithm, ()))
    return {name: algorithms[name] for name in names}
