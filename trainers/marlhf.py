"""MARLHF: multi-agent reinforcement learning from preference feedback on joint actions.

1. Preference pairs of joint candidates (winner w, loser l), as in MADPO.
2. A joint reward model r on the text of a whole joint action (each agent's prompt and response,
   in order) minimizes −log σ(r_w − r_l) (Bradley–Terry; Christiano et al. 2017, arXiv 1706.03741;
   Ouyang et al. 2022, arXiv 2203.02155) and is then frozen. ``reward_margin`` c > 0 asks that
   winners lead by as much as they are better: −log σ(r_w − r_l − c (R_w − R_l)), R the task reward
   (Touvron et al. 2023, arXiv 2307.09288, eq. 2). Its pairwise accuracy is measured on the pairs
   of tasks that it was not fitted to; no better than chance stops the run. With ``pair_selection:
   all`` a task's pairs lie together in batches, as Ouyang et al. do (their section 3.5): each text
   is then read once for all its comparisons.
3. Online reinforcement learning by a sibling trainer that the train script hands in. Its reward
   is r, less its mean and over its standard deviation on the held-out tasks' candidates, then
   ``reward_processor``'s scale and shift. Evaluation keeps the task reward: where the score rises
   and the task reward does not, the policies exploit the model; both are logged.

Departures from RLHF as published: one model scores the joint action of all agents, so that the
reward is common; preferences come from the task reward instead of people.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl.keyed import order
from comlrl.loop.loop import Loop
from comlrl.preferences.candidates import PreferenceError, joint_texts
from comlrl.preferences.collector import SUMMARY, Collector
from comlrl.preferences.pairs import TaskPairs
from comlrl.preferences.reward_model import (
    FACTS,
    ModelReward,
    RewardModel,
    WeakRewardModelError,
    load,
)
from comlrl.preferences.reward_training import Fit, RewardBase, TextPair, train
from comlrl.processes import distributed
from comlrl.types import Part, Trainer
from trainers.configs import MARLHFConfig

FOLDER = "reward_model"


class MARLHFTrainer:
    """Preferences, then a reward model, then the online trainer with that model as its reward."""

    def __init__(
        self,
        section: MARLHFConfig,
        loop: Loop,
        collector: Collector,
        reward: ModelReward,
        online: Trainer,
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

    def train(self) -> None:
        folder = self.loop.run_dir / FOLDER
        if self.section.reward_model is not None:
            model = self._load(Path(self.section.reward_model))
        elif self.resume and (folder / FACTS).exists():
            model = self._load(folder)
            if not self.loop.counters.logged:  # killed before the first checkpoint
                self.collector.pairs()
                self._report(model)
        elif self.loop.counters.steps:
            raise PreferenceError(f"'{folder}' is missing; the run cannot go on without it")
        else:
            model = self._fit(folder)
        self._check(model)
        self.reward.model = model
        self.online.train()

    def parts(self) -> Mapping[str, Part]:
        return self.online.parts()

    def _load(self, folder: Path) -> RewardModel:
        return load(folder, dtype=self.base.dtype, device=self.base.device)

    def _fit(self, folder: Path) -> RewardModel:
        """Stages 1 and 2."""
        pairs, held_out = self.collector.pairs()
        if not held_out:
            raise PreferenceError(
                "preferences: one task alone has pairs, so that none can be held out to measure "
                "the reward model; give more tasks or more preference_num_candidates"
            )
        section = self.section
        share = max(1, section.reward_train_batch_size // distributed.world_size())
        fit = Fit(
            section.reward_learning_rate,
            section.reward_num_train_epochs,
            share,
            section.reward_max_length,
            self.seed,
            in_order=section.pair_selection == "all",
            margin=section.reward_margin,
        )
        shuffled = order((self.seed, "reward model"), len(pairs))
        started = time.monotonic()
        self.loop.progress.begin("training the reward model")
        model = train(
            self.base,
            fit,
            text_pairs([pairs[i] for i in shuffled]),
            work_dir=folder,
            say=say,
        )
        model.measure(held_out)
        say(
            f"{model.facts.accuracy:.1%} of {model.facts.held_out_pairs} held-out pairs ordered "
            f"rightly, after {time.monotonic() - started:.0f} s on {model.facts.pairs} pairs"
        )
        self._report(model)
        if distributed.is_main():
            model.save(folder)
        distributed.everyone(None)
        return model

    def _report(self, model: RewardModel) -> None:
        """Candidates that this run has scored are environment steps of it; the model's quality
        goes to the log and into the summary of the preferences."""
        if self.section.preferences is None:
            self.loop.counters.env_steps += self.loop.counters.scored_joint_actions
        path = self.loop.run_dir / SUMMARY
        summary, facts = json.loads(path.read_text()), model.facts
        self.loop.tell(
            {
                "reward_model/loss": facts.loss,
                "reward_model/accuracy": facts.accuracy,
                "preferences/pairs": float(facts.pairs),
                "preferences/gap_mean": summary["gap_mean"],
            }
        )
        if not distributed.is_main():
            return
        summary["reward_model_accuracy"] = facts.accuracy
        summary["reward_model"] = {
            "loss": facts.loss,
            "pairs": facts.pairs,
            "held_out_pairs": facts.held_out_pairs,
            "too_long": facts.too_long,
        }
        path.write_text(json.dumps(summary, indent=1) + "\n")

    def _check(self, model: RewardModel) -> None:
        least, facts = self.section.reward_min_accuracy, model.facts
        if facts.accuracy < least:
            raise WeakRewardModelError(
                f"the reward model orders {facts.accuracy:.1%} of {facts.held_out_pairs} held-out "
                f"pairs rightly, below marlhf.reward_min_accuracy={least}: reinforcement learning "
                "would follow noise. More pairs (preference_num_candidates, "
                "preference_pairs_per_sample), a higher reward_learning_rate or more "
                "reward_num_train_epochs may help; reward_min_accuracy=0 goes on all the same"
            )


def text_pairs(tasks: Sequence[TaskPairs]) -> list[TextPair]:
    """The joint texts and the gap of every pair."""
    found = []
    for item in tasks:
        texts_K = joint_texts(item.candidates)
        found += [TextPair(texts_K[p.winner], texts_K[p.loser], p.gap) for p in item.pairs]
    return found


def say(text: str) -> None:
    if distributed.is_main():
        print(f"reward model: {text}", flush=True)
