"""Trains a reward model on pairs of joint texts with TRL's ``RewardTrainer``.

The loss is −log σ(r_winner − r_loser − m), with the margin m = ``Fit.margin`` · gap. Pairs with a
text beyond ``max_length`` are left out and counted. The trained model is frozen.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput

from comlrl.errors import UserError
from comlrl.models.fast.decoder import FastDecoder, fast_decoder
from comlrl.models.fast.lora_routing import add_router
from comlrl.models.pretrained import TOKENIZER_SAFETY, load_failure, resolve_model
from comlrl.preferences.candidates import PreferenceError
from comlrl.preferences.reward_model import Facts, RewardModel, classifier
from comlrl.preferences.text_states import last_states, shared_rows


class TextPair(NamedTuple):
    """The joint texts of a winner and a loser, and the difference of their task rewards (> 0)."""

    winner: str
    loser: str
    gap: float


@dataclass(frozen=True, kw_only=True)
class RewardBase:
    """The model that a reward model is trained from, and how to load and train it."""

    name: str  # as in the configuration
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    lora: Mapping[str, Any] | None = None  # LoraConfig's arguments; None: all weights are trained
    freeze_backbone: bool = False  # train only the score head
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Training settings of a reward model."""

    learning_rate: float
    epochs: int
    batch_size: int  # pairs
    max_length: int  # most tokens of a joint text
    seed: int
    in_order: bool = False  # False: pairs are shuffled
    prompts_first: bool = False  # format of the joint texts
    margin: float = 0.0  # m of a pair = margin · gap (Touvron et al. 2023, arXiv 2307.09288, eq. 2)


def train(
    base: RewardBase,
    fit: Fit,
    pairs: Sequence[TextPair],
    *,
    work_dir: Path,
    say: Callable[[str], None],
    before: Mapping[str, torch.Tensor] | None = None,
) -> RewardModel:
    """Train a reward model on ``pairs``, at least one, and freeze it.

    ``say`` prints progress. ``before``: weights of an earlier fit to continue from. Raises
    PreferenceError if all pairs are too long.
    """
    assert pairs, "a round without pairs is not fitted to"
    reward = begin(
        base,
        Facts(base=base.name, max_length=fit.max_length, prompts_first=fit.prompts_first),
        fit.seed,
        before,
    )
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
            f"reward_max_length={fit.max_length} (the longest: {longest} tokens) and are left out"
        )
    if not rows:
        raise PreferenceError(
            f"marlhf.reward_max_length: {fit.max_length} tokens hold none of {len(pairs)} pairs; "
            "raise it"
        )
    _fit(reward, base, fit, rows, work_dir, say)
    reward.freeze()
    return reward


def begin(
    base: RewardBase, facts: Facts, seed: int, weights: Mapping[str, torch.Tensor] | None
) -> RewardModel:
    """Return the base with the ``weights`` of an earlier fit (None: untrained), not frozen."""
    torch.manual_seed(seed)  # initializes the score head and LoRA's A matrices
    with _no_bar():  # the base is loaded again in every round
        model, tokenizer = _untrained(base)
    if weights is not None:
        model.load_state_dict(dict(weights), strict=False)
    return RewardModel(model, tokenizer, facts)


def _untrained(base: RewardBase) -> tuple[Any, Any]:
    """Load the base with a new score head, and its tokenizer; trained weights are float32."""
    partly = base.lora is not None or base.freeze_backbone
    try:
        settings = {**TOKENIZER_SAFETY, **base.tokenizer_kwargs}
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(base.name), **settings)
        dtype = base.dtype if partly else torch.float32
        model = classifier(base.name, dtype, **base.model_kwargs)
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds
        raise PreferenceError(
            f"reward_model_name: '{base.name}' cannot be loaded: {load_failure(error)}"
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


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


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

    class OneDevice(RewardConfig):
        @property
        def n_gpu(self) -> int:
            """Use at most one GPU; TRL would split each batch over all that this process sees."""
            return min(1, super().n_gpu)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a key is renamed in the next release
        arguments = OneDevice(
            output_dir=str(work_dir),
            learning_rate=fit.learning_rate,
            num_train_epochs=fit.epochs,
            per_device_train_batch_size=fit.batch_size,
            max_length=None,  # pairs that are too long were already left out
            seed=fit.seed % 2**32,  # NumPy's limit
            train_sampling_strategy="sequential" if fit.in_order else "random",
            # TRL's defaults are bf16 and gradient checkpointing on all devices
            bf16=base.dtype == torch.bfloat16,
            gradient_checkpointing=False,
            lr_scheduler_type="linear",  # a constant rate adds noise of the last pairs
            logging_steps=0.1,  # a tenth of the run
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=base.device == "cpu",
            dataloader_pin_memory=base.device != "cpu",
        )
    trainer = RewardTrainer(
        model=_fast_reader(reward.model, reward.tokenizer.pad_token_id),
        args=arguments,
        processing_class=reward.tokenizer,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        callbacks=[_progress(say)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _fast_reader(model: Any, pad_id: int) -> Any:
    """Wrap the classifier in a ``FastReader`` if the fast decoder supports it."""
    adapted = isinstance(model, PeftModel)
    inner: Any = model.get_base_model() if adapted else model
    fast = (
        fast_decoder(inner, add_router(inner), ["default"])
        if adapted
        else fast_decoder(inner, None)
    )
    return model if fast is None else FastReader(model, inner.score, fast, pad_id)


class FastReader(nn.Module):
    """A classifier for batches of TRL's trainer that skips padding, and computes texts that occur
    in several pairs, and common prefixes, only once."""

    def __init__(self, model: Any, score: nn.Module, fast: FastDecoder, pad_id: int) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.score, self.fast, self.pad_id = score, fast, pad_id

    def add_model_tags(self, tags: Sequence[str]) -> None:
        """Ignore tags, which the trainer adds for a model card that is never written."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> SequenceClassifierOutput:
        texts = [tuple(i[m > 0].tolist()) for i, m in zip(input_ids, attention_mask, strict=True)]
        place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        rows = shared_rows([list(text) for text in place])
        with torch.autocast(input_ids.device.type, enabled=False):
            states_RD = last_states(self.fast, rows, self.pad_id, input_ids.device)
            logits = self.score(states_RD.float())
        rank = torch.tensor([index for row in rows for index in row.indices]).argsort()
        order = rank[[place[text] for text in texts]]
        return SequenceClassifierOutput(logits=logits[order.to(logits.device)])


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
