"""The keys that every algorithm section has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from comlrl.config.keys import Section, Unused, key
from comlrl.config.unused import (
    ALONE,
    BY_PROGRAM,
    CANCELS,
    CANDIDATES,
    NO_EVALUATIONS,
    SINGLE_TURN,
    sampled_apart,
)
from comlrl.types import JointMode, Shape

Advantage = Literal["mean", "rloo", "max", "greedy", "raw"]


@dataclass(frozen=True, kw_only=True)
class CommonKeys(Section):
    """Keys that every algorithm section has, and the facts that are constants of its class."""

    num_agents: int = key(2, "number of agents, in the order of the domain's roles", at_least=1)
    num_turns: int = key(1, "attempts, with feedback between them", at_least=1)
    num_generations: int = key(
        4, "G: completions of each agent at a node", at_least=1, unused_if=(CANDIDATES,)
    )
    joint_mode: JointMode = key(
        "align",
        "joint actions: the g-th completions of all agents, every combination, or the first with"
        " every replacement of one agent's completion by a sibling",
        unused_if=(ALONE,),
    )
    handoff: Literal["random", "best"] | None = key(
        None, "which joint action is continued; null: every one", unused_if=(SINGLE_TURN,)
    )
    handoff_width: int = key(
        1,
        "joint actions of a turn that are continued",
        at_least=1,
        unused_if=(
            BY_PROGRAM,
            SINGLE_TURN,
            Unused("handoff=null hands on every joint action", lambda s, _: s.handoff is None),
        ),
    )
    turn_order: Literal["simultaneous", "sequential"] = key(
        "simultaneous",
        "agents act simultaneously, or sequentially: each reads the texts of those before it",
        unused_if=(ALONE,),
    )
    num_generations_sequential: int = key(
        2,
        "completions of every agent but the first, for each text that it reads",
        at_least=1,
        unused_if=(
            ALONE,
            Unused(
                "agents act simultaneously, with num_generations each",
                lambda s, _: s.turn_order == "simultaneous",
            ),
            Unused("rollouts are chains: later agents answer once", lambda _, c: c.online.chains),
            Unused(
                "each later agent answers a candidate's text once",
                lambda _, c: not c.online.trained_online,
            ),
        ),
    )
    discount: float = key(
        0.9,
        "between turns",
        at_least=0,
        at_most=1,
        unused_if=(
            SINGLE_TURN,
            CANCELS,
        ),
    )
    turn_gradient_weights: list[float] | None = key(
        None, "weight of each turn; null: 1", unused_if=(CANDIDATES,)
    )
    early_termination_threshold: float | None = key(
        None,
        "processed reward above which a branch ends; null: none",
        unused_if=(
            BY_PROGRAM,
            SINGLE_TURN,
        ),
    )
    num_train_epochs: int | None = key(
        1,
        "passes over the training tasks; null: no limit, which is the default where max_steps or "
        "max_env_steps is set",
        at_least=0,
    )
    max_steps: int | None = key(None, "maximum training steps; null: no limit", at_least=0)
    max_env_steps: int | None = key(
        None, "maximum scored joint actions; null: no limit", at_least=0
    )
    batch_size: int = key(
        16, "tasks whose trees are sampled together in a training step", at_least=1
    )
    train_batch_size: int | None = key(
        None,
        "maximum nodes in an optimizer update (a sequential turn counts as one; MADPO: pairs), in "
        "parts of similar size; null: the whole step, on-policy",
        at_least=1,
    )
    learning_rate: float = key(
        2e-4,
        "for LoRA; use about a tenth if you train all weights",
        above=0,
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "after the warm-up: constant, or falling to 0 at the end of the run",
    )
    warmup_steps: int = key(
        0,
        "optimizer updates in which the learning rate rises to its full value",
        at_least=0,
    )
    max_grad_norm: float = key(1.0, "maximum norm of each agent's gradient", above=0)
    kl_coef: float = key(0.0, "weight of the k3 KL to the reference policy", at_least=0)
    max_new_tokens: int = key(
        256,
        "maximum tokens of a completion",
        at_least=1,
        unused_if=(sampled_apart("max_new_tokens"),),
    )
    temperature: float | None = key(
        None, "null: agent_model's", above=0, unused_if=(sampled_apart("temperature"),)
    )
    top_p: float | None = key(
        None, "null: agent_model's", above=0, at_most=1, unused_if=(sampled_apart("top_p"),)
    )
    top_k: int | None = key(
        None, "null: agent_model's", at_least=1, unused_if=(sampled_apart("top_k"),)
    )
    logging_steps: int = key(1, "training steps between records", at_least=1)
    eval_interval: int = key(0, "training steps between evaluations; 0: none", at_least=0)
    eval_num_samples: int | None = key(
        4, "tasks of an evaluation; null: the whole split", at_least=1, unused_if=(NO_EVALUATIONS,)
    )
    eval_answers: int = key(
        1, "answers of the team to each of these tasks", at_least=1, unused_if=(NO_EVALUATIONS,)
    )
    save_steps: int | None = key(
        None,
        "training steps between checkpoints; null: one at each evaluation and every ten minutes,"
        " the newest kept; 0: none",
        at_least=0,
    )
    save_total_limit: int | None = key(
        2, "number of newest checkpoints to keep of `save_steps`; null: all", at_least=1
    )

    # Properties of the algorithm, so that other code need not test its name.
    chains: ClassVar[bool] = False  # rollouts: G samples at turn 1, one at each later turn
    heterogeneous: ClassVar[bool] = False  # one policy; latents distinguish the agents
    trained_online: ClassVar[bool] = True  # samples come from the current policy
    fits_reward_model: ClassVar[bool] = False  # fitted before the online stage
    no_programs: ClassVar[str] = (
        "its trainer reads trees of turns"  # why it cannot train on a program; "": it can
    )
    one_reward: ClassVar[str] = ""  # why individual rewards are unsupported; "": they are supported
    may_share_policy: ClassVar[bool] = False  # has the key ``shared_policy``
    paper: ClassVar[str] = ""

    @property
    def shape(self) -> Shape:
        """Return the shape of a training rollout."""
        return Shape(
            self.num_agents,
            self.num_turns,
            self.num_generations,
            joint_mode=self.joint_mode,
            handoff=self.handoff,
            early_termination_threshold=self.early_termination_threshold,
            later_generations=1 if self.chains else None,
            handoff_width=self.handoff_width,
            turn_order=self.turn_order,
            num_generations_sequential=1 if self.chains else self.num_generations_sequential,
        )

    @property
    def weight_T(self) -> list[float]:
        """Return the gradient weight of each turn."""
        return self.turn_gradient_weights or [1.0] * self.num_turns
