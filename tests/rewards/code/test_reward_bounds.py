"""What a text may cost the trainer: the size of its code, and the memory of what is known."""

from __future__ import annotations

import ast
import marshal

import pytest

from comlrl.rewards.code import bounds
from comlrl.rewards.code import joint_program as program
from comlrl.rewards.code import reward as reward_module
from comlrl.rewards.code.analysis.parsing import MAX_BYTES
from comlrl.rewards.code.bounds import Memo, check_names, written_out
from comlrl.rewards.code.breakdown import SyntaxProblem
from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction
from tests.support.fakes import code_task

HEAD = "def f(x):\n"
LAMBDA = "  lambda: 0\n"


def private_names(length: int, count: int) -> str:
    names = "".join(f"  __n{n}\n" for n in range(count))
    return f"{HEAD} class {'N' * length}:\n{names} return x\n"


def functions_in_a_function(length: int, count: int) -> str:
    return f"{HEAD} def {'N' * length}():\n{LAMBDA * count} return x\n"


def functions_a_long_way_down(length: int, count: int) -> str:
    definitions = "".join(f"{' ' * n}def {'N' * (length // 60)}():\n" for n in range(1, 61))
    return f"{HEAD}{definitions}{(59 * ' ' + LAMBDA) * (count // 6)} return x\n"


# Each is read in a moment, and compiles to up to 100 MB.
KINDS = (private_names, functions_in_a_function, functions_a_long_way_down)
ENDLESS = [kind(27_000, 2500) for kind in KINDS]
HONEST = "def f(x):\n    return x * x + {0} - {0}\n"


@pytest.mark.parametrize("text", ENDLESS, ids=[kind.__name__ for kind in KINDS])
def test_names_without_end_are_not_compiled(text):
    assert len(text) < MAX_BYTES
    with pytest.raises(SyntaxError, match="endless"):
        check_names(text)
    assert isinstance(program.compile_program(text), SyntaxProblem)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_guessed_from_above(kind):
    """Against what the compiler makes of long names and of short ones, at a size that it bears."""
    long, short = kind(3000, 100), kind(60, 100)
    made = [len(marshal.dumps(compile(text, "", "exec"))) for text in (long, short)]
    guessed = [written_out(ast.parse(text)) for text in (long, short)]
    assert guessed[0] - guessed[1] >= made[0] - made[1] > 20_000


def test_long_honest_programs_compile():
    lines = "".join(f"    value_{n % 50} = abs(x) + {n}\n" for n in range(2000))
    code = program.compile_program(f"def a_rather_long_name(x):\n{lines}    return x\n")
    assert isinstance(code, bytes) and bounds.bounded(code) is code


def scores(reward: CodeReward, *texts: str) -> list[float]:
    task = code_task("t", "", "def check(candidate):\n    assert candidate(3) == 9\n", "f")
    return [score.value for score in reward.score([JointAction(task, (text,)) for text in texts])]


def test_too_large_a_program_is_not_run():
    """The honest programs beside it are."""
    large = private_names(27_000, 100)
    assert 1 << 20 < len(program.compile_program(large)) < 4 << 20
    with CodeReward(workers=1) as reward:
        honest = [HONEST.format(n) for n in range(5)]
        values = scores(reward, *honest, large, *ENDLESS)
        (problem,) = (s.facts.syntax_error for s in reward.score(actions(large)))
    assert values == [pytest.approx(2.1)] * 5 + [pytest.approx(0.6)] * 4
    assert "more than 1,048,576" in problem.message


def actions(text: str) -> list[JointAction]:
    task = code_task("t", "", "def check(candidate):\n    assert candidate(3) == 9\n", "f")
    return [JointAction(task, (text,))]


def test_a_memo_keeps_what_was_used_last():
    calls = []

    def double(text: str) -> str:
        calls.append(text)
        return 2 * text

    memo = Memo(double, lambda arguments, result: len(arguments[0]) + len(result), capacity=30)
    texts = ["aaa", "bbb", "aaa", "ccc"]
    assert [memo(text) for text in texts] == [2 * text for text in texts]
    assert (calls, memo.weight) == (["aaa", "bbb", "ccc"], 27)
    memo("ddd")  # bbb goes
    assert (memo("aaa"), memo.weight) == ("aaaaaa", 27) and calls[-1] == "ddd"
    memo("bbb")
    assert calls[-1] == "bbb"
    assert memo("e" * 100) == "e" * 200  # more than all that is remembered
    assert memo.weight == 0


def test_what_is_remembered_is_bounded_by_its_size(monkeypatch):
    monkeypatch.setattr(reward_module, "CACHED_TEXT", 2000)
    monkeypatch.setattr(reward_module, "CACHED_CODE", 10_000)
    long = HEAD + "".join(f"    y = {n}\n" for n in range(50)) + "    return x * x + {0} - {0}\n"
    with CodeReward(workers=1) as reward:
        for start in range(0, 20, 5):
            assert scores(reward, *(long.format(n) for n in range(start, start + 5)))
            assert reward._contribution.weight <= 2000 and reward._compile.weight <= 10_000
            assert len(reward._outcomes) <= 10
