"""Rewards of mains that solve nothing, over HumanEval: how the reward can be gamed.

    python benchmarks/show_table.py [--data HumanEval.jsonl]

In each, main calls a helper that hands its arguments on (`if aux(a): pass`) and has no use for it:
it returns one constant or one of its arguments, or looks the docstring's examples up in a table;
the last one solves the task by itself. For each: the mean reward of the definition as published,
with `bonus: share` and with `bonus: team`, and how many tasks it solves.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import human_eval

from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction, Score, Task

AUX = "def aux(*values):\n    return values\n"
BODIES = (
    "True", "False", "None", "0", "1", "-1", "2", "0.0", "''", "[]", "dict()", "()", "'0'", "[0]",
    "{first}", "{last}", "len(str({first}))", "str({first})", "sorted({first})", "[{first}]",
)  # fmt: skip
# `f(1, 2) == 3`, `f(1) ➞ 2`, `>>> f(1)` and 2 on the next line
EXAMPLE = r"{}\((?P<call>.*?)\)\s*(?:==|=>|->|➞|=|returns?|\n)\s*(?P<answer>[^\n]+)"


class Problem:
    def __init__(self, task: Task) -> None:
        self.task, self.name = task, task.fields["entry_point"]
        self.prompt, self.solution = task.fields["prompt"], human_eval.solution(task)
        functions = [n for n in ast.parse(self.solution).body if isinstance(n, ast.FunctionDef)]
        self.function = next(n for n in functions if n.name == self.name)
        self.parameters = [argument.arg for argument in self.function.args.args]

    def main(self, *body: str) -> str:
        """Return the entry point, with an unused call of aux before its body."""
        show = f"if aux({', '.join(self.parameters)}): pass"
        lines = [f"def {self.name}({', '.join(self.parameters)}):", show, *body]
        return "\n    ".join(lines) + "\n"

    def returning(self, value: str) -> str:
        return self.main(
            "return " + value.format(first=self.parameters[0], last=self.parameters[-1])
        )

    def table(self) -> str:
        """Return a lookup of the docstring's examples; None for any other input."""
        answers = dict(self.examples())
        key = f"repr(({', '.join(self.parameters)},))"
        return self.main(f"return {answers!r}.get({key})")

    def examples(self) -> Iterable[tuple[str, object]]:
        docstring = ast.get_docstring(self.function) or ""
        for match in re.finditer(EXAMPLE.format(re.escape(self.name)), docstring):
            try:
                arguments = ast.literal_eval(f"({match['call']},)")
                answer = match["answer"].split("#")[0].strip().rstrip(".")
                yield repr(arguments), ast.literal_eval(answer)
            except (SyntaxError, ValueError, TypeError):
                continue  # words

    def solved(self) -> str:
        body = ast.parse(self.solution).body
        definition = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == self.name)
        start = 1 if ast.get_docstring(definition) else 0
        show = f"if aux({', '.join(self.parameters)}): pass"
        definition.body[start:start] = ast.parse(show).body
        return "\n".join(map(ast.unparse, body))


def scored(
    reward: CodeReward, problems: Sequence[Problem], main: Callable[[Problem], str]
) -> list[list[Score]]:
    """Return the scores as published, with `bonus: share` and with `bonus: team`."""
    actions = [JointAction(p.task, (AUX, main(p))) for p in problems]
    scores = []
    for reward.bonus in ("any_test", "share", "team"):
        scores.append(reward.score(actions))
    return scores


def best(scores: Sequence[list[Score]]) -> list[Score]:
    """Return the best of several mains, task by task."""
    return [max(of_task, key=lambda s: s.value) for of_task in zip(*scores, strict=True)]


def line(name: str, scores: Sequence[list[Score]]) -> str:
    means = " | ".join(f"{mean(s.value for s in each):.2f}" for each in scores)
    solved = sum(bool(score.passed) for score in scores[0])
    return f"| {name} | {means} | {solved} of {len(scores[0])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    human_eval.add_option(parser)
    problems = [Problem(task) for task in human_eval.tasks(parser.parse_args().data)]
    print("| main | as published | `bonus: share` | `bonus: team` | solved |")
    print("|---|---|---|---|---|")
    with CodeReward() as reward:
        each = [scored(reward, problems, methodcaller("returning", b)) for b in BODIES]
        print(line("`return True`", each[0]))
        columns = [best([scores[i] for scores in each]) for i in range(3)]
        print(line(f"the best of {len(BODIES)} such bodies", columns))
        print(line("a table of the docstring's examples", scored(reward, problems, Problem.table)))
        print(line("solves the task alone", scored(reward, problems, Problem.solved)))


if __name__ == "__main__":
    main()
