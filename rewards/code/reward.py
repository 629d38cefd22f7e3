"""The aux/main collaboration reward: at most 4.0 with a helper, at most 2.1 alone.

==========================  =====  =============================================================
aux defined                 +0.4   its text contains ``def aux(…)`` with a ``yield`` or a
                                   ``return`` of a value
main defined                +0.6   likewise for the entry point, which needs no return if the tests
                                   only read changes to its arguments; else scoring stops here
syntax                      +0.5   preamble + aux + main compiles; else scoring stops here
tests                       +1.0   times the share of tests passed
main uses aux               +0.5   a test passes, aux is defined and main calls it
not a thin wrapper          +1.0   main uses aux, and does not just return aux's result
aux result ignored          −0.5   main uses aux, but never reads the result of some call of it
==========================  =====  =============================================================

With several helpers, the 0.4 is multiplied by the share defined and the 0.5 by the share called.

``bonus="share"`` multiplies the last three terms by the share of tests passed. ``bonus="team"``
replaces them by +1.5 for a program that passes all tests and needs every agent (``_needed``). A
single agent without helpers gets the +1.5 for passing all tests.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, ClassVar, Literal

from comlrl.rewards.code.analysis.extraction import extract
from comlrl.rewards.code.analysis.usage import MainUse, main_use
from comlrl.rewards.code.bounds import Memo, bounded
from comlrl.rewards.code.breakdown import RewardBreakdown, SyntaxProblem
from comlrl.rewards.code.joint_program import (
    Contribution,
    compile_program,
    contribution,
    join,
    preamble,
    read_names,
)
from comlrl.rewards.code.prompt_templates import helper_names
from comlrl.rewards.sandbox.checks import TestError, split_check
from comlrl.rewards.sandbox.inside.replaced_results import HANDED_ON, replacements
from comlrl.rewards.sandbox.inside.replaced_results import NAME as REPLACE
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.rewards.sandbox.pool import Job, Pool
from comlrl.types import JointAction, Reward, Score

AUX_DEFINED = 0.4
MAIN_DEFINED = 0.6
SYNTAX = 0.5
TESTS = 1.0
USES_AUX = 0.5
NOT_WRAPPER = 1.0
AUX_IGNORED = -0.5
TEAM = 1.5

# Cache sizes, enough for more than one training step. Cached texts hold syntax trees, at up to 230
# bytes per character; cached programs hold their code, as do outcomes, whose key it is.
CACHED_TEXT = 2 << 20  # characters of texts
CACHED_CODE = 64 << 20  # bytes of code, for programs and again for outcomes
CACHED = 4096  # number of outcomes, and of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A joint action, processed up to the point where its program runs."""

    names: tuple[str, ...]  # helpers, then the entry point
    in_place: bool  # the entry point need not return anything
    parts: tuple[Contribution | None, ...]  # one for each name
    program: str = ""
    problem: SyntaxProblem | None = None
    context: tuple[tuple[str, ...], str] = ((), "")  # the prompt's imports and functions
    job: Job | None = None  # None: scoring stops before the tests

    @property
    def helpers(self) -> tuple[str, ...]:
        return self.names[:-1]

    @property
    def defined(self) -> tuple[str, ...]:
        pairs = zip(self.names, self.parts, strict=True)
        return tuple(
            name
            for name, part in pairs
            if part is not None
            and (part.function.returns or (self.in_place and name == self.names[-1]))
        )


def greatest_reward(num_agents: int) -> float:
    """Return the highest reward: 4.0 for a team, 2.1 for a single agent without helpers."""
    alone = MAIN_DEFINED + SYNTAX + TESTS
    return alone if num_agents == 1 else AUX_DEFINED + alone + USES_AUX + NOT_WRAPPER


class CodeReward(Reward):
    """Scores joint actions by running them against their tasks' tests, in a sandbox.

    Sandbox workers start at the first call and run until ``close``. Any thread may call ``score``;
    concurrent calls wait for each other. A program that several joint actions share runs once.

    Args:
        workers: number of parallel sandbox processes; None for one per CPU core.
        timeout: seconds of wall-clock time per test. All tests of a program together get three
            times as much; those that have not run by then count as failed.
        memory_mb: address space of the process under test, in MiB.
        isolation: ``auto``, ``namespaces``, ``bubblewrap``, ``unshare`` or ``limits``.
        bonus: factor of the three terms for main's use of aux: 1 for ``any_test``, the share of
            tests passed for ``share``. ``team`` replaces these terms by +1.5 for a program that
            passes all tests and needs every agent, and always measures need. A single agent
            without helpers gets the +1.5 for passing all tests.
        measure_need: whether to run programs that pass all tests again without each agent's part,
            for ``RewardBreakdown.needed``.

    Raises:
        SandboxError: if this machine does not support the isolation.
    """

    facts = RewardBreakdown  # type of ``Score.facts``
    removed_arguments: ClassVar = {"need_bonus": "use bonus=team, which asks for every agent"}

    def __init__(
        self,
        workers: int | None = None,
        timeout: float = 10.0,
        memory_mb: int = 512,
        isolation: str = "auto",
        *,
        bonus: Literal["any_test", "share", "team"] = "any_test",
        measure_need: bool = False,
    ) -> None:
        self.bonus, self.measure_need = bonus, measure_need
        self.pool = Pool(workers, timeout, memory_mb, isolation)
        self._lock = threading.Lock()
        self._contribution = Memo(contribution, _text_weight, CACHED_TEXT)
        self._written = Memo(_written, _text_weight, CACHED_TEXT)
        self._compile = Memo(compile_program, _code_weight, CACHED_CODE)
        self._preamble = lru_cache(maxsize=CACHED)(preamble)
        self._outcomes: dict[Job, tuple[TestOutcome, ...]] = {}
        self._seconds: dict[str, float] = {}  # by the tests' source
        if isolation != "auto":
            self.pool.isolation  # noqa: B018  raises now if this machine does not support it

    @property
    def isolation(self) -> str:
        """The sandbox's isolation: ``bubblewrap``, ``unshare`` or ``limits``."""
        return self.pool.isolation

    @property
    def workers(self) -> int:
        """The number of programs that run in parallel."""
        return self.pool.size

    def for_evaluation(self) -> CodeReward:
        """Return a copy with ``measure_need`` that shares workers and cached outcomes."""
        view = copy.copy(self)
        view.measure_need = True
        return view

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        """Return one score per joint action, with its breakdown.

        Raises TestError, naming the row, for a task without usable tests.
        """
        for task in {id(action.task): action.task for action in actions}.values():
            try:
                split_check(task.fields["test"], task.fields["entry_point"])
            except TestError as error:
                raise TestError(f"task {task.task_id!r}: {error}; fix its `test`") from None
        with self._lock:
            drafts: list[_Draft] = []
            fresh: dict[Job, None] = {}
            # Run slow tasks first, so that workers do not wait for them at the end.
            slowest = [self._seconds.get(a.task.fields["test"], 0.0) for a in actions]
            order = sorted(range(len(actions)), key=lambda i: -slowest[i])
            ordered = [actions[i] for i in order]
            outcomes = self.pool.run(self._fresh_jobs(ordered, drafts, fresh))
            self._remember(dict(zip(fresh, outcomes, strict=True)), drafts)
            if self._measures_need:
                self._run_without_parts(drafts)
            breakdowns = [self._breakdown(*pair) for pair in zip(drafts, ordered, strict=True)]
        scores = [Score(b.total, b.parts, b.passed_all, b) for b in breakdowns]
        return [score for _, score in sorted(zip(order, scores, strict=True), key=itemgetter(0))]

    @property
    def _measures_need(self) -> bool:
        return self.measure_need or self.bonus == "team"

    def _run_without_parts(self, drafts: Sequence[_Draft]) -> None:
        """Run each program that passed all tests again, once without each agent's part."""
        solved = [draft for draft in dict.fromkeys(drafts) if self._is_solved(draft)]
        jobs = {job: None for d in solved for each in self._without(d).values() for job in each}
        fresh = [job for job in jobs if not self._is_known(job)]
        self._outcomes.update(zip(fresh, self.pool.run(fresh), strict=True))

    def _is_solved(self, draft: _Draft) -> bool:
        outcomes = self._outcomes[draft.job] if draft.job is not None else ()
        return bool(outcomes) and all(outcome.passed for outcome in outcomes)

    def _without(self, draft: _Draft) -> dict[str, list[Job]]:
        """Return, for each defined function, the programs in which it is replaced.

        A helper's results are replaced by other values. The entry point is replaced by each helper,
        so that it returns that helper's result for the same arguments.
        """
        assert draft.job is not None
        helpers = [name for name in draft.helpers if name in draft.defined]
        ways = replacements(len(self._outcomes[draft.job]))
        programs = {name: self._replacing(draft, name, name, ways) for name in helpers}
        main = draft.names[-1]
        handed_on = [self._replacing(draft, main, name, [HANDED_ON])[0] for name in helpers]
        return programs | {main: handed_on}

    def _replacing(
        self, draft: _Draft, name: str, replaced_by: str, ways: Sequence[str]
    ) -> list[Job]:
        """Return the programs in which ``replaced_by`` takes ``name``'s place, one for each way."""
        assert draft.job is not None
        parts = [
            replace(part, source=f"{part.source}\n\n\n{name} = {REPLACE}({replaced_by})")
            if part is not None and name == owner
            else part
            for owner, part in zip(draft.names, draft.parts, strict=True)
        ]
        # Without asserts: main might solve the task alone and only check the helper's results.
        code = self._code(join(draft.context, parts), parts, draft.names, asserts=False)
        assert isinstance(code, bytes)
        return [replace(draft.job, code=code, replacement=way) for way in ways]

    def _code(
        self,
        program: str,
        parts: Sequence[Contribution | None],
        names: tuple[str, ...],
        asserts: bool = True,
    ) -> bytes | SyntaxProblem:
        broken = tuple(source for part in parts if part is not None for source in part.broken)
        main = parts[-1]
        assert main is not None
        main_line = program.count("\n") - main.source.count("\n")
        code: bytes | SyntaxProblem = self._compile(program, broken, names, main_line, asserts)
        return code

    def _needed(self, draft: _Draft) -> tuple[str, ...] | None:
        """Return the functions whose every replacement makes the solved program fail.

        Returns () if a test fails anyway, and None if need is not measured or there is no helper.
        """
        if not draft.helpers or not self._measures_need:
            return None
        if not self._is_solved(draft):
            return ()
        return tuple(
            name
            for name, jobs in self._without(draft).items()
            if not any(all(o.passed for o in self._outcomes[job]) for job in jobs)
        )

    def _fresh_jobs(
        self, actions: Sequence[JointAction], drafts: list[_Draft], fresh: dict[Job, None]
    ) -> Iterator[Job]:
        """Draft the actions, and yield each distinct program without a cached outcome."""
        for action in actions:
            draft = self._draft(action)
            drafts.append(draft)
            job = draft.job
            if job is not None and job not in fresh and not self._is_known(job):
                fresh[job] = None
                yield job

    def _is_known(self, job: Job) -> bool:
        """Return whether a program's outcomes are cached; it may not be why its judge died."""
        outcomes = self._outcomes.get(job)
        return outcomes is not None and all(o.error_type != "Died" for o in outcomes)

    def _remember(self, outcomes: dict[Job, tuple[TestOutcome, ...]], drafts: list[_Draft]) -> None:
        """Cache the outcomes; if the cache is full, keep only those of this call."""
        self._outcomes.update(outcomes)
        for job, parts in outcomes.items():
            seconds = sum(part.seconds for part in parts)
            self._seconds[job.test] = max(seconds, self._seconds.get(job.test, 0.0))
        code = sum(len(job.code) for job in self._outcomes)
        if len(self._outcomes) > CACHED or code > CACHED_CODE:
            used = {draft.job for draft in drafts}
            for job in self._outcomes.keys() - used:
                del self._outcomes[job]

    def _draft(self, action: JointAction) -> _Draft:
        """Join and compile the program, up to the syntax level of the table."""
        task = action.task
        names = (*helper_names(len(action.completions_N)), task.fields["entry_point"])
        parts = tuple(
            self._contribution(text, name, names)
            for text, name in zip(action.completions_N, names, strict=True)
        )
        in_place = split_check(task.fields["test"], task.fields["entry_point"]).in_place
        draft = _Draft(names=names, parts=parts, in_place=in_place)
        if names[-1] not in draft.defined:
            return draft
        prompt = self._preamble(task.fields["prompt"], task.fields["entry_point"])
        program = join(prompt, parts)
        code = bounded(self._code(program, parts, names))
        if isinstance(code, SyntaxProblem):
            return replace(draft, program=program, problem=code)
        job = Job(
            code=code,
            preamble=join(prompt, ()),
            test=task.fields["test"],
            entry_point=task.fields["entry_point"],
        )
        return replace(draft, program=program, context=prompt, job=job)

    def _breakdown(self, draft: _Draft, action: JointAction) -> RewardBreakdown:
        """Return the terms of the table for a draft and its program's outcomes."""
        helpers, defined = draft.helpers, draft.defined
        there = [name for name in helpers if name in defined]
        has_main = draft.names[-1] in defined
        outcomes = self._outcomes[draft.job] if draft.job is not None else ()
        use = _use(draft, there, outcomes)
        passed = sum(outcome.passed for outcome in outcomes)
        needed = self._needed(draft)
        bonuses, team = self._bonuses(use, passed, len(outcomes), len(helpers)), None
        if self.bonus == "team":
            # Need is not measured without helpers.
            is_team = self._is_solved(draft) if needed is None else set(needed) == {*draft.names}
            bonuses, team = (0.0, 0.0, 0.0), TEAM * is_team
        uses_aux, not_wrapper, aux_ignored = bonuses
        return RewardBreakdown(
            aux_defined=AUX_DEFINED * len(there) / len(helpers) if helpers else 0.0,
            main_defined=MAIN_DEFINED if has_main else 0.0,
            syntax=SYNTAX if draft.job is not None else 0.0,
            tests=TESTS * passed / len(outcomes) if outcomes else 0.0,
            uses_aux=uses_aux,
            not_wrapper=not_wrapper,
            aux_ignored=aux_ignored,
            team=team,
            helpers=helpers,
            defined=defined,
            instead=tuple(
                () if name in defined else self._written(text)
                for name, text in zip(draft.names, action.completions_N, strict=True)
            ),
            called=use.called,
            ignored=use.ignored,
            wrapper=use.wrapper,
            needed=needed,
            syntax_error=draft.problem,
            outcomes=outcomes,
            program=draft.program,
            isolation=self.isolation,
            seconds=sum(outcome.seconds for outcome in outcomes),
        )

    def _bonuses(
        self, use: MainUse, passed: int, tests: int, helpers: int
    ) -> tuple[float, float, float]:
        """Return the last three terms of the table, which require a passed test."""
        if not passed or not use.called:
            return 0.0, 0.0, 0.0
        scale = passed / tests if self.bonus == "share" else 1.0
        return (
            scale * USES_AUX * len(use.called) / helpers,
            scale * NOT_WRAPPER if not use.wrapper else 0.0,
            scale * AUX_IGNORED if use.ignored else 0.0,
        )

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()

    def __enter__(self) -> CodeReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _written(text: str) -> tuple[str, ...]:
    """Return the names of the functions in a text."""
    return tuple(extract(text).by_name())


def _text_weight(arguments: tuple[Any, ...], _: object) -> int:
    return 1 + len(arguments[0])


def _code_weight(arguments: tuple[Any, ...], code: bytes | SyntaxProblem) -> int:
    return len(arguments[0]) + (len(code) if isinstance(code, bytes) else 0)


def _use(draft: _Draft, helpers: Sequence[str], outcomes: Sequence[TestOutcome]) -> MainUse:
    """Return main's use of the helpers; if a test passed, of those called in a passed test."""
    main = draft.parts[-1]
    if main is None:
        return MainUse()
    others = (part.reads for part in draft.parts[:-1] if part is not None)
    reads = frozenset().union(read_names(draft.context[1]), *others)
    passed = [outcome.entered for outcome in outcomes if outcome.passed]
    if passed:
        helpers = [name for name in helpers if any(name in entered for entered in passed)]
    return main_use(main.nodes, draft.names[-1], helpers, reads)
