"""The size of a training step's trees and of a run, from its section alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from comlrl.config.algorithms import CommonConfig
from comlrl.loop.task_schedule import TaskSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Upper bounds of one task's tree."""

    nodes: int
    joint_actions: int
    completions: int  # of all agents
    turns: int  # of all paths: a node each, or in sequential turns several


class Level(NamedTuple):
    """A level of one task's tree: what is sampled together."""

    turn: int
    stage: range  # the agents that act
    nodes: int
    completions: int  # completions of an agent at a node
    joint: int  # joint actions of all nodes


def scored(section: CommonConfig, tree: Growth) -> int:
    """Count the joint actions of one task that are scored: its tree's, and with ``advantage:
    greedy`` those of a greedy chain from every state, one a turn to the end."""
    if not section.samples_greedily:
        return tree.joint_actions
    turns = range(1, section.num_turns + 1)
    levels = [growth(replace(section, num_turns=turn)).nodes for turn in turns]
    return tree.joint_actions + sum(levels)  # a state at turn t counts in T − t + 1 of them


def growth(section: CommonConfig) -> Growth:
    """Return the size of one task's tree, where no branch ends early.

    A turn has K joint actions (``Shape.joint_actions``); where the agents act in order, G times the
    later agents' generations. Each is continued, or ``handoff`` width of them. Chains
    are G samples at turn 1, one afterwards.
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
    """Yield the levels one after the other."""
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
    """Return the training steps of the run, the first of its ends; None where the tasks decide
    and are unknown. ``actions``: joint actions of a full step. ``schedule``: of a run in rounds."""
    ends = [section.max_steps]
    if section.max_env_steps is not None:
        ends.append(math.ceil(section.max_env_steps / actions))
    if schedule is not None:
        ends.append(schedule.steps)
    elif section.num_train_epochs is not None and tasks is not None:
        ends.append(section.num_train_epochs * math.ceil(tasks / section.batch_size))
    limits = [end for end in ends if end is not None]
    return min(limits) if limits else None
