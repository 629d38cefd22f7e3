"""MARLHF: multi-agent reinforcement learning from preference feedback on joint actions.

In each of ``num_iterations`` rounds:

1. Sample joint candidates from the current policies and form preference pairs (winner w, loser l),
   as in MADPO.
2. Fit a joint reward model r, which scores the text of a joint action (each agent's prompt and
   response, in order), by minimizing −log σ(r_w − r_l) (Bradley–Terry; Christiano et al. 2017,
   arXiv 1706.03741; Ouyang et al. 2022, arXiv 2203.02155). Fitting starts from the previous round's
   weights; the model is then frozen until the next round. ``reward_margin`` c > 0 adds a margin in
   proportion to the gap in task reward R: −log σ(r_w − r_l − c (R_w − R_l)) (Touvron et al. 2023,
   arXiv 2307.09288, eq. 2). Pairwise accuracy is measured on tasks that are held out in all rounds;
   if it is below ``reward_min_accuracy`` in the first round, the run stops. With
   ``pair_selection: all``, a task's pairs are in the same batch (Ouyang et al., section 3.5), so
   each text is processed once for all its comparisons.
3. Train the policies online with another algorithm's trainer, which the train script passes in. Its
   reward is r, standardized by mean and standard deviation over all of the round's candidates, then
   scaled and shifted by ``reward_processor``. Evaluation keeps the task reward, and both are
   logged: if the score rises without the task reward, the policies exploit the model.

Departures from published RLHF: one model scores the joint action of all agents, so they share the
reward; preferences come from the task reward instead of people. With several rounds there are two
more, because a model fitted to a few hundred pairs is often wrong:

- The online steps use only the tasks that the round's model was fitted to. On tasks that are held
  out, or whose candidates all tie, its scores would be noise.
- A round's labels also evaluate the previous round. If their mean task reward is more than three
  standard errors of the difference below that of the best round, the team and its optimizers are
  restored to the best round, and the current round trains nothing. A round also trains nothing if
  it has fewer pairs than one batch of the reward model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comlrl import files
from comlrl.config.algorithms import MARLHFConfig
from comlrl.errors import notice
from comlrl.keyed import order
from comlrl.loop.best_round import BestRound
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Algorithm, Part
from comlrl.loop.steps import Step
from comlrl.preferences.candidates import PreferenceError, joint_texts
from comlrl.preferences.collector import Collector
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
from comlrl.run_files import PREFERENCES_SUMMARY
from comlrl.types import Task

FOLDER = "reward_model"
AGREEMENT = "reward_model/order_agreement"


class MARLHFTrainer:
    """Trainer that alternates labelling, fitting a reward model, and learning from its score."""

    def __init__(
        self,
        section: MARLHFConfig,
        loop: Loop,
        collector: Collector,
        reward: ModelReward,
        online: Algorithm[Any],
        base: RewardBase,
        *,
        seed: int,
        resume: bool,
    ) -> None:
        """Set up the trainer. ``reward``: the online trainer's reward, whose model is not set yet.
        ``base``: the model from which the reward model is initialized. ``resume``: reuse a reward
        model in the run directory."""
        self.section, self.loop, self.collector = section, loop, collector
        self.reward, self.online, self.base = reward, online, base
        self.seed, self.resume = seed, resume
        self.round, self.idle = -1, False  # the current round, and whether it trains nothing
        self.best = BestRound(online.parts())

    def train(self) -> None:
        for step in self.loop.steps(self, self.reward.of_evaluation):
            step = replace(step, tasks=self._fitted(step))
            if self.idle or not step.tasks:
                self.loop.skip(self.loop.schedule.end_of(self.round) if self.idle else step.index)
                continue
            self.loop.advance(step, self.online)
            self._end_early()

    def parts(self) -> Mapping[str, Part]:
        """Return a checkpoint's parts. With one round, the frozen reward model is stored in its own
        folder instead."""
        moving: dict[str, Part] = {}
        if self.section.num_iterations > 1:
            moving = {"reward_model": self.reward, "best_round": self.best}
        return {**self.online.parts(), **moving}

    def _fitted(self, step: Step) -> list[Task]:
        """Return the step's tasks. With several rounds, draw them from the tasks that the reward
        model was fitted to: its scores of held-out or tied tasks are mostly noise."""
        schedule = self.loop.schedule
        if self.section.num_iterations == 1:
            return step.tasks
        fitted = {item.task_id for item in self.collector.round(self.round).train}
        tasks = [task for task in schedule.tasks_of(self.round) if task.task_id in fitted]
        part, parts = schedule.part_of(step.index - 1)
        chosen = order((self.seed, "online", step.epoch), len(tasks))[part::parts]
        return [tasks[i] for i in chosen]

    def begin_round(self, index: int) -> None:
        """Load, resume or fit the reward model of a round."""
        folder = self.loop.run_dir / FOLDER
        if self.section.reward_model is not None:
            self.reward.model = self._load(Path(self.section.reward_model))
            self._check()
        elif self.section.num_iterations == 1 and self.resume and (folder / FACTS).exists():
            self.reward.model = self._load(folder)
            if not self.loop.counters.logged:  # killed before the first checkpoint
                self._report(self.collector.round(0), {}, self.reward.model)
            self._check()
        elif self.section.num_iterations == 1 and self.loop.counters.steps:
            raise PreferenceError(f"'{folder}' is missing; the run cannot continue without it")
        else:
            if self.reward.model is None and self.reward.restored is not None:
                facts, weights = self.reward.restored
                self.reward.model = begin(self.base, facts, self.seed, weights)
                self.reward.model.freeze()
            over = self.loop.counters.steps >= self.loop.schedule.end_of(index)
            if self.reward.model is None or (self.reward.model.facts.round != index and not over):
                self._refit(index, folder)
        self.round = index

    def _end_early(self) -> None:
        """Skip the rest of the round if the reward model no longer ranks the team's joint actions
        well enough (``refit_below``)."""
        least, agreement = self.section.refit_below, self.loop.latest.get(AGREEMENT)
        if least is None or agreement is None or agreement >= least:
            return
        if self.round + 1 < self.section.num_iterations:
            self.loop.skip(self.loop.schedule.end_of(self.round))

    def _load(self, folder: Path) -> RewardModel:
        return load(folder, dtype=self.base.dtype, device=self.base.device)

    def _refit(self, index: int, folder: Path) -> None:
        """Label the round's candidates; unless the round is idle, fit the model further to their
        pairs and to replayed ones."""
        labelled = self.collector.round(index)
        if index == 0 and not labelled.held_out:
            raise PreferenceError(
                "preferences: one task alone has pairs, so that none can be held out to measure "
                "the reward model; use more tasks or more preference_num_candidates"
            )
        pairs = self._text_pairs(labelled)
        self.idle = self._teaches_nothing(labelled, pairs)
        before, metrics = None, {}
        if (earlier := self.reward.model) is not None:
            fresh = earlier.order(labelled.tasks)
            metrics = {} if fresh is None else {"reward_model/fresh_accuracy": fresh}
        if self.idle:
            self._report(labelled, metrics)
            return
        if earlier is not None:
            before = {name: tensor.clone() for name, tensor in earlier.weights().items()}
        self.reward.model = earlier = None  # frees its memory before the next model is built
        started = time.monotonic()
        model = train(
            self.base,
            self._fit(index),
            pairs,
            work_dir=folder,
            say=say if index == 0 else lambda text: None,
            before=before,
        )
        model.facts.round = index
        model.measure(labelled)
        facts, seconds = model.facts, time.monotonic() - started
        share = (
            "no" if facts.accuracy is None else f"{facts.accuracy:.1%} of {facts.held_out_pairs}"
        )
        say(f"{share} held-out pairs ordered rightly, after {seconds:.0f} s on {facts.pairs} pairs")
        self.reward.model = model
        self._report(labelled, metrics, model)
        if distributed.is_main():
            model.save(folder)
        distributed.all_gather(None)
        if index == 0:
            self._check()

    def _teaches_nothing(self, labelled: Round, pairs: Sequence[TextPair]) -> bool:
        """Return whether the round is idle: its candidates score significantly worse than those of
        the best round, which is restored, or it has fewer pairs than a reward model's batch."""
        index, batch = labelled.index, self.section.reward_train_batch_size
        if self.section.num_iterations == 1:
            return False
        least = self.best.mean
        if not self.best.offer(labelled):
            say(
                f"round {index + 1}: its candidates' mean reward, {labelled.reward_mean:.2f}, is "
                f"below the {least:.2f} of the best round; the team returns to the weights of that "
                "round, and this round trains nothing"
            )
            return True
        if (model := self.reward.model) is None:
            return False
        short = sum(model.holds(pair.winner) and model.holds(pair.loser) for pair in pairs)
        if short < batch:
            long = len(pairs) - short
            more = f" ({long} more are longer than reward_max_length)" if long else ""
            say(
                f"round {index + 1}: {short} pairs{more} are fewer than "
                f"reward_train_batch_size={batch}, so that it trains nothing"
            )
            return True
        return False

    def _fit(self, index: int) -> Fit:
        section = self.section
        share = max(1, section.reward_train_batch_size // distributed.world_size())
        return Fit(
            learning_rate=section.reward_learning_rate,
            epochs=section.reward_num_train_epochs,
            batch_size=share,
            max_length=section.reward_max_length,
            seed=self.seed + index,
            in_order=section.pair_selection == "all",
            prompts_first=section.reward_prompts == "first",
            margin=section.reward_margin,
        )

    def _text_pairs(self, labelled: Round) -> list[TextPair]:
        """Collect the round's pairs, and those of a fraction of each replayed round's tasks, equal
        to its weight."""
        tasks = list(labelled.train)
        for earlier, weight in self.collector.replayed(labelled.index):
            key = (self.seed, "replay", labelled.index, earlier.index)
            count = round(weight * len(earlier.train))
            tasks += [earlier.train[i] for i in order(key, len(earlier.train))[:count]]
        shuffled = order((self.seed, "reward model", labelled.index), len(tasks))
        return text_pairs([tasks[i] for i in shuffled], self.section.reward_prompts == "first")

    def _report(
        self, labelled: Round, metrics: Mapping[str, float], model: RewardModel | None = None
    ) -> None:
        """Log the round. Candidates scored by this run count as environment steps; the accuracy and
        loss of ``model``, if it was fitted, are also added to the preference summary."""
        candidates = sum(len(item.candidates.candidates_K) for item in labelled.tasks)
        if self.section.preferences is None:
            self.loop.count(env_steps=candidates)
        facts = None if model is None else model.facts
        gaps = [pair.gap for item in labelled.tasks for pair in item.pairs]
        measured = {}
        if facts is not None and facts.accuracy is not None and facts.loss is not None:
            measured = {"reward_model/loss": facts.loss, "reward_model/accuracy": facts.accuracy}
        self.loop.tell(
            {
                **measured,
                "preferences/pairs": 0.0 if facts is None else float(facts.pairs),
                "preferences/gap_mean": sum(gaps) / max(1, len(gaps)),
                "preferences/reward_mean": labelled.reward_mean,
                "preferences/labelled": float(self.collector.labelled),
                **metrics,
            }
        )
        if not distributed.is_main() or facts is None:
            return
        path = self.loop.run_dir / PREFERENCES_SUMMARY
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
        if facts.accuracy is not None and facts.accuracy < least:
            raise WeakRewardModelError(
                f"the reward model orders {facts.accuracy:.1%} of {facts.held_out_pairs} held-out "
                f"pairs rightly, below marlhf.reward_min_accuracy={least}: reinforcement learning "
                "would follow noise. More pairs (preference_num_candidates, "
                "preference_pairs_per_sample), a higher reward_learning_rate or more "
                "reward_num_train_epochs may help; reward_min_accuracy=0 continues all the same"
            )


def text_pairs(tasks: Sequence[TaskPairs], prompts_first: bool = False) -> list[TextPair]:
    """Return the joint texts and the reward gap of every pair."""
    pairs = []
    for item in tasks:
        texts_K = joint_texts(item.candidates, prompts_first)
        pairs += [TextPair(texts_K[p.winner], texts_K[p.loser], p.gap) for p in item.pairs]
    return pairs


def say(text: str) -> None:
    notice(f"reward model: {text}")
