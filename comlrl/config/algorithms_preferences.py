"""The sections of the algorithms that learn from preferences between joint answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from comlrl.config.algorithms_common import Advantage, CommonConfig
from comlrl.config.keys import key
from comlrl.types import Shape


@dataclass(frozen=True, kw_only=True)
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
    def candidate_shape(self) -> Shape:
        """The form of a rollout whose joint actions are a task's candidates."""
        return Shape(
            self.num_agents,
            1,
            self.preference_num_candidates,
            joint_mode=self.joint_mode,
            turn_order=self.turn_order,
            num_generations_sequential=1,
        )

    @property
    def comparison(self) -> tuple[str, str]:
        """The kind of ``comparator``, and the name that it gives."""
        kind, _, name = self.comparator.partition(":")
        return kind.strip(), name.strip()


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
