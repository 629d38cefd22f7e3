"""Model-written code as a script: output, errors, limits, several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from comlrl.rewards import run_python as module
from comlrl.rewards.run_python import MAX_ERROR, MAX_OUTPUT, MAX_SOURCE, PythonResult, run_python
from comlrl.rewards.sandbox.inside import wire


def test_output_and_input():
    result = run_python("import sys\nprint(input() * 2)\nprint('late', file=sys.stderr)", "ab\n")
    assert result == PythonResult("abab\nlate\n", None)
    assert result.ok and result.report == "abab\nlate"


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [
        ("x = 1\nassert x == 2, 'two'", "AssertionError: two", 2),
        ("def f(:\n", "SyntaxError: invalid syntax", 1),
        ("raise SystemExit(3)", "SystemExit: 3", None),
        ("import os\nos._exit(0)", "ProcessEnded: the code ended its process", None),
        ("'x' * (1 << 32)", "MemoryError: ", 1),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "PermissionError", 2),
        ("import os\nos.fork()", "", 2),
        ("open('/etc/hostname').read()", "", 1),
    ],
)
def test_what_ends_it_early(code, error, line):
    result = run_python("print('begun')\n" + code, timeout=20)
    assert not result.ok and (result.error or "").startswith(error)
    if line is not None:
        assert result.line in (line + 1, None if "Syntax" in error else line + 1)


def test_time_runs_out_and_the_next_one_is_as_if_nothing_had_been():
    result = run_python("while True: pass", timeout=0.3)
    assert result.timed_out and result.error == "TimeoutError: it took more than 0.3 s"
    assert run_python("print(1)").output == "1\n"


def test_nothing_is_left_for_the_next_one():
    run_python("import builtins\nbuiltins.secret = 1\nopen('note', 'w').write('x')")
    result = run_python("import os\nprint(os.listdir('.'))\nprint(secret)")
    assert (
        result.output.splitlines()[0] == "[]"
        and result.error == "NameError: name 'secret' is not defined"
    )


def test_an_interrupted_run_leaves_nothing_for_the_next_one(monkeypatch):
    """Its program still runs then, and writes."""

    def interrupted(channel, wanted, deadline):
        if wanted != wire.LOAD:
            raise KeyboardInterrupt
        return receive(channel, wanted, deadline)

    receive = module._receive
    write = "while True: open('note', 'w').write('x')"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_receive", interrupted)
        run_python(write)
    assert run_python("import os, time\ntime.sleep(1)\nprint(os.listdir('.'))").output == "[]\n"


def test_long_output_is_cut_and_long_code_refused():
    for letter in "x\U0001f600":
        assert run_python(f"print('{letter}' * {2 * MAX_OUTPUT})").output == letter * MAX_OUTPUT
    with pytest.raises(ValueError, match="at most"):
        run_python("#" * (MAX_SOURCE + 1))


FORGE = """
import json, os, socket, struct
reply = json.dumps({reply!r}).encode()
for descriptor in range(3, 64):
    try: channel = socket.socket(fileno=os.dup(descriptor))
    except OSError: continue
    channel.sendall(struct.pack("<II", len(reply), 1) + reply)
os._exit(0)
"""


@pytest.mark.parametrize(
    "reply",
    [
        ["v", [{"t": [1]}, 7, "x"], None],
        ["v", {"i": [["a", None, None], "more"]}, None],
        {"i": [["v"], "more"]},
        ["v", ["a", None, None, 1], None],
        ["v", ["a", ["b"], None], None],
        ["e", [], None],
        "abc",
        {"n": "0x" + "f" * 9000},
        ["v", ["a", None, None], {"s": []}],
        ["v", ["a", None, None], "x" * 15 * MAX_OUTPUT],
    ],
)
def test_a_forged_reply_is_the_end_of_the_process(reply):
    result = run_python(FORGE.format(reply=reply))
    assert result == PythonResult("", "ProcessEnded: the code ended its process")


def test_what_a_forged_reply_may_say_is_text_of_bounded_length():
    reply = ["v", ["\ud800" * 2 * MAX_OUTPUT, "e" * 9999, True], None]
    result = run_python(FORGE.format(reply=reply))
    assert result == PythonResult("?" * MAX_OUTPUT, "e" * MAX_ERROR)
    assert run_python("print('\\ud800')").output == "?\n"


def test_several_at_once():
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(run_python, [f"print({i})" for i in range(16)]))
    assert [result.output for result in results] == [f"{i}\n" for i in range(16)]


def test_a_sandbox_outlives_the_thread_that_uses_it() -> None:
    for _ in range(3):
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(run_python, "print(1)").result().output == "1\n"
