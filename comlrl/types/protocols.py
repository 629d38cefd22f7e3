"""Interfaces: what a sampler, a reward, an external mode and a domain implement."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from comlrl.types.rollouts import Attempt, JointAction, Score, Task
from comlrl.types.sampling import Completion, Message, Request, Sampling


class Sampler(Protocol):
    """Samples completions from the agents' models. Agents are named by their index."""

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a prompt, in the chat template of the agent's model."""

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        """Return whether the context holds the prompt and a completion of ``max_new_tokens``."""

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Return for each request of each agent one completion for each of its keys.

        Raises NonFiniteError if logits are not finite.
        """


class AsyncSampler(Protocol):
    """Samples requests as they come, by the policies of one moment."""

    async def sample_one(
        self, agent: int, request: Request, sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return one completion of an agent's request for each of its keys."""


@runtime_checkable
class ServedSampler(Sampler, Protocol):
    """A Sampler of servers, which form their batches of whatever comes."""

    def present(self) -> AsyncSampler:
        """Return a sampler of the present policies, until they are updated.

        A collective call if models are split.
        """

    def weighted(
        self,
        requests_N: Sequence[Sequence[Request]],
        groups_N: Sequence[Sequence[tuple[Completion, ...]]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Return the completions of ``present``, with the weights that ``sample`` would give."""


class Reward(Protocol):
    """Scores joint actions; state beyond a worker pool is not allowed.

    It is constructed with ``reward.arguments`` by name and, for parameters of these names, with
    the keys of ``sandbox`` (workers, timeout, memory_mb, isolation) and the run's ``num_turns``.
    The class attribute ``facts`` declares the type of ``Score.facts``, which an external mode may
    require by ``reads``. A class whose scores set ``by_agent`` declares ``by_agent = True``.

    With ``generation.overlap`` it is called from several threads, one after the other. Scores must
    not depend on the global random generators, which other code uses meanwhile.
    """

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        """Return one score for each joint action, in order."""

    def for_evaluation(self) -> Reward:
        """Return the reward for evaluation, which may measure more at a higher cost.

        Both share their workers, and closing either closes both.
        """
        return self

    def close(self) -> None:
        """Stop what was started."""


class Transition(Protocol):
    """An external mode: makes the feedback that each agent reads before its next attempt.

    It is called from several threads as ``Reward`` is.
    """

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        """Return a tuple for each attempt: one text for each agent, in the order of roles."""


class Conventions(NamedTuple):
    """Which of several ways of sharing the work each agent followed in a joint action."""

    kind_N: tuple[str | None, ...]  # None: none that is known
    match: bool  # whether the agents counted on the same


class Domain(Protocol):
    """A team's domain: all that is particular to one kind of work.

    A class derived from this one inherits the methods below that have a body. Agents are always
    in the order of ``roles``.
    """

    fields: Sequence[str]  # that templates may name in braces
    # template: what every feedback ends with; empty where nothing follows a single turn
    revision: str = ""
    # template: how every answer starts, in the place of the model's own words; part of the prompt
    # for learning, and of the answer for the reward and for other agents
    prefill: str = ""
    reward: Callable[..., Reward]  # the class of its reward, where ``reward.target`` is null

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        """Return a data row as a task. Raises ValueError, naming the field, for a bad one."""

    def roles(self, num_agents: int) -> tuple[str, ...]:
        """Return the agents' names: the keys of ``prompts``, and names in logs and reports.

        Raises ValueError for a number of agents that cannot share this work.
        """

    def templates(self, num_agents: int) -> tuple[str, ...]:
        """Return each agent's first prompt, its fields in braces."""

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        """Return a mapping for each agent, with a text for each of ``fields``.

        A run ends with one line and exit code 2 where a field has no value.
        """

    def parts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return the name of each agent's part, as shown to other agents and an expert."""
        return self.roles(num_agents)

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the earlier texts of a turn, as a later agent reads them after its prompt.

        ``written``: the texts of those before it, in order, at least one; cleaned of special
        tokens.
        """
        parts = self.parts(task, num_agents)[: len(written)]
        return "\n".join(
            f"{part}, as it was written:\n{textwrap.indent(text, '> ', lambda line: True)}\n"
            for part, text in zip(parts, written, strict=True)
        )

    def for_chat(self) -> Domain:
        """Return the domain worded for agents whose models have a chat template.

        Its ``templates``, ``revision``, ``prefill`` and ``handed_on`` are used.
        """
        return self

    def styles(self) -> Mapping[str, Domain]:
        """Return the same work in other words, by name: what ``prompts.style`` chooses from beside
        ``usual``. The prompts of a style are read as those of ``for_chat`` are."""
        return {}

    def problem(self, task: Task) -> str:
        """Return the problem, as an expert and a reader of the report see it."""

    def check_arguments(self, arguments: Mapping[str, Any], num_agents: int) -> None:
        """Raise ValueError for ``reward.arguments`` without effect on this number of agents.

        The message is one line that begins with the key.
        """
        return

    def greatest_reward(self, num_agents: int) -> float | None:
        """Return the greatest value of the domain's reward, or None if unknown."""
        return None

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        """Return further measures of a joint action, by name.

        A metric is the mean over the joint actions that have it.
        """
        return {}

    def conventions(self, action: JointAction) -> Conventions | None:
        """Return the conventions by which the agents shared the work; None if none are defined."""
        return None

    def described(self, score: Score) -> Mapping[str, Any]:
        """Return ``score.facts`` as JSON, for stored and displayed samples."""
        return {}

    def solution(self, score: Score) -> str | None:
        """Return the agents' joint result, as others score it; None: there is no such thing."""
        return None

    def reference(self, task: Task, num_agents: int) -> tuple[str, ...] | None:
        """Return completions that solve a task, from its row's solution; None: it has none."""
        return None

    def failure(self, score: Score) -> str:
        """Return why a joint action did not pass, in a line."""
        return f"reward {score.task_value:.4g}"

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        """Return the domain's external modes beside the general ones, by name; the first is
        default.

        They are called with arguments for parameters of these names: ``prompts`` (a
        ``comlrl.tasks.prompts.Prompts``) and the keys of ``external``.
        """
        return {}
