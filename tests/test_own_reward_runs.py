"""Runs of teams that act in order, and of agents with their own rewards: one process, two, and
resumed after a kill; then evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from comlrl.trainers.launch.commands import evaluate
from tests.support.runs import (
    ROOT,
    Zygote,
    assert_in_sync,
    assert_same,
    metrics,
    small_of,
)

OWN = '''
from comlrl.types import Reward, Score

class Own(Reward):
    """Each agent wants its text to be longer than the mean, and than it was before."""

    by_agent = True

    def score(self, actions):
        return [self._score(action) for action in actions]

    def _score(self, action):
        past = action.history[-1].completions_N if action.history else action.completions_N
        mean = sum(map(len, action.completions_N)) / len(action.completions_N)
        own = tuple(
            i * len(text) - mean + 0.5 * (len(text) - len(before)) + 0.1 * action.turn
            for i, (text, before) in enumerate(zip(action.completions_N, past), 1)
        )
        return Score(sum(own) / len(own), by_agent=own)
'''
ORDER = {"turn_order": "sequential", "num_agents": 2}
TURNS = {"num_turns": 2}
MEAN = "reward.by_agent=mean"
CASES = {
    "magrpo": ("magrpo", ORDER | TURNS | {"advantage": "greedy"}, []),
    "grpo": ("grpo", TURNS, []),
    "ippo": ("ppo", ORDER | TURNS | {"kl_coef": 0.1}, []),
    "mappo": (
        "ppo",
        ORDER | TURNS | {"critic": "centralized", "granularity": "turn", "train_batch_size": 3},
        [],
    ),
    "shppo": ("shppo", ORDER | TURNS, [MEAN]),
    "madpo": ("madpo", ORDER | {"dpo_reference": "round"}, [MEAN]),
    "marlhf": ("marlhf", ORDER, [MEAN]),
}


def arguments(name: str, folder: Path) -> list[str]:
    algorithm, keys, more = CASES[name]
    beside = folder.parent / "here"
    beside.mkdir(exist_ok=True)
    (beside / "own.py").write_text(OWN)
    file = shutil.copy(ROOT / f"configs/{algorithm}_quickstart.yaml", beside)
    _, _, *rest = small_of(algorithm, folder)
    given = [f"{algorithm}.{key}={json.dumps(value)}" for key, value in keys.items()]
    given += ["reward.target=own:Own", "external.mode=plain", f"{algorithm}.max_steps=2"]
    given += ["agent_model.torch_dtype=float32"]  # rounding is to be small
    return ["--config", str(file), *rest, *given, *more]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_two_and_a_resumed_one(name: str, zygote: Zygote, tmp_path: Path) -> None:
    whole, killed, two = (tmp_path / folder for folder in ("whole", "killed", "two"))
    algorithm = CASES[name][0]
    zygote.finish(algorithm, arguments(name, whole))
    lines = metrics(whole)
    found = lines[-1]["metrics"]
    own = [found[f"agent_{i}/reward_mean"] for i in range(1 if name == "grpo" else 2)]
    assert found["reward_mean"] == pytest.approx(sum(own) / len(own))

    zygote.kill_and_resume(algorithm, arguments(name, killed), killed)
    assert_same(killed, whole)

    zygote.finish_team(2, algorithm, arguments(name, two))
    assert_in_sync(two, 2)
    if algorithm == "marlhf":  # data-parallel, TRL's trainer fills the reward model's last batch
        return
    for one, other in zip(lines, metrics(two), strict=True):
        assert one["metrics"].keys() == other["metrics"].keys()
        for key in ("reward_mean", "agent_0/reward_mean", "loss", "advantage_std", "value_loss"):
            value = one["metrics"].get(key)
            if value is not None:
                assert other["metrics"][key] == pytest.approx(value, rel=1e-2, abs=1e-4), key


@pytest.mark.slow
def test_evaluations_show_each_agents_reward(zygote: Zygote, tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(runs):
        zygote.finish("magrpo", [*arguments("magrpo", folder), f"seed={seed}"])
    out = tmp_path / "e.json"
    own = [f"agent_{i}/reward_mean" for i in range(2)]

    def evaluated(*given: str) -> dict:
        assert evaluate.main([*given, "--out", str(out)]) == 0
        return json.loads(out.read_text())

    found = evaluated("--checkpoint", str(runs[0]))
    assert {*own, f"turn_1/{own[0]}"} <= set(found["metrics"])
    assert all(name in out.with_suffix(".md").read_text() for name in own)
    found = evaluated("--checkpoint", str(runs[0]), "--replace", "0=silent")
    assert set(own) <= set(found["contributions"])
    found = evaluated("--cross-play", *map(str, runs))
    assert {"reward_mean", *own} <= set(found["matrices"])
