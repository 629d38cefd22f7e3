"""MARLHF's joint reward model: a one-label sequence classifier on the text of a joint action.

Training and scoring tokenize texts with ``RewardModel.encode``. When scored, a text beyond
``max_length`` keeps its last tokens. ``reward_training.py`` trains the model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from comlrl.errors import UserError
from comlrl.models.fast.decoder import FastDecoder, fast_decoder
from comlrl.models.fast.lora_routing import add_router
from comlrl.models.pretrained import MODEL_SAFETY, TOKENIZER_SAFETY, load_failure, resolve_model
from comlrl.models.rows import row_groups, split_rows
from comlrl.preferences.candidates import PreferenceError, joint_text, joint_texts
from comlrl.preferences.pairs import Round, TaskPairs
from comlrl.preferences.text_states import last_states, shared_rows
from comlrl.run_files import ADAPTER
from comlrl.tasks.prompts import Prompts
from comlrl.types import JointAction, Reward, RolloutResult, Row, Score

FACTS = "reward_model.json"
BATCH_TOKENS = 4096  # padded tokens scored at once


class WeakRewardModelError(UserError):
    """A reward model that is no better than chance; the message says what to change."""

    exit_code = 1


@dataclass(kw_only=True)
class Facts:
    """Facts about a reward model, stored as ``reward_model.json`` beside its weights."""

    base: str
    max_length: int
    prompts_first: bool = False  # format of the joint texts that it was trained on
    mean: float = 0.0  # of the raw scores of the round's candidates
    std: float = 1.0
    accuracy: float | None = None  # share of held-out pairs ordered correctly; None without pairs
    loss: float | None = None  # on the held-out pairs
    pairs: int = 0  # trained on
    held_out_pairs: int = 0
    too_long: int = 0  # training pairs left out because a text exceeds max_length
    round: int = 0  # whose labels it was trained on last


class RewardModel:
    """A frozen scorer of joint texts."""

    def __init__(self, model: Any, tokenizer: Any, facts: Facts) -> None:
        self.model, self.tokenizer, self.facts = model, tokenizer, facts
        self.fast: FastDecoder | None = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a complete text, followed by end-of-sequence."""
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]

    def holds(self, text: str) -> bool:
        """Return whether a text is short enough to train on."""
        return len(self.encode(text)) <= self.facts.max_length

    @torch.no_grad()
    def raw(self, texts: Sequence[str]) -> list[float]:
        """Return the classifier's outputs, in order; repeated texts are computed once."""
        every = list(dict.fromkeys(texts))
        ids = [self.encode(text)[-self.facts.max_length :] for text in every]
        self.model.eval()
        read = self._by_modules(ids) if self.fast is None else self._by_fast_decoder(ids, self.fast)
        scores = {every[index]: score for index, score in read}
        return [scores[text] for text in texts]

    def _by_modules(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, float]]:
        """Yield (index of a text, its score), batching texts of similar length."""
        rows = [Row(tuple(ids), (), (), (index,)) for index, ids in enumerate(texts)]
        for group in row_groups(rows, BATCH_TOKENS):
            yield from zip(
                (row.indices[0] for row in group),
                self._forward([row.prompt_ids for row in group]),
                strict=True,
            )

    def _by_fast_decoder(
        self, texts: Sequence[list[int]], fast: FastDecoder
    ) -> Iterator[tuple[int, float]]:
        """Yield (index of a text, its score), computing common prefixes once."""
        device, pad = next(self.model.parameters()).device, self.tokenizer.pad_token_id
        rows = split_rows(shared_rows(texts), BATCH_TOKENS)
        with fast.sampling():
            for group in row_groups(rows, BATCH_TOKENS):
                states_RD = last_states(fast, group, pad, device)
                raw = self.model.get_base_model().score(states_RD.float()).squeeze(-1).tolist()
                yield from zip((i for row in group for i in row.indices), raw, strict=True)

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Return scores standardized by the mean and deviation of the round's candidates."""
        return [(score - self.facts.mean) / self.facts.std for score in self.raw(texts)]

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = next(self.model.parameters()).device
        with _autocast(self.model):
            logits = self.model(ids.to(device), attention_mask=mask.to(device)).logits
        return logits.float().squeeze(-1).tolist()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights: adapter and head with LoRA, otherwise all weights."""
        state = self.model.state_dict()
        if not isinstance(self.model, PeftModel):
            return state
        return {n: t for n, t in state.items() if "lora_" in n or ".score." in n}

    def freeze(self) -> None:
        """Freeze the model, and use the fast decoder from now on if it supports the model."""
        self.model.requires_grad_(False).eval()
        if isinstance(self.model, PeftModel):
            inner: Any = self.model.get_base_model()
            inner.score.float()  # lower precision would round close scores to the same value
            self.fast = fast_decoder(inner, add_router(inner), ["default"], learning=False)

    def measure(self, labelled: Round) -> None:
        """Measure the mean and deviation of the scores of all the round's candidates, including
        tasks without pairs, and accuracy and loss on the held-out pairs."""
        raw_of = {item.task_id: self.scores_of(item) for item in labelled.tasks}
        facts, values = self.facts, torch.tensor([raw for each in raw_of.values() for raw in each])
        facts.mean, facts.std = float(values.mean()), float(values.std(correction=0)) or 1.0
        held_out = [margins(item, raw_of[item.task_id]) for item in labelled.held_out]
        margin_P = torch.tensor([margin for each in held_out for margin in each])
        facts.held_out_pairs, facts.accuracy, facts.loss = len(margin_P), None, None
        if len(margin_P):
            facts.accuracy = float((margin_P > 0).float().mean())
            facts.loss = float(-torch.nn.functional.logsigmoid(margin_P).mean())

    def order(self, tasks: Sequence[TaskPairs]) -> float | None:
        """Return the share of these tasks' pairs ordered correctly; None without pairs."""
        right = [m > 0 for item in tasks for m in margins(item, self.scores_of(item))]
        return sum(right) / len(right) if right else None

    def scores_of(self, item: TaskPairs) -> list[float]:
        """Return the raw score of each candidate."""
        return self.raw(joint_texts(item.candidates, self.facts.prompts_first))

    def save(self, folder: Path) -> None:
        """Save adapter and head (or all weights) and the tokenizer, then the facts."""
        (folder / FACTS).unlink(missing_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / FACTS).write_text(
            json.dumps(asdict(self.facts), indent=1) + "\n", encoding="utf-8"
        )


def margins(item: TaskPairs, raw_K: Sequence[float]) -> list[float]:
    """Return, for each pair, the winner's raw score minus the loser's."""
    return [raw_K[pair.winner] - raw_K[pair.loser] for pair in item.pairs]


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RewardModel:
    """Load what ``RewardModel.save`` wrote.

    Raises PreferenceError if the folder contains no reward model.
    """
    try:
        facts = Facts(**json.loads((folder / FACTS).read_text(encoding="utf-8")))
        tokenizer = AutoTokenizer.from_pretrained(folder, **TOKENIZER_SAFETY)
        adapted = (folder / ADAPTER).exists()
        # Wholly trained weights keep the precision in which they were saved.
        model = classifier(facts.base, dtype) if adapted else classifier(str(folder), "auto")
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model.score.float()  # as it was trained
        if adapted:
            model = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # the libraries raise many kinds
        reason = load_failure(error)
        raise PreferenceError(f"reward_model: '{folder}' cannot be loaded: {reason}") from error
    reward = RewardModel(model.to(device), tokenizer, facts)
    reward.freeze()
    return reward


def classifier(name: str, dtype: torch.dtype | Literal["auto"], **more: Any) -> Any:
    """Return a language model with a new score head, without the warning about its new weights."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            resolve_model(name), num_labels=1, dtype=dtype, **{**MODEL_SAFETY, **more}
        )
    finally:
        transformers_logging.set_verbosity(level)


def _autocast(model: Any) -> Any:
    """Return bf16 autocast for bf16 bases, whose adapter and head are float32, else a null
    context."""
    parameter = next(model.parameters())
    if parameter.dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(parameter.device.type, dtype=torch.bfloat16)


class ModelReward(Reward):
    """Uses the model's score as the reward, and keeps the task's reward for the log.

    With rounds, checkpoints contain the model: ``restored`` holds its facts and weights until the
    model is built from them.
    """

    def __init__(self, task_reward: Reward, prompts: Prompts) -> None:
        self.task_reward, self.prompts = task_reward, prompts
        self.model: RewardModel | None = None
        self.restored: tuple[Facts, dict[str, torch.Tensor]] | None = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        if self.model is None:  # no step was made
            return {}
        facts = json.dumps(asdict(self.model.facts)).encode()
        return self.model.weights() | {"facts": torch.tensor(list(facts), dtype=torch.uint8)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            return
        weights = {name: tensor for name, tensor in tensors.items() if name != "facts"}
        self.restored = Facts(**json.loads(bytes(tensors["facts"].tolist()))), weights

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        checked = self.task_reward.score(actions)
        return [
            replace(score, value=value, task_reward=score.value)
            for value, score in zip(self._values(actions), checked, strict=True)
        ]

    def _values(self, actions: Sequence[JointAction]) -> list[float]:
        """Return the model's score of each joint action."""
        assert self.model is not None, "the reward model comes before the online stage"
        first = self.model.facts.prompts_first
        texts = [
            joint_text(self.prompts.texts(a.task, len(a.completions_N)), a.completions_N, first)
            for a in actions
        ]
        return self.model.scores(texts)

    def of_evaluation(self, trees: Sequence[RolloutResult]) -> dict[str, float]:
        """Return the model's mean score of evaluation trees, reported beside their task reward."""
        actions = [action for tree in trees for action in tree.scored_actions()]
        if not actions or self.model is None:  # a run of 0 steps fits no model
            return {}
        values = self._values(actions)
        return {"model_score_mean": sum(values) / len(values)}

    def close(self) -> None:
        self.task_reward.close()
