"""The arena's cells: the configuration of each algorithm on each task.

Each algorithm has the same settings on all tasks, and all algorithms have the same policy learning
rate. A step has ``BATCH`` tasks with at most ``TREE`` scored joint actions each; the number of
completions is the largest that fits, and at least two. A round of preferences has as many labelled
joint candidates as a step has joint actions. PPO and SHPPO make four updates per step, whatever its
number of states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from comlrl.config.algorithms import SECTIONS, CommonConfig, MAGRPOConfig
from comlrl.config.keys import keys_of
from comlrl.errors import UserError, near
from comlrl.trainers.launch.cost.tree_size import Growth, growth

MODEL = "builtin:tiny-player"
BATCH = 8  # tasks per training step
TREE = 16  # most scored joint actions per task and training step
ROUND, CANDIDATES = 16, 8  # preference learning: tasks per round, joint candidates per task
EPISODES = 256  # approximate number of episodes per evaluation
RATE = 1.0e-3  # policy learning rate; at 3e-3 cells of most algorithms end in illegal answers
TEMPERATURE = 0.5  # at 1.0, tiny-player's last layer limits the probability of `iron` to 0.65
PARTS = 2  # minibatches per pass of PPO and SHPPO
POLICY = {"learning_rate": RATE, "kl_coef": 0.02}
PPO = {"ppo_epochs": 2, "train_batch_size": BATCH // PARTS, "value_learning_rate": 3.0e-3,
       "value_clip_range": None, **POLICY}  # fmt: skip
PREFERENCES = {
    "round_tasks": ROUND, "batch_size": ROUND, "preference_num_candidates": CANDIDATES,
    "preference_pairs_per_sample": None, "pair_selection": "all",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row of the scorecard."""

    trained_by: str  # the algorithm's section and train command
    keys: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # other sections
    _: KW_ONLY
    script: Path | None = None  # a custom train script
    stages: int = 1  # 2 if a round scores joint actions for labels and for online learning


@dataclass(frozen=True, slots=True)
class ArenaTask:
    """A column of the scorecard."""

    game: str  # the name of the domain and of its builtin data
    episodes: int  # rows of the evaluation split
    keys: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # other sections
    _: KW_ONLY
    cross_play: bool = False  # evaluate teams whose agents come from different seeds


ALGORITHMS: dict[str, Algorithm] = {
    "magrpo": Algorithm("magrpo", POLICY),
    "magrpo-optimistic": Algorithm("magrpo", {**POLICY, "partner_credit": "optimistic"}),
    "magrpo-cross": Algorithm("magrpo", {**POLICY, "joint_mode": "cross"}),
    "ippo": Algorithm("ppo", {**PPO, "critic": "independent", "granularity": "turn"}),
    "ippo-shared": Algorithm(
        "ppo", {**PPO, "critic": "independent", "granularity": "turn", "shared_policy": True}
    ),
    "mappo": Algorithm("ppo", {**PPO, "critic": "centralized", "granularity": "turn"}),
    "shppo": Algorithm("shppo", PPO),
    "madpo": Algorithm(
        "madpo",
        {**PREFERENCES, "learning_rate": RATE, "dpo_beta": 1.0, "dpo_reference": "round",
         "use_environment_step": False, "preference_holdout": 0.0},
    ),
    "marlhf": Algorithm(
        "marlhf",
        {**PREFERENCES, "reward_learning_rate": 2.0e-3, "reward_num_train_epochs": 3,
         "reward_train_batch_size": 48, "reward_prompts": "first", "reward_min_accuracy": 0.0,
         "rl_algorithm": "magrpo"},
        {"magrpo": POLICY},
        stages=2,
    ),
}  # fmt: skip

THREE_TURNS = {"num_turns": 3, "discount": 1.0}
IN_ORDER = {"turn_order": "sequential", "num_generations_sequential": 2}
TASKS: dict[str, ArenaTask] = {
    "codebook": ArenaTask("arena-codebook", 16, IN_ORDER),
    "climbing": ArenaTask("arena-climbing", 16),
    "shards": ArenaTask("arena-shards", 64, {**IN_ORDER, "num_agents": 3}),
    "lock-dense": ArenaTask(
        "arena-lock", 9, THREE_TURNS, {"reward": {"arguments": {"pay": "dense"}}}
    ),
    "lock-sparse": ArenaTask("arena-lock", 9, THREE_TURNS),
    "chores": ArenaTask("arena-chores", 16, {"num_agents": 4}),
    "levers": ArenaTask("arena-levers", 16, cross_play=True),
    "dilemma": ArenaTask("arena-dilemma", 16),
    "dilemma-shared": ArenaTask("arena-dilemma", 16, {}, {"reward": {"by_agent": "mean"}}),
    "dilemma-repeated": ArenaTask("arena-dilemma", 16, THREE_TURNS),
}  # fmt: skip


def chosen(option: str, text: str | None, rows: Mapping[str, Any]) -> list[str]:
    """Split names at commas; None: all. Raises UserError for an unknown name."""
    names = list(rows) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in rows:
            raise UserError(f"{option}: '{name}'; {near(name, rows, 'there are {}')}")
    return list(dict.fromkeys(names))


def chosen_algorithms(text: str | None) -> dict[str, Algorithm]:
    """Return the algorithms of ``--algorithms``: names, or ``NAME=FILE`` for a custom train script.
    Raises UserError for an unknown name and a missing script."""
    rows = dict(ALGORITHMS)
    for item in map(str.strip, (text or "").split(",")):
        name, equals, script = item.partition("=")
        if not equals:
            continue
        if name in SECTIONS or name in ALGORITHMS or not name.isidentifier():
            raise UserError(
                f"--algorithms: '{item}'; use the name that your script passes to main, which must "
                "differ from the shipped ones"
            )
        if not Path(script).is_file():
            raise UserError(f"--algorithms: '{script}' does not exist; name a train script")
        rows[item] = Algorithm(name, script=Path(script).resolve())
    names = chosen("--algorithms", text, rows)
    return {name.partition("=")[0]: rows[name] for name in names}


def configuration(
    algorithm: Algorithm, task: ArenaTask, seed: int, joint_actions: int, run_dir: Path
) -> dict[str, Any]:
    """Return a cell's configuration as plain values for YAML. ``joint_actions``: the number scored
    in training, rounded up to whole steps."""
    section: dict[str, Any] = {
        "num_agents": 2, "num_turns": 1, "batch_size": BATCH, "num_train_epochs": None,
        "lr_scheduler": "linear", "max_new_tokens": 12, "temperature": TEMPERATURE,
        "logging_steps": 10, "eval_interval": joint_actions, "eval_num_samples": None,
        "eval_answers": max(1, EPISODES // task.episodes), **task.keys, **algorithm.keys,
    }  # fmt: skip
    section_class = SECTIONS.get(algorithm.trained_by, CommonConfig)
    if "preference_num_candidates" in keys_of(section_class):
        rounds = math.ceil(joint_actions / (ROUND * CANDIDATES * algorithm.stages))
        section |= {"num_iterations": rounds, "num_train_epochs": 1}
    else:
        generations, tree_size = _generations(section_class, section, TREE)
        section |= {"num_generations": generations, "max_env_steps": joint_actions}
        section["max_steps"] = math.ceil(joint_actions / (BATCH * tree_size.joint_actions))
        if "ppo_epochs" in section:
            # train_batch_size counts one state per joint action if agents act in order.
            ordered = section.get("turn_order") == "sequential"
            states = tree_size.joint_actions if ordered else tree_size.nodes
            section["train_batch_size"] = math.ceil(BATCH * states / PARTS)
    tree: dict[str, Any] = {
        "seed": seed,
        "domain": task.game,
        "agent_model": {"name": MODEL},
        "lora": {"r": 16},
        "dataset": {"name": f"builtin:{task.game}", "train_split": "train", "eval_split": "eval"},
        "output": {"dir": str(run_dir), "overwrite": True, "save_final_model": True},
        algorithm.trained_by: section,
        **copy.deepcopy(dict(task.more)),
        **copy.deepcopy(dict(algorithm.more)),
    }
    if algorithm.stages == 2:
        online = tree["magrpo"]
        online["lr_scheduler"] = section.pop("lr_scheduler")
        online |= {name: task.keys[name] for name in IN_ORDER if name in task.keys}
        online["num_generations"], _ = _generations(MAGRPOConfig, section, CANDIDATES)
        section.pop("num_generations_sequential", None)
    return tree


def _generations(
    section_class: type[CommonConfig], section: Mapping[str, Any], most: int
) -> tuple[int, Growth]:
    """Return the largest number of completions whose tree scores at most ``most`` joint actions,
    but at least two, and the size of the tree."""
    names = ("num_agents", "num_turns", "joint_mode", "turn_order", "num_generations_sequential")
    keys = {name: section[name] for name in names if name in section}
    shape = replace(section_class(), **keys)
    sizes = {count: growth(replace(shape, num_generations=count)) for count in range(2, most + 1)}
    # A comparison needs at least two completions.
    best = max((n for n, size in sizes.items() if size.joint_actions <= most), default=2)
    return best, sizes[best]
