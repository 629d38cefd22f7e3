"""A domain that has nothing of the code domain's, and runs of it made by hand.

Three agents agree on a price, or do not: there is no passing, the reward may be negative, roles
have spaces, and one measure is known of some joint actions alone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

from comlrl.evaluation.metrics import tree_metrics
from comlrl.loggers import build, write_domain
from comlrl.loop.progress import Progress
from comlrl.loop.records import LogMark, LogRecord
from comlrl.types import Conventions, Domain, Score, Task, Tree
from tests.support.made_runs import agent_turn, node, settings, tree

ROLES = ("first buyer", "second buyer", "seller")


class Haggling(Domain):
    def roles(self, num_agents):
        return ROLES[:num_agents]

    def problem(self, task):
        return f"Sell <{task.task_id}>, which is worth {task.fields['worth']}."

    def greatest_reward(self, num_agents):
        return 1.0

    def measures(self, action, score):
        price = {"price": float(score.facts)} if score.facts else {}
        longest = max(map(len, action.completions_N))
        return {"agreed_rate": float(score.facts is not None), "words/longest": longest} | price

    def conventions(self, action):
        kinds = tuple("polite" if "please" in text else None for text in action.completions_N)
        return Conventions(kinds, len(set(kinds)) == 1)

    def described(self, score):
        return {"agreed_price": score.facts, "note": "no <deal>" if score.facts is None else ""}


HAGGLING = Haggling()


def haggled(index: int, skill: float, rng: random.Random, generations: int) -> Tree:
    texts_N: list[list[str]] = [[], [], []]
    scores = []
    for _ in range(generations):
        price = rng.randrange(10, 90) if rng.random() < skill else None
        gain = (90 - abs(50 - price)) / 100 if price else -0.5
        scores.append(Score(gain, {"gain": gain - 0.1, "brevity": 0.1}, None, price))
        for i, texts in enumerate(texts_N):
            please = ", please" * (rng.random() < skill)
            texts.append(f"Agent {i} says {price}{please}. " + "It is a fine & rare thing. " * 6)
    task = Task(f"thing {index}", {"worth": 50})
    return tree(node(scores, agents=[agent_turn(texts) for texts in texts_N]), task=task)


def make_haggling_run(folder: Path, seed: int = 1, updates: int = 20, **changes: object) -> Path:
    """A run directory as a training leaves it; ``changes`` to its configuration."""
    rng = random.Random(seed)
    config: dict[str, object] = {
        "domain": "haggling:HAGGLING",
        "reward": {"target": None},
        "external": {"mode": None},
        "prompts": {},
        "seed": seed,
        "agent_model": {"name": "a/model"},
        "dataset": {"name": "some/things"},
        "magrpo": {"num_agents": 3},
    }
    asked = settings(domain="haggling:HAGGLING")
    logger = build(asked, HAGGLING, ROLES, folder, Progress())
    logger.begin(LogMark())
    evaluated = []
    for update in range(updates + 1):
        skill = 0.2 + 0.7 * update / updates
        if update % 5 == 0:
            trees = [haggled(i, skill, rng, 1) for i in range(8)]
            record = LogRecord(
                step=update * 8,
                update=update,
                epoch=0,
                phase="eval",
                metrics=tree_metrics(trees, HAGGLING),
            )
            logger.episodes(record, trees)
            logger.log(record)
            evaluated.append(record.metrics)
        trees = [haggled(i, skill, rng, 4) for i in range(2)]
        own = {"loss": rng.gauss(0, 1), "agent_0/loss": rng.gauss(0, 1)}
        metrics = tree_metrics(trees, HAGGLING) | own
        logger.log(
            LogRecord(
                step=(update + 1) * 8, update=update + 1, epoch=0, phase="train", metrics=metrics
            )
        )
    logger.close()
    summary = {
        "algorithm": "magrpo",
        "env_steps": (updates + 1) * 8,
        "updates": updates + 1,
        "eval_start": evaluated[0],
        "eval_end": evaluated[-1],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump(config | changes, sort_keys=False))
    write_domain(folder / "domain.json", asked.domain, HAGGLING, ROLES)
    return folder
