"""best_model/: which evaluation it is of, and that a kill leaves a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comlrl.errors import UserError
from comlrl.loop.best_model import FACTS, OLD, PARTIAL, BestModel
from tests.support import tiny_models


class Weights:
    """Something to save: its name goes into a file."""

    def __init__(self) -> None:
        self.name = "nothing"

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(self.name)


def offer(best: BestModel, weights: Weights, step: int, reward: float) -> None:
    weights.name = f"step {step}"
    best.offer({"training_step": step, "env_steps": 8 * step, "reward_mean": reward})


def kept(folder: Path) -> tuple[str, int]:
    facts = json.loads((folder / "best_model" / FACTS).read_text())
    return (folder / "best_model" / "weights").read_text(), facts["training_step"]


def test_the_highest_is_kept_and_of_equals_the_earlier(tmp_path: Path) -> None:
    weights = Weights()
    best = BestModel(tmp_path, weights.save)
    for step, reward in enumerate([1.0, 0.5, 2.0, 2.0, 1.5]):
        offer(best, weights, step, reward)
    assert kept(tmp_path) == ("step 2", 2)
    assert [f.name for f in tmp_path.iterdir()] == ["best_model"]


def test_resumed_it_goes_on_comparing_with_what_is_there(tmp_path: Path) -> None:
    weights = Weights()
    offer(BestModel(tmp_path, weights.save), weights, 2, 2.0)
    resumed = BestModel(tmp_path, weights.save)
    resumed.resume()
    offer(resumed, weights, 4, 1.9)
    assert kept(tmp_path) == ("step 2", 2)
    offer(resumed, weights, 6, 2.1)
    assert kept(tmp_path) == ("step 6", 6)
    anew = BestModel(tmp_path, weights.save)  # from the beginning: what lies there is of no account
    offer(anew, weights, 0, 0.1)
    assert kept(tmp_path) == ("step 0", 0)


@pytest.mark.parametrize("moment", ["writing", "between", "after"])
def test_a_kill_leaves_the_old_one_or_the_new_one(tmp_path: Path, moment: str) -> None:
    weights = Weights()
    offer(BestModel(tmp_path, weights.save), weights, 2, 2.0)
    weights.name = "step 4"
    weights.save(tmp_path / PARTIAL)
    if moment != "writing":
        (tmp_path / PARTIAL / FACTS).write_text('{"training_step": 4, "reward_mean": 3.0}')
        (tmp_path / "best_model").rename(tmp_path / OLD)
    if moment == "after":
        (tmp_path / PARTIAL).rename(tmp_path / "best_model")
    resumed = BestModel(tmp_path, weights.save)
    resumed.resume()
    assert kept(tmp_path) == (("step 2", 2) if moment == "writing" else ("step 4", 4))
    assert resumed.facts is not None and resumed.facts["training_step"] == kept(tmp_path)[1]
    assert [f.name for f in tmp_path.iterdir()] == ["best_model"]


def test_it_needs_evaluations() -> None:
    with pytest.raises(UserError, match="eval_interval=0 evaluates nothing"):
        tiny_models.config(output__save_best=True, eval_interval=0)


@pytest.mark.parametrize(
    ("keys", "keeps"),
    [
        ({}, True),
        ({"lora__enabled": False}, False),
        ({"lora__enabled": False, "output__save_final_model": True}, True),
        ({"output__save_final_model": False}, False),
    ],
    ids=str,
)
def test_adapters_are_saved_unless_switched_off(keys: dict, keeps: bool) -> None:
    config = tiny_models.config(**keys)
    assert config.keeps_final_model == keeps
    assert bool(config.no_weights) != keeps
    if "output__save_final_model" not in keys and not keeps:
        assert (
            "save_final_model=auto saves adapters, and lora.enabled=false trains none"
            in config.no_weights
        )
    saved = tiny_models.config(**keys, save_steps=1)
    assert saved.no_weights is None  # its checkpoints evaluate
