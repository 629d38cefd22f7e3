"""CUDA graphs of functions on static tensors; without a GPU, the functions run directly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from comlrl.errors import notice

WARM_UPS = 2


class Graphs:
    """CUDA graphs, captured at the first call and replayed afterwards."""

    def __init__(self, capturing: bool) -> None:
        """Initialize. ``capturing``: whether there is a GPU, and graphs are enabled."""
        self.capturing = capturing
        self.pool: Any = torch.cuda.graph_pool_handle() if self.capturing else None
        self.graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, function: Callable[[], None], changed: Sequence[Tensor]) -> None:
        """Run ``function``, which reads and writes the same tensors at every call under ``key``.

        ``changed``: tensors that it reads and then changes, restored after the warm-up.
        """
        if not self.capturing:
            function()
            return
        if key not in self.graphs:
            try:
                self.graphs[key] = self._captured(function, changed)
            except torch.OutOfMemoryError:
                self.capturing = False
                torch.cuda.empty_cache()
                notice("out of memory while capturing a CUDA graph: sampling continues without")
                function()
                return
        self.graphs[key].replay()

    def _captured(self, function: Callable[[], None], changed: Sequence[Tensor]) -> Any:
        before = [x.clone() for x in changed]

        def restore() -> None:
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)

        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
        finally:
            restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            function()
        return graph
