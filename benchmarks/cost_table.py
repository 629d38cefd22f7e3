"""What a training step would take on GPUs that are not at hand: the estimate of --dry-run.

    python benchmarks/cost_table.py [--hardware h100] [--config magrpo_he_config] [--tasks 64]

Qwen2.5-Coder of 1.5B to 14B, 2 to 8 agents, 1 to 64 GPUs, by ``trainers/launch/cost/roofline.py``:
nothing is run and nothing downloaded. A Markdown table goes to standard output: seconds of a step =
generation + reward + update (in brackets the share of the generation that its operations take
however small they are), and the memory of a GPU. Nobody has measured these: each is given to one
digit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loggers.tables import table
from trainers.launch.commands import command_line
from trainers.launch.cost import roofline
from trainers.launch.wiring.sampling_settings import limits

KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SIZES = {  # of their config.json
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13824, 152_064, False),
}


def step(model: str, agents: int, gpus: int, options: argparse.Namespace) -> roofline.StepCost:
    """A GPU's part of a step."""
    keys = (f"magrpo.num_agents={agents}", f"magrpo.batch_size={options.tasks}")
    parsed = command_line.parse_arguments(
        "magrpo", ["--config", options.config, "--override", f"agent_model.name={model}", *keys]
    )
    config, work, _ = command_line.resolve("magrpo", parsed)
    on = roofline.hardware(f"{gpus}x{options.hardware}", config)
    on = replace(on, prompt=on.prompt or roofline.PROMPT)
    return roofline.step_cost(config, limits(config, work.roles), on)


def rough(value: float) -> str:
    """To one digit."""
    return f"{float(f'{value:.0e}'):g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--config", default="magrpo_he_config")
    parser.add_argument("--tasks", type=int, default=64)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size, shape in SIZES.items():
            model = Path(folder) / size
            model.mkdir()
            (model / "config.json").write_text(json.dumps(dict(zip(KEYS, shape, strict=True))))
            for agents in (2, 4, 8):
                row = [size, str(agents)]
                for gpus in (1, 8, 64):
                    one = step(str(model), agents, gpus, options)
                    parts = one.generation(), one.reward(), one.update()
                    fixed = replace(one, on=replace(one.on, launch=0.0)).generation()
                    share = 1 - fixed / parts[0]
                    spent = " + ".join(map(rough, parts))
                    row.append(f"{rough(sum(parts))} = {spent} ({rough(100 * share)} %)")
                held = sum(one.memory().values())
                rows.append([*row, rough(1e3 * one.exchange()), rough(held / 1e9)])
    heads = ["1 GPU, s", "8 GPUs, s", "64 GPUs, s", "all-reduce of 64, ms", "GB of one of 64"]
    print(table(["model", "agents", *heads], rows))


if __name__ == "__main__":
    main()
