"""The sections of the algorithms that learn from preferences between joint answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from comlrl.config.algorithms_common import Advantage
from comlrl.config.keys import Unused, key
from comlrl.config.resolved import CommonConfig, Config, Rounds
from comlrl.types import Shape

ONE_ROUND = Unused("num_iterations=1: there is one round", lambda s, _: s.num_iterations == 1)
SAMPLED = Unused(
    "candidates are read from a file of preferences", lambda s, _: s.preferences is not None
)
SCORED = Unused(
    "the reward model is read from reward_model", lambda s, _: "reward_model" in s.inputs
)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(CommonConfig):
    """Keys that MADPO and MARLHF share."""

    preference_num_candidates: int = key(
        16,
        "joint candidates sampled for each task",
        at_least=2,
        unused_if=(
            SCORED,
            SAMPLED,
        ),
    )
    preference_pairs_per_sample: int | None = key(
        4, "maximum pairs for each task; null: all", at_least=1, unused_if=(SCORED,)
    )
    pair_selection: Literal["reward_gap", "random", "all"] = key(
        "reward_gap",
        "choice of pairs; all needs preference_pairs_per_sample: null",
        unused_if=(SCORED,),
    )
    preference_holdout: float = key(
        0.1,
        "share of the tasks whose pairs are only for measuring",
        at_least=0,
        below=1,
        unused_if=(SCORED,),
    )
    preferences: str | None = key(
        None,
        "preferences.jsonl (or a run's folder) to read instead of sampling",
        unused_if=(SCORED,),
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
        unused_if=(ONE_ROUND,),
    )
    replay_rounds: int | None = key(
        None,
        "number of earlier rounds for last_k, and the maximum for lambda_decay",
        at_least=1,
        unused_if=(
            ONE_ROUND,
            Unused(
                "only replay=last_k and lambda_decay read it",
                lambda s, _: s.replay in ("current", "all"),
            ),
        ),
    )
    replay_lambda: float = key(
        0.5,
        "λ: weight of a pair of the previous round; λ² for two rounds before, …",
        above=0,
        at_most=1,
        unused_if=(
            ONE_ROUND,
            Unused("only replay=lambda_decay reads it", lambda s, _: s.replay != "lambda_decay"),
        ),
    )
    discount: float = key(1.0)

    one_reward: ClassVar[str] = "preferences compare joint actions by one number"
    no_programs: ClassVar[str] = (
        "preferences compare answers to the same prompts, and a program's differ by episode"
    )

    @property
    def rounds(self) -> Rounds:
        return Rounds(
            self.num_iterations,
            self.round_tasks,
            self.preference_num_candidates,
            self.preference_pairs_per_sample,
            self.preferences,
        )

    @property
    def inputs(self) -> Mapping[str, str]:
        return {} if self.preferences is None else {"preferences": self.preferences}

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        for other in dict.fromkeys((name, config.online_name)):
            yield from _single_turn(other, config.sections[other])
        if self.joint_mode == "counterfactual":
            yield (
                f"{name}.joint_mode: 'counterfactual'; pairs compare joint actions that differ in "
                "any number of agents: use align or cross"
            )
        if self.pair_selection == "all" and self.preference_pairs_per_sample is not None:
            yield (
                f"{name}.preference_pairs_per_sample: {self.preference_pairs_per_sample} with "
                "pair_selection=all; set it to null"
            )
        if self.replay == "last_k" and self.replay_rounds is None:
            yield f"{name}.replay_rounds: null with replay=last_k; set a number of rounds"
        if self.num_iterations > 1:
            yield from self._round_problems(name)

    def _round_problems(self, name: str) -> Iterator[str]:
        rounds = self.num_iterations
        for key_name, value in self.inputs.items():
            yield (
                f"{name}.{key_name}: '{value}' with num_iterations={rounds}, whose rounds are of "
                f"the policies as they move; set num_iterations=1, or {key_name}=null"
            )
        if self.num_train_epochs is None and (self.max_steps or 0) < rounds:
            yield (
                f"{name}.num_train_epochs: null, and max_steps={self.max_steps} cannot be divided "
                f"among num_iterations={rounds}; set num_train_epochs, the passes over a round's "
                "tasks"
            )

    @property
    def candidate_shape(self) -> Shape:
        """Return the shape of a rollout whose joint actions are a task's candidates."""
        return Shape(
            self.num_agents,
            1,
            self.preference_num_candidates,
            joint_mode=self.joint_mode,
            turn_order=self.turn_order,
            num_generations_sequential=1,
        )


def _single_turn(name: str, section: CommonConfig) -> Iterator[str]:
    """Yield problems of settings that need more than one turn: preferences compare single ones."""
    if section.num_turns != 1:
        yield (
            f"{name}.num_turns: {section.num_turns}; preferences compare single joint actions, so "
            "num_turns must be 1"
        )
    if section.handoff is not None:
        yield (
            f"{name}.handoff: '{section.handoff}'; nothing follows a single turn: set it to null"
        )


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

    trained_online: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        return self.dpo_reference == "start" or super().needs_reference

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        if config.lora.dropout > 0:
            yield (
                f"lora.dropout: {config.lora.dropout} with madpo, whose margins are computed "
                "without it and gradients with it; set lora.dropout=0"
            )
        if self.kl_coef > 0:
            yield (
                f"{name}.kl_coef: {self.kl_coef}; DPO's reference is dpo_reference=start: set it "
                "to 0"
            )
        endless = self.num_train_epochs is None and self.max_steps is None
        if endless and not self.use_environment_step:
            yield (
                f"{name}.max_env_steps: {self.max_env_steps} alone may never end a run whose steps "
                "are labelled candidates (use_environment_step=false), because its rounds label "
                "only so many; set num_train_epochs or max_steps too"
            )


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
    reward_model_name: str | None = key(
        None, "base of the reward model; null: the agents' base", unused_if=(SCORED,)
    )
    reward_learning_rate: float = key(
        1e-5, "learning rate of the reward model", above=0, unused_if=(SCORED,)
    )
    reward_num_train_epochs: int = key(1, "passes over the pairs", at_least=1, unused_if=(SCORED,))
    reward_train_batch_size: int = key(4, "pairs in an update", at_least=1, unused_if=(SCORED,))
    reward_max_length: int = key(
        2048, "maximum tokens of a joint text", at_least=8, unused_if=(SCORED,)
    )
    reward_prompts: Literal["each", "first"] = key(
        "each",
        "position of the prompts in a joint text: each before its response, or all first (read "
        "once for all candidates of a task)",
        unused_if=(SCORED,),
    )
    reward_margin: float = key(
        0.0,
        "required lead of a winner's score for each point of task reward; 0: any lead",
        at_least=0,
        unused_if=(SCORED,),
    )
    reward_freeze_backbone: bool = key(False, "train the score head alone", unused_if=(SCORED,))
    reward_min_accuracy: float = key(
        0.55,
        "accuracy on held-out pairs of the first round below which the run stops",
    )
    refit_below: float | None = key(
        None,
        "order agreement of a training step below which its round ends; null: none",
        at_least=0,
        at_most=1,
        unused_if=(ONE_ROUND,),
    )

    preference_holdout: float = key(0.1, above=0, below=1)  # a reward model has to be measured

    fits_reward_model: ClassVar[bool] = True

    @property
    def inputs(self) -> Mapping[str, str]:
        read = {} if self.reward_model is None else {"reward_model": self.reward_model}
        return {**super().inputs, **read}

    @property
    def fitted_reward_model(self) -> Literal["head", "all"] | None:
        if self.reward_model is not None:
            return None
        return "head" if self.reward_freeze_backbone else "all"

    @property
    def other_models(self) -> Mapping[str, str]:
        name = self.reward_model_name
        return {} if name is None else {"reward_model_name": name}

    def problems(self, name: str, config: Config) -> Iterator[str]:
        yield from super().problems(name, config)
        refill = getattr(config.online, "refill", 0)
        if refill and self.num_iterations > 1:
            yield (
                f"{config.online_name}.refill: {refill} with {name}.num_iterations="
                f"{self.num_iterations}, where a round's reward model is not fitted to the tasks "
                "that would be added; set refill=0"
            )
        if config.online.baseline == "raw" and config.shift:
            yield (
                f"reward_processor.shift: {config.shift:g} with {name}.rl_algorithm="
                f"{self.rl_algorithm} and no baseline: the scores' mean is 0 already, and all "
                "completions would be pushed one way; set reward_processor.shift=0"
            )

    @property
    def learns_by(self) -> str:
        return "ppo" if self.rl_algorithm == "ppo" else "magrpo"

    @property
    def online_advantage(self) -> Advantage | None:
        advantages: dict[str, Advantage] = {
            "reinforce": "raw", "rloo": "rloo", "remax": "greedy",
        }  # fmt: skip
        return advantages.get(self.rl_algorithm)
