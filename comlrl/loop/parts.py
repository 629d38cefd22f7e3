"""What a run consists of: an algorithm, and the parts of it that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, Union

if TYPE_CHECKING:
    import torch


class Stateful(Protocol):
    """What keeps its state in tensors that it makes itself."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None: ...


Part = Union[Stateful, "torch.nn.Module"]  # of what a checkpoint holds; a file each


class Trainer(Protocol):
    """An algorithm: what a train script builds, a loop paces and a checkpoint keeps."""

    def train(self) -> None: ...

    def parts(self) -> Mapping[str, Part]:
        """All that training changes, by the names of its files in a checkpoint."""
