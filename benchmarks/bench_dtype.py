"""A frozen base's products in float32 and in bfloat16, and which of them `torch_dtype: auto` takes.

    python benchmarks/bench_dtype.py [--seconds 0.4]

tiny-coder's layers and head at the rows of an update (2048; there and, as the base is frozen, back
to the input) and of a decoding step (128), and one head with a vocabulary of 151,936 at 32 rows; by
one thread and by all cores. The two precisions take turns; the fastest of each counts, so that
neighbours on the machine weigh little.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.models.pretrained import multiplies_bfloat16_fast

LAYER = ((384, 256), (256, 256), (1024, 256), (256, 512))  # (out, in): qkv, o, gate and up, down
HEAD, LARGE = ((1216, 256),), ((151_936, 640),)
CASES = (
    ("a layer", LAYER, 2048, False), ("a layer, back", LAYER, 2048, True),
    ("head", HEAD, 2048, False), ("a layer", LAYER, 128, False), ("head", HEAD, 128, False),
    ("head of 151,936 × 640", LARGE, 32, False),
)  # fmt: skip
PRECISIONS = (torch.float32, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.4, help="for a line and precision")
    seconds = parser.parse_args().seconds
    print("| product | rows | threads | float32, GFLOP/s | bfloat16, GFLOP/s | ratio |")
    print("|:--|--:|--:|--:|--:|--:|")
    ratios = []
    for name, shapes, rows, back in CASES:
        work = 2 * rows * sum(math.prod(shape) for shape in shapes) / 1e9
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            torch.set_num_threads(threads)
            wide, narrow = (work / took for took in shortest(shapes, rows, back, seconds))
            ratios.append(narrow / wide)
            print(f"| {name} | {rows} | {threads} | {wide:.0f} | {narrow:.0f} | {ratios[-1]:.2f} |")
    cpu = torch.cpu.get_capabilities()
    chosen = "bfloat16" if multiplies_bfloat16_fast(cpu) else "float32"
    known = ", ".join(f"{key} {cpu.get(key, False)}" for key in ("amx_bf16", "avx512_bf16"))
    print(f"\nbfloat16 is faster in {sum(r > 1 for r in ratios)} of {len(ratios)} lines; ", end="")
    print(f"auto takes {chosen} ({cpu.get('cpu_name')}: {known})")


def shortest(shapes: Sequence[tuple[int, int]], rows: int, back: bool, seconds: float) -> list:
    """Seconds of all these products, in each precision."""
    weights = [[torch.randn(shape).to(kind) for shape in shapes] for kind in PRECISIONS]
    inputs = [[torch.randn(rows, w.shape[0 if back else 1]).to(w) for w in own] for own in weights]
    fastest, end = [math.inf] * len(PRECISIONS), math.inf
    while time.perf_counter() < end:
        for index, own in enumerate(zip(inputs, weights, strict=True)):
            start = time.perf_counter()
            for x, weight in zip(*own, strict=True):
                x @ weight if back else F.linear(x, weight)
            if end < math.inf:  # the first time compiles
                fastest[index] = min(fastest[index], time.perf_counter() - start)
        end = min(end, time.perf_counter() + seconds * len(PRECISIONS))
    return fastest


if __name__ == "__main__":
    main()
