"""A probe of whether an adapter's input reveals a prompt's contents.

Where the input of a matrix is nearly the same for all prompts, an adapter beside that matrix moves
the answers to all prompts together. Reinforcement learning then ends in one answer for everything,
for its noise moves all answers together much more than its signal moves them apart. So the inputs
are to differ with the contents, and by as much as possible: the probe compares directions alone
(cosines), and has to find them far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import Qwen2ForCausalLM

from tools.tiny_player.situations import Situation

PLACES, LABELS = 10, 256  # contents of a prompt, and different ones of a place
SCALE = 12.0  # of a cosine as a logit
READ = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # by their inputs
NOTHING = -100


class Labels:
    """Contents as class numbers, given out as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def encode(self, rows: Sequence[Situation]) -> torch.Tensor:
        """Return [R, PLACES] int64; NOTHING where a prompt has no content."""
        labels = torch.full((len(rows), PLACES), NOTHING)
        for line, row in zip(labels, rows, strict=True):
            for place, text in enumerate(row.contents):
                if text:
                    line[place] = self.numbers.setdefault(text, len(self.numbers))
        assert len(self.numbers) <= LABELS
        return labels


class Probe:
    """Linear classifiers on directions, one for each place of the contents and each input that is
    read: that of the matrices in ``READ``, but for the first layer's queries, which know one token
    alone. Reads the model's latest forward pass."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        layers = [f"model.layers.{i}." for i in range(model.config.num_hidden_layers)]
        names = [layer + matrix for layer in layers for matrix in READ][1:]
        self.inputs: dict[str, torch.Tensor] = {}
        self.weights: list[torch.nn.Parameter] = []
        self._hooks = []
        for name in names:
            matrix = model.get_submodule(name)
            assert isinstance(matrix, torch.nn.Linear)
            self.weights.append(
                torch.nn.Parameter(torch.randn(PLACES * LABELS, matrix.in_features))
            )
            self._hooks.append(matrix.register_forward_pre_hook(self._reader(name)))

    def _reader(self, name: str):  # type: ignore[no-untyped-def]
        def read(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.inputs[name] = inputs[0]

        return read

    def loss(
        self, prompt_ends: tuple[list[int], list[int]], labels_RP: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean cross-entropy over contents and inputs, at the prompts' last token."""
        count = max(1, int((labels_RP != NOTHING).sum()))
        losses = []
        for inputs, weight in zip(self.inputs.values(), self.weights, strict=True):
            directions = normalize(inputs[prompt_ends], dim=-1)
            cosines = directions @ normalize(weight, dim=-1).T
            logits = SCALE * cosines.view(-1, LABELS)
            losses.append(
                cross_entropy(logits, labels_RP.flatten(), ignore_index=NOTHING, reduction="sum")
            )
        return torch.stack(losses).mean() / count

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
