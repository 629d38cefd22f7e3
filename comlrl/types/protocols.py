"""Interfaces of samplers, rewards, external modes and domains."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from comlrl.types.rollouts import Attempt, JointAction, Score, Task
from comlrl.types.sampling import Completion, Message, Request, Sampling


class Sampler(Protocol):
    """Samples completions from the agents' models. Agents are identified by their index."""

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a prompt in the chat template of the agent's model."""

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        """Return whether prompt and ``max_new_tokens`` together fit the model's context."""

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Return one completion for each key of each agent's requests.

        Raises NonFiniteError if logits are not finite.
        """


class AsyncSampler(Protocol):
    """Samples each request as it arrives, with the policies fixed at one moment."""

    async def sample_one(
        self, agent: int, request: Request, sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return one completion for each key of an agent's request."""


@runtime_checkable
class ServedSampler(Sampler, Protocol):
    """A Sampler backed by servers that batch requests continuously."""

    def present(self) -> AsyncSampler:
        """Return a sampler of the current policies, valid until they are updated.

        A collective call if models are split.
        """

    def weighted(
        self,
        requests_N: Sequence[Sequence[Request]],
        groups_N: Sequence[Sequence[tuple[Completion, ...]]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Return completions sampled by ``present`` with the weights that ``sample`` would set."""


class Reward(Protocol):
    """Scores joint actions. It must be stateless, except for a pool of workers.

    The constructor receives ``reward.arguments`` by keyword and, if it has such parameters, the
    keys of ``sandbox`` (workers, timeout, memory_mb, isolation) and the run's ``num_turns``. The
    class attribute ``facts`` declares the type of ``Score.facts``, which an external mode may
    require with ``reads``. A class whose scores set ``by_agent`` declares ``by_agent = True``.

    With ``generation.overlap`` several threads call it, one at a time. Scores must not depend on
    the global random generators, which other code uses concurrently.
    """

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        """Return one score for each joint action, in order."""

    def for_evaluation(self) -> Reward:
        """Return the reward for evaluation, which may measure more at a higher cost.

        Both share their workers, and closing either closes both.
        """
        return self

    def close(self) -> None:
        """Stop worker processes and threads."""


class Transition(Protocol):
    """An external mode: writes the feedback that each agent sees before its next attempt.

    Like ``Reward``, it may be called from several threads.
    """

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        """Return one text for each agent, in the order of roles, for each attempt."""


class Conventions(NamedTuple):
    """How each agent assumed the work to be divided in a joint action."""

    kind_N: tuple[str | None, ...]  # None: no known convention
    match: bool  # whether all agents relied on the same convention


class Domain(Protocol):
    """A team's domain: everything that is specific to one kind of work.

    Subclasses inherit the methods below that have a body. Agents are always in the order of
    ``roles``.
    """

    fields: Sequence[str]  # names that templates may use in braces
    # template appended to every feedback; not needed if runs have a single turn
    revision: str = ""
    # template of the text that every answer starts with instead of sampled tokens; it belongs to
    # the prompt in training, and to the answer for the reward and for other agents
    prefill: str = ""
    reward: Callable[..., Reward]  # the reward class if ``reward.target`` is null

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        """Convert a data row to a task. Raises ValueError, naming the field, for a bad row."""

    def roles(self, num_agents: int) -> tuple[str, ...]:
        """Return the agents' names, which are the keys of ``prompts`` and appear in logs.

        Raises ValueError if so many agents cannot share this work.
        """

    def templates(self, num_agents: int) -> tuple[str, ...]:
        """Return the template of each agent's first prompt, with ``fields`` in braces."""

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        """Return for each agent a mapping from each of ``fields`` to its text.

        If a field is missing, the run ends with a one-line error and exit code 2.
        """

    def parts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return the name of each agent's part, as shown to other agents and an expert."""
        return self.roles(num_agents)

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the text that shows a later agent of a turn what earlier agents wrote.

        It follows the agent's prompt. ``written``: the texts of the earlier agents, in order, at
        least one, without special tokens.
        """
        parts = self.parts(task, num_agents)[: len(written)]
        return "\n".join(
            f"{part}, as it was written:\n{textwrap.indent(text, '> ', lambda line: True)}\n"
            for part, text in zip(parts, written, strict=True)
        )

    def for_chat(self) -> Domain:
        """Return the domain with prompts worded for models that have a chat template.

        Only its ``templates``, ``revision``, ``prefill`` and ``handed_on`` are used.
        """
        return self

    def styles(self) -> Mapping[str, Domain]:
        """Return the domain with other wordings of its prompts, by name.

        ``prompts.style`` selects one of them, or ``usual`` for this domain.
        """
        return {}

    def problem(self, task: Task) -> str:
        """Return the problem statement for an expert and for the report."""

    def check_arguments(self, arguments: Mapping[str, Any], num_agents: int) -> None:
        """Raise ValueError if one of ``reward.arguments`` has no effect with so many agents.

        The message is one line that begins with the key.
        """
        return

    def greatest_reward(self, num_agents: int) -> float | None:
        """Return the greatest value of the domain's reward, or None if unknown."""
        return None

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        """Return additional metrics of a joint action, by name.

        Each is averaged over the joint actions that define it.
        """
        return {}

    def conventions(self, action: JointAction) -> Conventions | None:
        """Return how the agents divided the work; None if the domain defines no conventions."""
        return None

    def described(self, score: Score) -> Mapping[str, Any]:
        """Return ``score.facts`` as JSON values, for stored and displayed samples."""
        return {}

    def solution(self, score: Score) -> str | None:
        """Return the agents' combined result for external graders; None if there is none."""
        return None

    def reference(self, task: Task, num_agents: int) -> tuple[str, ...] | None:
        """Return completions built from the solution in the task's row; None if it has none."""
        return None

    def failure(self, score: Score) -> str:
        """Return in one line why a joint action did not pass."""
        return f"reward {score.task_value:.4g}"

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        """Return the domain's external modes by name, in addition to the general ones.

        The first is the default. Each receives those of these arguments that it has parameters
        for: ``prompts`` (a ``comlrl.tasks.prompts.Prompts``) and the keys of ``external``.
        """
        return {}
