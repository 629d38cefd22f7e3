"""MARLHF: multi-agent reinforcement learning from preference feedback on joint actions.

In each of ``num_iterations`` rounds:

1. Preference pairs of joint candidates (winner w, loser l) of the present policies, as in MADPO.
2. A joint reward model r on the text of a whole joint action (each agent's prompt and response,
   in order) minimizes −log σ(r_w − r_l) (Bradley–Terry; Christiano et al. 2017, arXiv 1706.03741;
   Ouyang et al. 2022, arXiv 2203.02155), from its weights of the round before, and is frozen until
   the next. ``reward_margin`` c > 0 asks that winners lead by as much as they are better:
   −log σ(r_w − r_l − c (R_w − R_l)), R the task reward (Touvron et al. 2023, arXiv 2307.09288,
   eq. 2). Its pairwise accuracy is measured on the pairs of tasks that it was not fitted to; no
   better than chance in the first round stops the run. With ``pair_selection: all`` a task's pairs
   lie together in batches, as Ouyang et al. do (their section 3.5): each text is then read once
   for all its comparisons.
3. Online reinforcement learning by a sibling trainer that the train script hands in. Its reward
   is r, less its mean and over its standard deviation on the round's candidates, then
   ``reward_processor``'s scale and shift. Evaluation keeps the task reward: where the score rises
   and the task reward does not, the policies exploit the model; both are logged.

Departures from RLHF as published: one model scores the joint action of all agents, so that the
reward is common; preferences come from the task reward, or a comparator, instead of people.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from comlrl import files
from comlrl.keyed import order
from comlrl.loop.loop import Loop
from comlrl.loop.steps import Step
from comlrl.preferences.candidates import PreferenceError, joint_texts
from comlrl.preferences.collector import SUMMARY, Collector
from comlrl.preferences.pairs import Round, TaskPairs
from comlrl.preferences.reward_model import (
    FACTS,
    ModelReward,
    RewardModel,
    WeakRewardModelError,
    load,
)
from comlrl.preferences.reward_training import Fit, RewardBase, TextPair, begin, train
from comlrl.processes import distributed
from comlrl.types import Part
from trainers.configs import MARLHFConfig

FOLDER = "reward_model"
AGREEMENT = "reward_model/order_agreement"


class Online(Protocol):
    """The sibling that learns from the score."""

    def step(self, step: Step) -> None: ...

    def parts(self) -> Mapping[str, Part]: ...


class MARLHFTrainer:
    """Rounds of labels, of fitting the reward model to them, and of learning from its score."""

    def __init__(
        self,
        section: MARLHFConfig,
        loop: Loop,
        collector: Collector,
        reward: ModelReward,
        online: Online,
        base: RewardBase,
        *,
        seed: int,
        resume: bool,
    ) -> None:
        """``reward``: the online trainer's, still without its model. ``base``: what the reward
        model starts from. ``resume``: a model that the run directory holds is used again."""
        self.section, self.loop, self.collector = section, loop, collector
        self.reward, self.online, self.base = reward, online, base
        self.seed, self.resume = seed, resume
        self.round = -1  # the present one

    def train(self) -> None:
        started, counters = time.monotonic(), self.loop.counters
        self._begin(self.loop.course.round_of(counters.steps))
        counters.train_seconds += time.monotonic() - started
        for step in self.loop.steps(self, self.reward.of_evaluation):
            index = self.loop.course.round_of(step.index - 1)
            if index != self.round:
                self._begin(index)
            step.clock.lap("label")
            self.online.step(step)
            self._end_early(index)

    def parts(self) -> Mapping[str, Part]:
        """In one round the model is frozen, and its folder holds it."""
        moving = {"reward_model": self.reward} if self.section.num_iterations > 1 else {}
        return {**self.online.parts(), **moving}

    def _begin(self, index: int) -> None:
        """The reward model of a round: read, resumed, or fitted to the round's labels."""
        folder = self.loop.run_dir / FOLDER
        if self.section.reward_model is not None:
            self.reward.model = self._load(Path(self.section.reward_model))
            self._check()
        elif self.section.num_iterations == 1 and self.resume and (folder / FACTS).exists():
            self.reward.model = self._load(folder)
            if not self.loop.counters.logged:  # killed before the first checkpoint
                self._report(self.collector.round(0))
            self._check()
        elif self.section.num_iterations == 1 and self.loop.counters.steps:
            raise PreferenceError(f"'{folder}' is missing; the run cannot go on without it")
        else:
            if self.reward.model is None and self.reward.kept is not None:
                facts, weights = self.reward.kept
                self.reward.model = begin(self.base, facts, self.seed, weights)
                self.reward.model.freeze()
            if self.reward.model is None or self.reward.model.facts.round != index:
                self._refit(index, folder)
        self.round = index

    def _end_early(self, index: int) -> None:
        """Leave out what is left of a round whose model no longer orders what the team does."""
        least, found = self.section.refit_below, self.loop.latest.get(AGREEMENT)
        if least is None or found is None or found >= least:
            return
        if index + 1 < self.section.num_iterations:
            self.loop.skip(self.loop.course.end_of(index))

    def _load(self, folder: Path) -> RewardModel:
        return load(folder, dtype=self.base.dtype, device=self.base.device)

    def _refit(self, index: int, folder: Path) -> None:
        """Label the round's candidates, and go on fitting the model to them and the replay."""
        labelled = self.collector.round(index)
        if index == 0 and not labelled.held_out:
            raise PreferenceError(
                "preferences: one task alone has pairs, so that none can be held out to measure "
                "the reward model; give more tasks or more preference_num_candidates"
            )
        before, told = None, {}
        if (earlier := self.reward.model) is not None:
            before = {name: tensor.clone() for name, tensor in earlier.weights().items()}
            margins, _ = earlier.margins(labelled.tasks)
            told = {"reward_model/fresh_accuracy": float((margins > 0).float().mean())}
        self.reward.model = earlier = None  # two need not be held at once
        started = time.monotonic()
        model = train(
            self.base,
            self._fit(index),
            self._text_pairs(labelled),
            work_dir=folder,
            say=say if index == 0 else lambda text: None,
            before=before,
        )
        model.facts.round = index
        if labelled.held_out:
            model.measure(labelled.held_out, labelled.train)
        else:  # nothing was kept to measure with
            model.measure(labelled.train)
        say(
            f"{model.facts.accuracy:.1%} of {model.facts.held_out_pairs} held-out pairs ordered "
            f"rightly, after {time.monotonic() - started:.0f} s on {model.facts.pairs} pairs"
        )
        self.reward.model = model
        self._report(labelled, told)
        if distributed.is_main():
            model.save(folder)
        distributed.everyone(None)
        if index == 0:
            self._check()

    def _fit(self, index: int) -> Fit:
        section = self.section
        share = max(1, section.reward_train_batch_size // distributed.world_size())
        return Fit(
            section.reward_learning_rate,
            section.reward_num_train_epochs,
            share,
            section.reward_max_length,
            self.seed + index,
            in_order=section.pair_selection == "all",
            prompts_first=section.reward_prompts == "first",
            margin=section.reward_margin,
        )

    def _text_pairs(self, labelled: Round) -> list[TextPair]:
        """The round's pairs and, of earlier rounds, as large a part as their weight, by task."""
        tasks = list(labelled.train)
        for earlier, weight in self.collector.replayed(labelled.index):
            key = (self.seed, "replay", labelled.index, earlier.index)
            kept = round(weight * len(earlier.train))
            tasks += [earlier.train[i] for i in order(key, len(earlier.train))[:kept]]
        shuffled = order((self.seed, "reward model", labelled.index), len(tasks))
        return text_pairs([tasks[i] for i in shuffled], self.section.reward_prompts == "first")

    def _report(self, labelled: Round, told: Mapping[str, float] | None = None) -> None:
        """Candidates that this run has scored are environment steps of it; the model's quality
        goes to the log and into the summary of the preferences."""
        candidates = sum(len(item.candidates.candidates_K) for item in labelled.tasks)
        if self.section.preferences is None:
            self.loop.counters.env_steps += candidates
        assert self.reward.model is not None
        path, facts = self.loop.run_dir / SUMMARY, self.reward.model.facts
        gaps = [pair.gap for item in labelled.tasks for pair in item.pairs]
        self.loop.tell(
            {
                "reward_model/loss": facts.loss,
                "reward_model/accuracy": facts.accuracy,
                "preferences/pairs": float(facts.pairs),
                "preferences/gap_mean": sum(gaps) / max(1, len(gaps)),
                "preferences/reward_mean": labelled.reward_mean,
                "preferences/labelled": float(self.collector.labelled),
                **(told or {}),
            }
        )
        if not distributed.is_main():
            return
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary["reward_model_accuracy"] = facts.accuracy
        summary["reward_model"] = {
            "loss": facts.loss,
            "pairs": facts.pairs,
            "held_out_pairs": facts.held_out_pairs,
            "too_long": facts.too_long,
        }
        files.replace(path, json.dumps(summary, indent=1) + "\n")

    def _check(self) -> None:
        assert self.reward.model is not None
        least, facts = self.section.reward_min_accuracy, self.reward.model.facts
        if facts.accuracy < least:
            raise WeakRewardModelError(
                f"the reward model orders {facts.accuracy:.1%} of {facts.held_out_pairs} held-out "
                f"pairs rightly, below marlhf.reward_min_accuracy={least}: reinforcement learning "
                "would follow noise. More pairs (preference_num_candidates, "
                "preference_pairs_per_sample), a higher reward_learning_rate or more "
                "reward_num_train_epochs may help; reward_min_accuracy=0 goes on all the same"
            )


def text_pairs(tasks: Sequence[TaskPairs], prompts_first: bool = False) -> list[TextPair]:
    """The joint texts and the gap of every pair."""
    found = []
    for item in tasks:
        texts_K = joint_texts(item.candidates, prompts_first)
        found += [TextPair(texts_K[p.winner], texts_K[p.loser], p.gap) for p in item.pairs]
    return found


def say(text: str) -> None:
    if distributed.is_main():
        print(f"reward model: {text}", flush=True)
