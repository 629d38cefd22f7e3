"""Data types shared by all packages, and interfaces of samplers, rewards, modes and domains.

Shape suffixes: ``_B`` tasks in a batch, ``_N`` agents, ``_G`` generations for each agent and
node, ``_K`` joint actions of a node (align: G, cross: G^N), ``_T`` turns, ``_R`` packed rows,
``_L`` tokens in a row, ``_A`` action tokens.
"""

from comlrl.types.protocols import (
    AsyncSampler,
    Conventions,
    Domain,
    Reward,
    Sampler,
    ServedSampler,
    Transition,
)
from comlrl.types.rollouts import (
    AgentReward,
    AgentTurn,
    Attempt,
    Call,
    Decision,
    Episode,
    EpisodeGroup,
    JointAction,
    JointMode,
    Node,
    RolloutResult,
    Score,
    Shape,
    Task,
    Tree,
)
from comlrl.types.sampling import Completion, Message, Request, Sampling, SamplingSupport
from comlrl.types.token_rows import Row, TokenBatch

__all__ = [
    "AgentReward",
    "AgentTurn",
    "AsyncSampler",
    "Attempt",
    "Call",
    "Completion",
    "Conventions",
    "Decision",
    "Domain",
    "Episode",
    "EpisodeGroup",
    "JointAction",
    "JointMode",
    "Message",
    "Node",
    "Request",
    "Reward",
    "RolloutResult",
    "Row",
    "Sampler",
    "Sampling",
    "SamplingSupport",
    "Score",
    "ServedSampler",
    "Shape",
    "Task",
    "TokenBatch",
    "Transition",
    "Tree",
]
