"""The code domain: helpers ``aux``, ``aux2``, … and a ``main`` that write one program together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from comlrl.quoting import fenced
from comlrl.rewards.code import chat_prompts, measures, problem_rows, prompt_templates
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.modes import LevelFeedback, LevelPassed, Passed
from comlrl.rewards.code.reward import CodeReward, greatest_reward
from comlrl.types import Conventions, Domain, JointAction, Score, Task, Transition


class CodeDomain(Domain):
    """Code problems, in the format of HumanEval or MBPP.

    HumanEval's rows have ``prompt`` (imports, helper functions and the entry point's stub with its
    docstring), ``test`` (defines ``check(candidate)``) and ``entry_point``. MBPP's have ``text``,
    ``test_list`` and ``code``.
    """

    fields = prompt_templates.FIELDS
    revision = prompt_templates.REVISION
    first = (
        prompt_templates.SINGLE,
        prompt_templates.HELPER,
        prompt_templates.MAIN,
    )  # for a single agent, a helper, main
    again = (prompt_templates.HELPER_AGAIN, prompt_templates.MAIN_AGAIN)  # after others' functions
    reward = CodeReward

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        return Task(name, problem_rows.checked(row))

    def reference(self, task: Task, num_agents: int) -> tuple[str, ...] | None:
        solution = problem_rows.solution(task.fields)
        return None if solution is None else (*[""] * (num_agents - 1), solution)

    def failure(self, score: Score) -> str:
        facts = score.facts
        if not isinstance(facts, RewardBreakdown) or facts.passed_all:
            return super().failure(score)
        if facts.syntax_error is not None:
            return f"line {facts.syntax_error.line}: {facts.syntax_error.message}"
        failed = [outcome for outcome in facts.outcomes if not outcome.passed]
        if not failed:
            return "it does not define the entry point, with a return"
        first, share = failed[0], f"{len(failed)} of {len(facts.outcomes)} tests fail"
        return f"{share}: {first.error_type}: {first.message or first.source}"

    def roles(self, num_agents: int) -> tuple[str, ...]:
        return prompt_templates.roles(num_agents)

    def templates(self, num_agents: int) -> tuple[str, ...]:
        single, helper, main = self.first
        return (single,) if num_agents == 1 else (*[helper] * (num_agents - 1), main)

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        problem, entry_point = task.fields["prompt"], task.fields["entry_point"]
        head = prompt_templates.signature(problem, entry_point)
        return tuple(prompt_templates.values(problem, head, entry_point, num_agents))

    def parts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        return (*prompt_templates.helper_names(num_agents), task.fields["entry_point"])

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the functions written so far, quoted as data, and a reminder of the task."""
        shown = (
            prompt_templates.WRITTEN.format(name=name, text=fenced(text.strip("\n") or "(empty)"))
            for name, text in zip(self.parts(task, num_agents), written, strict=False)
        )
        again = self.again[agent == num_agents - 1]
        return "\n".join([*shown, again.format_map(self.values(task, num_agents)[agent])])

    def for_chat(self) -> Domain:
        return CHAT_CODE

    def styles(self) -> Mapping[str, Domain]:
        return {"dividing": DIVIDING_CODE}

    def problem(self, task: Task) -> str:
        return task.fields["prompt"].strip("\n")

    def check_arguments(self, arguments: Mapping[str, Any], num_agents: int) -> None:
        defaults = {p.name: p.default for p in signature(CodeReward).parameters.values()}
        for name, value in arguments.items():
            pays_one_agent = (name, value) == ("bonus", "team")
            if num_agents == 1 and value != defaults.get(name, value) and not pays_one_agent:
                raise ValueError(
                    f"reward.arguments.{name}: {value!r} has no effect on an agent without "
                    "helpers; leave it out, or set num_agents above 1"
                )

    def greatest_reward(self, num_agents: int) -> float | None:
        return greatest_reward(num_agents)

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        if not isinstance(score.facts, RewardBreakdown):
            return {}
        return measures.measures(score.facts, action.task.fields["entry_point"])

    def conventions(self, action: JointAction) -> Conventions | None:
        return measures.conventions(action)

    def described(self, score: Score) -> Mapping[str, Any]:
        return measures.described(score.facts) if isinstance(score.facts, RewardBreakdown) else {}

    def solution(self, score: Score) -> str | None:
        return score.facts.program if isinstance(score.facts, RewardBreakdown) else None

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        return {"level_feedback": LevelFeedback, "level_passed": LevelPassed, "passed": Passed}


class ChatCodeDomain(CodeDomain):
    """The code domain with prompts for models with a chat template."""

    revision = chat_prompts.REVISION
    prefill = chat_prompts.PREFILL
    first = (chat_prompts.SINGLE, chat_prompts.HELPER, chat_prompts.MAIN)
    again = (chat_prompts.HELPER_AGAIN, chat_prompts.MAIN_AGAIN)


class DividingCodeDomain(CodeDomain):
    """The code domain with prompts that assign each agent its part of the work."""

    first = (
        prompt_templates.SINGLE,
        prompt_templates.DIVIDING_HELPER,
        prompt_templates.DIVIDING_MAIN,
    )

    def for_chat(self) -> Domain:
        return CHAT_DIVIDING_CODE


class ChatDividingCodeDomain(ChatCodeDomain):
    """The dividing code domain with prompts for models with a chat template."""

    prefill = chat_prompts.DIVIDING_PREFILL
    first = (chat_prompts.SINGLE, chat_prompts.DIVIDING_HELPER, chat_prompts.DIVIDING_MAIN)


CHAT_CODE = ChatCodeDomain()
CODE = CodeDomain()
CHAT_DIVIDING_CODE = ChatDividingCodeDomain()
DIVIDING_CODE = DividingCodeDomain()
