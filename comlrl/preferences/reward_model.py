"""MARLHF's joint reward model: a one-label sequence classifier on the text of a joint action.

TRL's ``RewardTrainer`` fits it to preference pairs with −log σ(r_winner − r_loser − m), after which
it is frozen; the margin m is 0 unless ``Fit.margin`` asks for one. Texts are tokenized here, once
for training and scoring alike: end-of-sequence is appended, and a text beyond ``max_length`` keeps
its last tokens when it is scored; pairs with such a text are left out of the fit and counted.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import logging as transformers_logging

from comlrl.models.fast.decoder import FastDecoder, fast_decoder
from comlrl.models.fast.lora_routing import add_router
from comlrl.models.loading import resolve_model
from comlrl.models.rows import row_groups, split_rows
from comlrl.preferences.candidates import PreferenceError, joint_text, joint_texts
from comlrl.preferences.pairs import TaskPairs
from comlrl.preferences.text_states import last_states, shared_rows
from comlrl.tasks.prompts import first_prompts
from comlrl.types import JointAction, Reward, Score, Tree

FACTS = "reward_model.json"
BATCH_TOKENS = 4096  # padded tokens scored at once


class TextPair(NamedTuple):
    """Joint texts of winner and loser, and the difference of their task rewards (> 0)."""

    winner: str
    loser: str
    gap: float


class WeakRewardModelError(ValueError):
    """A reward model that is no better than chance; the message says what to change."""

    user_error = True  # told in one line,
    exit_code = 1  # though the input was in order


@dataclass(frozen=True)
class RewardBase:
    """The model that a reward model starts from, and how it is held."""

    name: str  # as the configuration says it
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    lora: Mapping[str, Any] | None = None  # LoraConfig's arguments; None: all weights are trained
    freeze_backbone: bool = False  # train the score head alone
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """How a reward model is trained."""

    learning_rate: float
    epochs: int
    batch_size: int  # pairs
    max_length: int  # tokens of a joint text
    seed: int
    in_order: bool = False  # else pairs are shuffled
    margin: float = 0.0  # m of a pair = margin · gap (Touvron et al. 2023, arXiv 2307.09288, eq. 2)


@dataclass
class Facts:
    """What is known of a reward model; ``reward_model.json`` beside its weights."""

    base: str
    max_length: int
    mean: float = 0.0  # of the raw scores of the held-out tasks' candidates
    std: float = 1.0
    accuracy: float = 0.0  # share of held-out pairs that it orders rightly
    loss: float = 0.0  # on those pairs
    pairs: int = 0  # trained on
    held_out_pairs: int = 0
    too_long: int = 0  # training pairs left out, a text of theirs exceeding max_length


class RewardModel:
    """A frozen scorer of joint texts."""

    def __init__(self, model: Any, tokenizer: Any, facts: Facts) -> None:
        self.model, self.tokenizer, self.facts = model, tokenizer, facts
        self.fast: FastDecoder | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole text, end-of-sequence behind it."""
        return [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]

    @torch.no_grad()
    def raw(self, texts: Sequence[str]) -> list[float]:
        """The classifier's outputs, in order; a text that occurs twice is read once."""
        ids = {text: self.encode(text)[-self.facts.max_length :] for text in dict.fromkeys(texts)}
        scores: dict[str, float] = {}
        self.model.eval()
        if self.fast is not None:
            return self._raw_fast(texts, ids, self.fast)
        for group in _groups(ids):
            scores.update(zip(group, self._forward([ids[text] for text in group]), strict=True))
        return [scores[text] for text in texts]

    def _raw_fast(
        self, texts: Sequence[str], ids: Mapping[str, list[int]], fast: FastDecoder
    ) -> list[float]:
        every = list(ids)
        scores: dict[str, float] = {}
        device, pad = next(self.model.parameters()).device, self.tokenizer.pad_token_id
        rows = split_rows(shared_rows([ids[text] for text in every]), BATCH_TOKENS)
        with fast.sampling():
            for group in row_groups(rows, BATCH_TOKENS):
                states_RD = last_states(fast, group, pad, device)
                raw = self.model.get_base_model().score(states_RD.float()).squeeze(-1).tolist()
                numbers = [index for row in group for index in row.indices]
                scores.update(zip([every[i] for i in numbers], raw, strict=True))
        return [scores[text] for text in texts]

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Raw scores less their held-out mean, over their held-out standard deviation."""
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

    def freeze(self) -> None:
        """No more training; texts are read the fast way where there is one."""
        self.model.requires_grad_(False).eval()
        if isinstance(self.model, PeftModel):
            inner: Any = self.model.get_base_model()
            inner.score.float()  # scores that lie close are not rounded to one
            self.fast = fast_decoder(inner, add_router(inner), 1, learning=False)

    def measure(self, held_out: Sequence[TaskPairs]) -> None:
        """Take mean and deviation of held-out candidates, and the accuracy on their pairs."""
        chosen, rejected, every = [], [], []
        for item in held_out:
            raw = self.raw(joint_texts(item.candidates))
            every += raw
            chosen += [raw[pair.winner] for pair in item.pairs]
            rejected += [raw[pair.loser] for pair in item.pairs]
        margin = torch.tensor(chosen) - torch.tensor(rejected)
        facts, values = self.facts, torch.tensor(every)
        facts.mean, facts.std = float(values.mean()), float(values.std(correction=0)) or 1.0
        facts.accuracy = float((margin > 0).float().mean())
        facts.loss = float(-torch.nn.functional.logsigmoid(margin).mean())
        facts.held_out_pairs = len(chosen)

    def save(self, folder: Path) -> None:
        """Adapter and head (or all weights), tokenizer and facts; the facts last."""
        (folder / FACTS).unlink(missing_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / FACTS).write_text(json.dumps(asdict(self.facts), indent=1) + "\n")


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RewardModel:
    """What ``RewardModel.save`` wrote.

    Raises PreferenceError where the folder holds no reward model.
    """
    try:
        facts = Facts(**json.loads((folder / FACTS).read_text()))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        adapted = (folder / "adapter_config.json").exists()
        source = resolve_model(facts.base) if adapted else str(folder)
        model = _classifier(source, dtype)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model.score.float()  # as it was trained
        if adapted:
            model = PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PreferenceError(f"reward_model: '{folder}' cannot be loaded: {reason}") from error
    reward = RewardModel(model.to(device), tokenizer, facts)
    reward.freeze()
    return reward


def train(
    base: RewardBase,
    fit: Fit,
    pairs: Sequence[TextPair],
    *,
    work_dir: Path,
    say: Callable[[str], None],
) -> RewardModel:
    """A classifier fitted to pairs of texts. Raises PreferenceError where none can be."""
    torch.manual_seed(fit.seed)  # the score head and LoRA's A matrices are drawn at random
    model, tokenizer = _untrained(base)
    reward = RewardModel(model, tokenizer, Facts(base.name, fit.max_length))
    encoded = [(reward.encode(pair.winner), reward.encode(pair.loser)) for pair in pairs]
    rows = [
        {"chosen_ids": w, "rejected_ids": r, "margin": fit.margin * pair.gap}
        for pair, (w, r) in zip(pairs, encoded, strict=True)
        if max(len(w), len(r)) <= fit.max_length
    ]
    reward.facts.pairs, reward.facts.too_long = len(rows), len(pairs) - len(rows)
    if reward.facts.too_long:
        longest = max(len(ids) for pair in encoded for ids in pair)
        say(
            f"{reward.facts.too_long} of {len(pairs)} pairs are longer than "
            f"reward_max_length={fit.max_length} (the longest has {longest} tokens): left out"
        )
    if not rows:
        raise PreferenceError(
            f"reward_max_length: {fit.max_length} tokens hold none of the {len(pairs)} pairs; "
            "raise it"
        )
    _fit(reward, base, fit, rows, work_dir, say)
    reward.freeze()
    return reward


def _untrained(base: RewardBase) -> tuple[Any, Any]:
    """The base with a fresh score head; trained weights are held in float32."""
    source = resolve_model(base.name)
    partly = base.lora is not None or base.freeze_backbone
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **base.tokenizer_kwargs)
        dtype = base.dtype if partly else torch.float32
        model = _classifier(source, dtype, **base.model_kwargs)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PreferenceError(
            f"reward_model_name: '{base.name}' cannot be loaded: {reason}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if base.freeze_backbone:
        model.requires_grad_(False)
        model.score.requires_grad_(True)
    elif base.lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **base.lora))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.to(base.device), tokenizer


def _classifier(source: str, dtype: torch.dtype, **more: Any) -> Any:
    """A language model with a fresh score head, without a report that the head is fresh."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            source, num_labels=1, dtype=dtype, **more
        )
    finally:
        transformers_logging.set_verbosity(level)


def _fit(
    reward: RewardModel,
    base: RewardBase,
    fit: Fit,
    rows: Sequence[Mapping[str, Any]],
    work_dir: Path,
    say: Callable[[str], None],
) -> None:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import RewardConfig, RewardTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a key's new name in the next release
        arguments = RewardConfig(
            output_dir=str(work_dir),
            learning_rate=fit.learning_rate,
            num_train_epochs=fit.epochs,
            per_device_train_batch_size=fit.batch_size,
            max_length=None,  # what is too long has been left out and told
            seed=fit.seed,
            train_sampling_strategy="sequential" if fit.in_order else "random",
            bf16=base.dtype
            == torch.bfloat16,  # TRL's defaults are bf16 and checkpointing everywhere
            gradient_checkpointing=False,
            lr_scheduler_type="linear",  # a constant rate leaves the last pairs' noise in the score
            logging_steps=0.1,  # a tenth of the run
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=base.device == "cpu",
            dataloader_pin_memory=base.device != "cpu",
        )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process trains on one device
    trainer = RewardTrainer(
        model=reward.model,
        args=arguments,
        processing_class=reward.tokenizer,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        callbacks=[_progress(say)],
    )
    trainer.remove_callback(PrinterCallback)
    with _fast_reading(reward.model, reward.tokenizer.pad_token_id):
        trainer.train()


@contextlib.contextmanager
def _fast_reading(model: Any, pad_id: int) -> Iterator[None]:
    """Within, a classifier that can be read the fast way reads so: winners and losers, as TRL's
    trainer hands them over, without their padding, and nothing twice: neither a text that is in
    several pairs nor what texts have in common."""
    adapted = isinstance(model, PeftModel)
    inner: Any = model.get_base_model() if adapted else model
    fast = fast_decoder(inner, add_router(inner), 1) if adapted else fast_decoder(inner, None, 0)

    def forward(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> SequenceClassifierOutput:
        assert fast is not None
        texts = [tuple(i[m > 0].tolist()) for i, m in zip(input_ids, attention_mask, strict=True)]
        place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        rows = shared_rows([list(text) for text in place])
        with torch.autocast(input_ids.device.type, enabled=False):
            states_RD = last_states(fast, rows, pad_id, input_ids.device)
            logits = inner.score(states_RD.float())
        rank = torch.tensor([index for row in rows for index in row.indices]).argsort()
        order = rank[[place[text] for text in texts]]
        return SequenceClassifierOutput(logits=logits[order.to(logits.device)])

    if fast is None:
        yield
        return
    inner.forward = forward
    try:
        yield
    finally:
        del inner.forward


def _progress(say: Callable[[str], None]) -> Any:
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
            if "loss" in (logs or {}):
                say(
                    f"{state.global_step}/{state.max_steps} updates, loss {logs['loss']:.3f}, "
                    f"{logs['accuracy']:.0%} of the pairs ordered rightly"
                )

    return Progress()


def _autocast(model: Any) -> Any:
    """bf16 bases have a float32 head and adapter; elsewhere nothing is cast."""
    parameter = next(model.parameters())
    if parameter.dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(parameter.device.type, dtype=torch.bfloat16)


def _groups(ids: Mapping[str, Sequence[int]]) -> Iterator[list[str]]:
    """Texts of like length together, ``BATCH_TOKENS`` padded tokens at most (one text at least)."""
    group: list[str] = []
    for text in sorted(ids, key=lambda text: -len(ids[text])):
        if group and len(ids[group[0]]) * (len(group) + 1) > BATCH_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


class ModelReward:
    """The model's score as the reward; the task reward's breakdown travels with it, for the log."""

    def __init__(self, task_reward: Reward) -> None:
        self.task_reward = task_reward
        self.model: RewardModel | None = None

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        assert self.model is not None, "the reward model comes before the online stage"
        texts = [
            joint_text(first_prompts(a.task, len(a.completions_N)), a.completions_N)
            for a in actions
        ]
        checked = self.task_reward.score(actions)
        return [
            Score(value, known.breakdown)
            for value, known in zip(self.model.scores(texts), checked, strict=True)
        ]

    def of_evaluation(self, trees: Sequence[Tree]) -> dict[str, float]:
        """The model's mean score of evaluation trees, to stand beside their task reward."""
        actions = [
            JointAction(
                tree.task,
                tuple(t.completions_G[g].text for t, g in zip(node.agents_N, k, strict=True)),
            )
            for tree in trees
            for node in tree.nodes
            for k in node.joint_actions_K
        ]
        if not actions:
            return {}
        values = [score.value for score in self.score(actions)]
        return {"model_score_mean": sum(values) / len(values)}

    def close(self) -> None:
        self.task_reward.close()
