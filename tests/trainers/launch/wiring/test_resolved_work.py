"""Domain, reward, prompts and mode of your own, from a YAML file alone: the cookbook's, in real
runs; and what is wrong with others, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from comlrl.errors import UserError
from comlrl.loggers.report.comparison import grouped
from comlrl.loggers.report.run_data import read_run
from comlrl.loop.checkpoint import newest
from comlrl.trainers.launch.commands import evaluate
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.commands.train import main
from comlrl.types import Attempt, JointAction
from tests.support.documented import programs
from tests.support.runs import Zygote, metrics, newest_step, resolved

ROOT = Path(__file__).parents[4]
SMALL = [
    "magrpo.num_generations=2", "magrpo.batch_size=2", "magrpo.max_new_tokens=4", "lora.r=2",
    "magrpo.eval_interval=1", "magrpo.eval_num_samples=2", "magrpo.save_steps=1",
    "magrpo.num_train_epochs=null",
]  # fmt: skip


def place(folder: Path) -> Path:
    """A folder with the files of the cookbook and of the tutorial's domain."""
    folder.mkdir(exist_ok=True)
    for name, body in (programs("cookbook.md") | programs("tutorial/domain.md")).items():
        (folder / name).write_text(body)
    return folder


def arguments(file: Path, out: Path, *more: str, steps: int = 1) -> list[str]:
    given = [*SMALL, f"output.dir={out}", f"magrpo.max_steps={steps}"]
    if file.name == "share.yaml":
        given.append(f"dataset.name={file.parent / 'share.jsonl'}")
    flags = [word for word in more if word.startswith("--")]
    given += [word for word in more if not word.startswith("--")]
    return ["--config", str(file), "--override", *given, *flags]


@pytest.fixture(scope="module")
def shared(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The cookbook's folder, and a run of its domain of two steps."""
    folder = place(tmp_path_factory.mktemp("own") / "here")
    out = folder.parent / "run"
    zygote.finish("magrpo", arguments(folder / "share.yaml", out, steps=2))
    return folder, out


# ------------------------------------------------------------------------- the cookbook's files


def test_the_domain_of_the_tutorial_is_short():
    source = programs("tutorial/domain.md")["share.py"]
    assert len(source.splitlines()) < 100


def test_a_domain_with_its_reward_prompts_and_mode(shared):
    folder, out = shared
    last = metrics(out)[-1]["metrics"]
    assert {"gap", "turn_2/gap", "reward/offers", "reward/shared", "pass@1"} <= set(last)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["roles_N"] == ["player_1", "player_2", "player_3"]
    assert samples[0]["problem"].endswith(" coins")
    assert (out / "share.py").read_text() == (folder / "share.py").read_text()
    assert (out / "report.html").exists()


def test_what_the_players_read(shared):
    _, work, _ = resolved(shared[0] / "share.yaml")
    prompts = work.prompts
    task = work.domain.task("t", {"coins": 9})
    first = prompts.first(task, 3)
    assert first[0].startswith("# 3 players share 9 coins.") and "Player 2 answers" in first[1]
    assert first[2] == "# 9 coins. Two others take before you.\ntake = "  # the file's own
    texts = ("4", "four", " 6 coins")
    reward = work.build_reward()
    (score,) = reward.score([JointAction(task, texts)])
    assert score.value == pytest.approx(0.2) and score.passed is False  # 2 of 3 name a number
    ((feedback, _, _),) = work.mode.build(prompts)([Attempt(task, texts, score, 1)])
    assert feedback == "# The players named 4, None, 6.\n# 9 coins, once more, player 1.\ntake = "


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("terse.yaml", "turn_2/pass_rate"),
        ("short.yaml", "reward/length"),
        ("count.yaml", "turn_2/pass_rate"),
    ],
)
def test_the_cookbooks_prompts_reward_and_mode_of_code(name, known, zygote, tmp_path):
    folder, out = place(tmp_path / "here"), tmp_path / "run"
    zygote.finish("magrpo", arguments(folder / name, out))
    by_phase = {line["phase"]: line["metrics"] for line in metrics(out)}
    assert known in by_phase["train"]
    assert "reward/length" not in by_phase["eval"]  # evaluation is by the code reward alone


def test_two_processes_do_what_one_does(shared, zygote, tmp_path):
    folder, out = shared
    zygote.finish_team(2, "magrpo", arguments(folder / "share.yaml", tmp_path / "run", steps=2))
    names = ("reward_mean", "gap", "turn_2/gap")
    one, two = (
        [[line["metrics"][name] for name in names] for line in metrics(path)]
        for path in (out, tmp_path / "run")
    )
    assert len(one) == len(two) and one[:2] == two[:2]  # then gradients are summed in another order


# ----------------------------------------------------------------------------- a run's own copy


def test_a_run_is_repeated_and_evaluated_with_its_own_modules(shared, zygote, tmp_path):
    """Those beside its config.yaml: the first ones lie where nobody looks for them."""
    _, out = shared
    zygote.finish("magrpo", arguments(out / "config.yaml", tmp_path / "again", steps=2))
    assert metrics(tmp_path / "again") == metrics(out)
    code = evaluate.main(
        ["--checkpoint", str(out), "--out", str(tmp_path / "e.json"), "--k", "1,2"]
    )
    result = json.loads((tmp_path / "e.json").read_text())
    assert code == 0 and {"gap", "pass@2"} <= set(result["metrics"])


def test_resuming_notices_a_changed_module(shared, zygote, tmp_path):
    folder, out = tmp_path / "here", tmp_path / "run"
    shutil.copytree(shared[0], folder)
    shutil.copytree(shared[1], out)
    file, data = folder / "share.py", f"dataset.name={shared[0] / 'share.jsonl'}"
    given = arguments(folder / "share.yaml", out, data, "--resume", steps=3)
    file.write_text(file.read_text().replace("offer: float = 0.1", "offer: float = 0.2"))
    line = zygote.finish("magrpo", given, code=2).error
    assert re.match(r"modules.json/share.py: '\w{12}' differs from the run's '\w{12}'; ", line)
    assert "0.1" in (out / "share.py").read_text()
    zygote.finish("magrpo", [*given, "--resume-force"])
    assert metrics(out)[: len(metrics(shared[1]))] == metrics(shared[1])
    assert "offer: float = 0.2" in (out / "share.py").read_text()


def test_runs_of_other_modules_are_neither_crossed_nor_merged(shared, tmp_path, capsys):
    out, other = shared[1], tmp_path / "other"
    shutil.copytree(out, other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("seed: 42", "seed: 43"))
    assert len(grouped([read_run(out), read_run(other)])) == 1
    digests = json.loads((out / "modules.json").read_text())
    (other / "modules.json").write_text(json.dumps(dict.fromkeys(digests, "0" * 64)))
    assert len(grouped([read_run(out), read_run(other)])) == 2
    assert evaluate.main(["--cross-play", str(out), str(other)]) == 2
    assert "was trained with share.py=" in capsys.readouterr().err


def test_runs_of_other_work_are_not_crossed(shared, tmp_path, capsys):
    out, other = shared[1], tmp_path / "other"
    shutil.copytree(out, other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("arguments: {}", "arguments: {offer: 0.5}"))
    given = ["--cross-play", str(out), str(other)]
    assert evaluate.main(given) == 2
    assert "was trained with reward.arguments={'offer': 0.5}, and" in capsys.readouterr().err
    plan = evaluate.make_plan(
        evaluate.parse_arguments([*given, "--override", "reward.arguments.offer=0.2"])
    )
    assert plan.config.reward.arguments == {"offer": 0.2}


def test_a_run_brings_its_work_to_another_file(shared, capsys):
    quickstart = str(ROOT / "configs" / "magrpo_quickstart.yaml")
    given = ["--config", quickstart, "--checkpoint", str(shared[1])]
    config = evaluate.make_plan(evaluate.parse_arguments(given)).config
    assert config.domain == "share:SHARING" and "player_3" in config.prompts
    assert "domain='share:SHARING' is used, as" in capsys.readouterr().err
    given += ["--override", "domain=code", "magrpo.num_agents=3", "prompts={}"]
    evaluate.make_plan(evaluate.parse_arguments(given))
    assert "domain='code', and" in capsys.readouterr().err


def test_a_runs_copy_that_was_edited_is_reported(shared, tmp_path, capsys):
    shutil.copytree(shared[1], tmp_path / "run")
    file = tmp_path / "run" / "share.py"
    file.write_text(file.read_text() + "# edited\n")
    evaluate.make_plan(evaluate.parse_arguments(["--checkpoint", str(tmp_path / "run")]))
    assert "share.py is no longer what '" in capsys.readouterr().err


# --------------------------------------------------------------------------------- what is wrong

DOMAIN = "from share import Sharing\n"
BAD = {
    "lacks": "class Lacks:\n    pass\nLACKS = Lacks()",
    "half": "from comlrl.types import Domain\nclass Half(Domain):\n"
    "    def task(self, name, row): ...\nHALF = Half()",
    "bare": DOMAIN + "class Bare:\n    fields, revision, reward = (), '', None\n    task = roles = "
    "templates = values = problem = lambda self, *a: ()\nBARE = Bare()",
    "field": DOMAIN + "class Field(Sharing):\n    revision = '{colour}'\nFIELD = Field()",
    "short": DOMAIN + "class Short(Sharing):\n    revision = ''\nSHORT = Short()",
    "mute": DOMAIN + "class Mute(Sharing):\n    reward = dict\nMUTE = Mute()",
    "one": DOMAIN + "class One(Sharing):\n    def templates(self, n):\n        return ('a',)",
    "pair": DOMAIN + "class Pair(Sharing):\n    def roles(self, n):\n"
    "        raise ValueError('this work is for two')\nPAIR = Pair()",
    "plain": "class Plain:\n    def __init__(self, prompts, model): ...\n"
    "    def __call__(self, attempts): ...\nclass None_:\n    pass",
}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "domain=shares:SHARING",
            r"domain: 'shares:SHARING': there is no module `shares` .*`share`\?",
        ),
        ("domain=share:Nothing", r"domain: 'share:Nothing': `share` has no `Nothing`; "),
        (
            "domain=cooking",
            r"domain: unknown domain 'cooking'; choose from code.* or use module:",
        ),
        ("domain=lacks:LACKS", r"domain: 'lacks:LACKS' has no method `task\(name, row\)`"),
        ("domain=half:HALF", r"domain: 'half:HALF' has no method `roles\(num_agents\)`"),
        ("domain=bare:BARE", r"domain: 'bare:BARE' has no `prefill`; derive its class from comlrl"),
        ("domain=field:FIELD", r"domain: its `revision`: '\{colour\}' contains an unknown field"),
        ("domain=short:SHORT", r"magrpo.num_turns: 2, and domain 'short:SHORT' has no `revision`"),
        ("domain=mute:MUTE", r"domain: 'mute:MUTE.reward' has no method `score\(actions\)`"),
        (
            "domain=one:One",
            r"domain: its `templates` for 3 agents are \['a'\]; return one for each",
        ),
        ("domain=pair:PAIR", r"magrpo.num_agents: 3; this work is for two"),
        ("reward.target=share:Deel", r"reward.target: 'share:Deel': .* did you mean `Deal`\?"),
        ("reward.target=share:SHARING", r"reward.target: 'share:SHARING' is not a class; name"),
        ("reward.target=share:Table", r"reward.target: 'share:Table' has no method `score\(act"),
        ("reward.arguments.ofer=1", r"reward.arguments.ofer: unknown .* did you mean `offer`\?"),
        ("reward.arguments.offer=much", r"reward.arguments.offer: 'much' is not valid; use a nu"),
        ("external.mode=tabel", r"external.mode: 'tabel' is not a mode; did you mean `table`\?"),
        ("external.mode=share:Deal", r"external.mode: 'share:Deal' has no method `__call__\(att"),
        ("external.mode=plain:Plain", r"external.mode.model: missing, and Plain cannot be made"),
        ("external.mode=plain:None_", r"external.mode: 'plain:None_' has no method `__call__"),
        (
            "prompts.player_4=x",
            r"prompts.player_4: 'x' is for no agent; did you mean `player_\d`\?",
        ),
        (
            "prompts.player_1={coin}",
            r"prompts.player_1: .* unknown field \{coin\}; did you mean `c",
        ),
        ("prompts.revision={", r"prompts.revision: '\{' cannot be filled in: .* doubled"),
        ("prompts.player_1={}", r"prompts.player_1: '\{\}' cannot be filled in"),
        ("prompts.player_1={coins.x}", r"prompts.player_1: .* cannot be filled in"),
    ],
)
def test_refused_at_the_door(override, line, tmp_path):
    folder = place(tmp_path)
    for name, body in BAD.items():
        (folder / f"{name}.py").write_text(body)
    parsed = parse_arguments("magrpo", arguments(folder / "share.yaml", tmp_path / "run", override))
    with pytest.raises(UserError) as raised:
        resolve("magrpo", parsed)
    assert re.match(line, str(raised.value)) and "\n" not in str(raised.value)


PLAIN_NUMBERS = """
from comlrl.rewards.code.breakdown import RewardBreakdown

class Numbers:
    def score(self, actions):
        return [0.0 for _ in actions]

class Says(Numbers):
    facts = RewardBreakdown
"""


def test_a_mode_that_reads_what_the_reward_does_not_find_is_refused_at_the_door(tmp_path):
    (tmp_path / "numbers_.py").write_text(PLAIN_NUMBERS)

    file, mode = tmp_path / "run.yaml", "external.mode=level_passed"
    file.write_text("reward: {target: 'numbers_:Numbers'}\nmagrpo: {}\n")
    line = "external.mode: 'level_passed' reads a RewardBreakdown .* 'numbers_:Numbers' does not"
    with pytest.raises(UserError, match=line):
        resolved(file, mode, "magrpo.num_turns=2")
    resolved(file, mode, "magrpo.num_turns=1")  # nobody reads any feedback
    resolved(file, mode, "magrpo.num_turns=2", "reward.target=numbers_:Says")


FAILING = """
from share import Deal, Table

class Failing(Deal):
    def __init__(self, how: str, calls: int):
        super().__init__()
        self.how, self.calls = how, calls

    def score(self, actions):
        scores = super().score(actions)
        self.calls -= 1
        if self.calls < 0:
            match self.how:
                case "nan":
                    return [float("nan") for _ in scores]
                case "few":
                    return scores[1:]
                case "raise":
                    return scores[0].facts["coins"]
        return scores

class Mute(Table):
    def __call__(self, attempts):
        return [texts[1:] for texts in super().__call__(attempts)]
"""


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("nan", r"task '\w+': returned nan as a score; return finite numbers"),
        ("few", r"returned \d scores for \d joint actions; return a list with one score for each"),
        ("raise", r"raised TypeError: list indices .* \(\S+/failing.py:19\)"),
    ],
)
def test_a_reward_that_fails_in_the_middle_loses_nothing(how, line, zygote, tmp_path):
    folder, out = place(tmp_path / "here"), tmp_path / "run"
    (folder / "failing.py").write_text(FAILING)
    failing = ["reward.target=failing:Failing", f"reward.arguments.how={how}"]
    # Calls: an evaluation and a step of 2 turns each, so that the second step fails.
    given = arguments(
        folder / "share.yaml", out, *failing, "reward.arguments.calls=7", "external.mode=table",
        steps=3,
    )  # fmt: skip
    error = zygote.finish("magrpo", given, code=1).error
    assert re.match(rf"reward.target: 'failing:Failing',? {line}", error)
    assert newest_step(out) == 1 and newest(out) is not None
    assert [r["update"] for r in read_run(out).records] == [0, 1, 1]
    if how == "raise":
        forced = [*given, "reward.arguments.calls=99", "--resume", "--resume-force"]
        zygote.finish("magrpo", forced)
        assert newest_step(out) == 3


def test_a_mode_that_leaves_an_agent_out_is_refused(zygote, tmp_path):
    folder = place(tmp_path / "here")
    (folder / "failing.py").write_text(FAILING)
    given = arguments(folder / "share.yaml", tmp_path / "run", "external.mode=failing:Mute")
    line = zygote.finish("magrpo", given, code=1).error
    assert line.startswith("external.mode: 'failing:Mute' returned (") and "for 3 agents" in line


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("greatest_reward = 1.0", "its `greatest_reward` is 1.0; write a method `greatest_reward("),
        ("measures = {}", "its `measures` is {}; write a method `measures(action, score)`"),
        ("roles = ('aux', 'main')", "its `roles` is ('aux', 'main'); write a method `roles("),
        ("def parts(self): return ()", "its `parts` is not called as parts(task, num_agents)"),
        ("def __init__(self): self.modes = {}", "its `modes` is {}; write a method `modes()`"),
        ("fields = 'text'", "its `fields` is 'text'; use a tuple of names"),
        ("reward = 1.0", "its `reward` is 1.0; use a class"),
    ],
)
def test_an_attribute_in_the_place_of_a_method_is_refused(tmp_path, line, named):
    (tmp_path / "mine.py").write_text(
        f"from comlrl.rewards.code.domain import CodeDomain\nclass W(CodeDomain):\n    {line}\n"
    )
    file = tmp_path / "c.yaml"
    file.write_text("domain: 'mine:W'\nmagrpo: {}\n")
    with pytest.raises(UserError, match=re.escape(f"domain: 'mine:W': {named}")):
        resolved(file)


def test_a_rewards_own_close_is_a_method(tmp_path):
    (tmp_path / "mine.py").write_text("class R:\n    close = 3\n    def score(self, actions): 0\n")
    file = tmp_path / "c.yaml"
    file.write_text("reward: {target: 'mine:R'}\nmagrpo: {}\n")
    with pytest.raises(UserError, match=r"its `close` is 3; write a method `close\(\)`"):
        resolved(file)


COUNTED = """
from pathlib import Path
from share import Sharing

with Path(__file__).with_name("imports").open("a") as file:
    file.write("+")


class Counted(Sharing):
    def __init__(self):
        with Path(__file__).with_name("made").open("a") as file:
            file.write("+")
"""


def test_a_command_imports_and_makes_a_domain_once(tmp_path):
    folder = place(tmp_path)
    (folder / "counted.py").write_text(COUNTED)
    given = arguments(folder / "share.yaml", tmp_path / "run", "domain=counted:Counted")
    assert main("magrpo", lambda run: pytest.fail("trained"), [*given, "--dry-run"]) == 0
    assert (folder / "imports").read_text() == (folder / "made").read_text() == "+"
