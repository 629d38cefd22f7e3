"""The size of a training step's trees and of a run, computed from the algorithm's section."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from comlrl.config.algorithms import CommonConfig
from comlrl.loop.task_schedule import TaskSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Upper bounds on the size of one task's tree."""

    nodes: int
    joint_actions: int
    completions: int  # over all agents
    turns: int  # over all paths; one node each, or several if turns are sequential


class Level(NamedTuple):
    """A level of one task's tree, whose completions are sampled together."""

    turn: int
    stage: range  # the agents that act
    nodes: int
    completions: int  # per agent and node
    joint: int  # joint actions over all nodes


def scored(section: CommonConfig, tree: Growth) -> int:
    """Count the scored joint actions of one task: those of its tree and, with ``advantage:
    greedy``, one per remaining turn of a greedy chain from every state."""
    if not section.samples_greedily:
        return tree.joint_actions
    turns = range(1, section.num_turns + 1)
    levels = [growth(replace(section, num_turns=turn)).nodes for turn in turns]
    return tree.joint_actions + sum(levels)  # a state at turn t is in T − t + 1 of them


def growth(section: CommonConfig) -> Growth:
    """Return the size of one task's tree if no branch ends early.

    A turn has K joint actions per node (``Shape.joint_actions``); if turns are sequential, K is G
    times the generations of the later agents. All joint actions are continued, or
    ``handoff_width`` per node with ``handoff``. Chains have G samples at turn 1 and one at each
    later turn.
    """
    total = Growth(nodes=0, joint_actions=0, completions=0, turns=0)
    for level in levels(section):
        total = Growth(
            nodes=total.nodes + level.nodes,
            joint_actions=total.joint_actions
            + level.joint * (level.stage.stop == section.num_agents),
            completions=total.completions + level.nodes * level.completions * len(level.stage),
            turns=total.turns + level.nodes * (level.stage.start == 0),
        )
    return total


def levels(section: CommonConfig) -> Iterator[Level]:
    """Yield the levels of one task's tree from the root."""
    shape, starts = section.shape, 1
    for turn in range(1, section.num_turns + 1):
        nodes = starts
        for stage in shape.stages:
            completions = shape.generations(stage.start, turn)
            joint = nodes * shape.joint_actions(len(stage), completions)
            yield Level(turn, stage, nodes, completions, joint)
            nodes = joint
        starts = min(nodes, starts * section.handoff_width) if section.handoff else nodes


def training_steps(
    section: CommonConfig, tasks: int | None, actions: int, schedule: TaskSchedule | None = None
) -> int | None:
    """Return the number of training steps until the first limit is reached; None if that depends
    on an unknown number of tasks. ``actions``: joint actions per full step. ``schedule``: the
    schedule of a run in rounds."""
    ends = [section.max_steps]
    if section.max_env_steps is not None:
        ends.append(math.ceil(section.max_env_steps / actions))
    if schedule is not None:
        ends.append(schedule.steps)
    elif section.num_train_epochs is not None and tasks is not None:
        ends.append(section.num_train_epochs * math.ceil(tasks / section.batch_size))
    limits = [end for end in ends if end is not None]
    return min(limits) if limits else None
