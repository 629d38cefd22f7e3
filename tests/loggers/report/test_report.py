"""The report: run directories made through the real loggers, pages opened in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.loggers import write_domain
from comlrl.loggers.jsonl import JsonlLogger
from comlrl.loggers.report.chart import Chart, Series, smoothed
from comlrl.loggers.report.charts import sections
from comlrl.loggers.report.comparison import curve, grouped, write_comparison
from comlrl.loggers.report.lines import learning_series
from comlrl.loggers.report.pictures import COLOURS, draw, svg, write_charts
from comlrl.loggers.report.run_data import ReportError, Run, read_run
from comlrl.loggers.report.sample_episodes import episodes
from comlrl.loggers.report.write import learned, render, write_report
from comlrl.loggers.views.code import python
from comlrl.loop.records import LogMark, LogRecord
from comlrl.rewards.code.domain import CODE
from comlrl.trainers.launch.commands.report import main
from tests.support import processes
from tests.support.html_page import Page
from tests.support.made_runs import logged, make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "magrpo_mini_1", turns=2)
    write_report(folder)
    return folder


def test_the_page_is_whole_and_fetches_nothing(run_dir):
    html = (run_dir / "report.html").read_text()
    page = Page(html)
    assert page.open == [] and page.fetched == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://", html)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_what_a_reader_looks_for(run_dir):
    text = "".join(Page((run_dir / "report.html").read_text()).text)
    for words in (
        "held-out reward", "Learning", "Learning to agree", "Convention of aux",
        "Parts of the reward", "Turns", "How main uses aux", "Task by task", "Optimisation",
        "Reward without all tests passed", "Where the time goes", "Episodes", "Configuration",
    ):  # fmt: skip
        assert words in text, words


def test_contents_lead_to_every_section(run_dir):
    run, html = read_run(run_dir), (run_dir / "report.html").read_text()
    page = Page(html)
    assert len(page.links) == len(set(page.links)) == len(sections(run)) + 2
    assert page.links[0] == "learning" and page.links[-2:] == ["episodes", "the-run"]
    assert set(page.links) <= set(page.ids) and len(page.ids) == len(set(page.ids))


def test_what_models_and_tests_say_is_text_and_not_markup(run_dir):
    html = (run_dir / "report.html").read_text()
    assert "<b>&False</b>" not in html
    assert "[True, &lt;b&gt;&amp;False&lt;/b&gt;]" in html


def test_the_command_makes_the_page_anew_from_the_directory_alone(run_dir, tmp_path):
    moved = tmp_path / run_dir.name
    shutil.copytree(run_dir, moved)
    before = (moved / "report.html").read_text()
    (moved / "report.html").unlink()
    processes.python("-m", "comlrl.trainers.launch", "report", moved)
    assert (moved / "report.html").read_text() == before


def test_a_directory_without_a_run_is_one_line_and_exit_code_2(tmp_path):
    done = processes.python("-m", "comlrl.trainers.launch", "report", tmp_path, code=2)
    assert done.stderr == f"error: {tmp_path}: not a run directory; it contains no metrics.jsonl\n"


def test_a_damaged_run_is_named(tmp_path):
    folder = make_run(tmp_path / "magrpo_x", updates=5)
    (folder / "summary.json").write_text('{"algorithm": ')
    with pytest.raises(ReportError, match=r"magrpo_x: damaged: .*summary\.json is not JSON"):
        read_run(folder)


def test_a_run_with_hardly_anything_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.begin(LogMark())
    logger.log(
        LogRecord(
            step=8,
            update=1,
            epoch=0,
            phase="train",
            metrics={"reward_mean": 1.0, "odd": float("nan")},
        )
    )
    logger.close()
    write_report(tmp_path)
    assert "Mean reward" in (tmp_path / "report.html").read_text()


def test_every_episode_of_the_last_evaluation_can_be_filtered(run_dir):
    run = read_run(run_dir)
    first, last = run.passes()
    before = {s["task_id"]: s["reward_task_mean"] for s in first}
    shown = episodes(run)
    gains = sorted((s["reward_task_mean"] - before[s["task_id"]] for s in last), reverse=True)
    assert [e.gain for e in shown] == gains
    page = Page((run_dir / "report.html").read_text())
    rows = [(e["data-task"], float(e["data-reward"]), e["data-passed"]) for e in page.episodes]
    assert rows == [
        (e.sample["task_id"], e.sample["reward"], str(int(e.sample["passed"]))) for e in shown
    ]
    assert {"0", "1"} == {passed for _, _, passed in rows}


def test_tasks_answered_several_times(tmp_path):
    folder = logged(tmp_path, reward_mean=[0.1, 0.9])
    lines = [
        {"update": update, "phase": "eval", "task_id": "a", "problem": "", "roles_N": ["main"],
         "reward": reward, "reward_task_mean": reward, "completions_N": ["x"], "turn": 1}
        for update, rewards in ((0, [1.0, 2.0]), (9, [4.0, 3.0])) for reward in rewards
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert [(e.answer, e.gain) for e in episodes(run)] == [(1, 3.0), (2, 1.0)]
    (section,) = [s for s in sections(run) if s.title == "Task by task"]
    assert [list(line.ys_X) for line in section.charts[0].series] == [[1.5], [3.5]]  # means
    html = render(run)
    assert "<option" in html and "not passed" not in html  # a reward without tests
    assert "<small>main</small>" in html  # one agent


def test_fences_are_words_and_nothing_is_framed_in_red(run_dir):
    html = (run_dir / "report.html").read_text()
    assert ".err" not in html
    text = "Is this it?\n```python\ndef f():\n    return 1\n```\nfor sure"
    shown = str(python(text))
    assert 'class="err"' not in shown
    assert shown.startswith('<span class="words">Is this it?\n```python\n</span>')
    assert shown.endswith('<span class="words">```\n</span><span class="words">for sure</span>')
    assert '<span class="k">def</span>' in shown
    assert re.sub("<[^>]*>", "", shown) == text
    unclosed = str(python("```\nx = 1\n"))
    assert re.sub("<[^>]*>", "", unclosed) == "```\nx = 1\n"


def test_agents_are_named_by_their_roles(tmp_path):
    logged(
        tmp_path,
        **{f"agent_{i}__completion_length_mean": [1.0, 2.0] for i in range(3)},
        agent_1__loss=[1.0, 2.0],
        loss=[3.0, 4.0],
        training_step=[1.0, 2.0],
    )
    write_domain(tmp_path / "domain.json", "code", CODE, CODE.roles(3))
    charts = {c.title: c for s in sections(read_run(tmp_path)) for c in s.charts}
    assert charts["Lengths in tokens"].legend == (("aux", 0), ("aux2", 1), ("main", 2))
    assert charts["loss"].legend == (("aux2", 0), ("all agents", 1))
    assert "training step" not in charts  # a straight line


def test_nothing_that_was_logged_is_left_out(run_dir):
    run = read_run(run_dir)
    titles = {chart.title for section in sections(run) for chart in section.charts}
    assert {"loss", "gradient norm", "entropy", "learning rate"} <= titles


def _titles(folder: Path) -> list[str]:
    return [chart.title for section in sections(read_run(folder)) for chart in section.charts]


def test_model_score_beside_task_reward(tmp_path):
    logged(tmp_path, reward_mean=[0.1, 0.9], task_reward_mean=[1.0, 0.8])
    assert "Model score and task reward" in _titles(tmp_path)
    training = [s for s in learning_series(read_run(tmp_path)) if s.label == "training"]
    assert [list(s.ys_X) for s in training] == [[1.0, 0.8]]  # on one axis with held-out tasks
    compared = curve([read_run(tmp_path)], "train", "reward_mean")
    assert compared is not None and compared.ys_X == [1.0, 0.8]


def test_runs_of_preferences_alone_show_the_reward_of_their_candidates(tmp_path):
    logged(tmp_path, preferences__reward_mean=[1.0, 1.5])
    (training,) = [s for s in learning_series(read_run(tmp_path)) if s.label == "training"]
    assert list(training.ys_X) == [1.0, 1.5]


@pytest.mark.parametrize(
    "last, change",  # two intervals of 1.96 · 1 / √64 = 0.245 each; the first is 1.5 ± 0.245
    [(2.0, "rose"), (1.98, "not clearly"), (1.02, "not clearly"), (1.0, "fell")],
)
def test_what_was_learned_is_what_the_noise_leaves(tmp_path, last, change):
    folder = logged(tmp_path, reward_mean=[1.5, last], reward_std=[1, 1], tasks=[64, 64])
    assert learned(read_run(folder)) == ""  # training alone
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train"', '"eval"'))
    assert change in learned(read_run(folder))


def test_preferences(tmp_path):
    logged(tmp_path, reward_mean=[0.1, 0.9], reward_model__accuracy=[0.5, 0.8])
    (tmp_path / "preferences_summary.json").write_text(
        json.dumps({"gaps": {"0.5": 1, "1": 1, "1.5": 1, "3": 1}, "reward_model_accuracy": 0.83})
    )
    titles = _titles(tmp_path)
    assert "Reward gap of the pairs" in titles
    assert "Reward model: pairs ordered rightly" in titles
    assert "<b>83%</b>" in render(read_run(tmp_path))


def test_latents_on_their_principal_axes(tmp_path):
    logged(tmp_path, reward_mean=[0.1, 0.9])
    lines = [  # aux moves along one axis, main stays: all variance on one line
        {"step": i, "turn": 1, "role": role, "mu": [3.0 * i * moves, 4.0 * i * moves, 1.0]}
        for i in range(20)
        for role, moves in (("aux", 1), ("main", 0))
    ]
    (tmp_path / "latents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = [s for s in sections(read_run(tmp_path)) if s.title == "Latents"]
    (chart,) = section.charts
    assert chart.legend == (("aux", 0), ("main", 1))
    assert "100% of the variance" in chart.note
    assert svg(chart).count("<use") == 40


def test_bootstrap_interval():
    assert bootstrap_interval([2.0]) == (2.0, 2.0)
    low, high = bootstrap_interval([1.0, 2.0, 3.0])
    # The mean of three draws lies at 1 or below in 1/27 = 3.7% > 2.5% of the resamples.
    assert (low, high) == (1.0, 3.0)
    many = np.random.default_rng(1).normal(0, 1, 400)
    low, high = bootstrap_interval(many)  # close to mean ± 1.96 / √400
    assert low == pytest.approx(many.mean() - 0.098, abs=0.02)
    assert high == pytest.approx(many.mean() + 0.098, abs=0.02)


def test_runs_are_averaged_at_common_steps(tmp_path):
    one = read_run(logged(tmp_path / "a", reward_mean=[0.0, 1.0, 2.0]))  # at 0, 10, 20
    two = read_run(logged(tmp_path / "b", reward_mean=[2.0, 3.0]))  # at 0, 10
    averaged = curve([one, two], "train", "reward_mean")
    assert averaged is not None
    assert averaged.xs_X == [0, 10]  # where both are known
    assert averaged.ys_X == [1.0, 2.0]
    assert curve([one, two], "eval", "reward_mean") is None


def test_runs_that_differ_in_the_seed_alone_are_one_setting(tmp_path):
    runs = [
        read_run(make_run(tmp_path / f"{algorithm}_{turns}_{seed}", seed=seed, updates=5,
                          turns=turns, algorithm=algorithm))
        for algorithm, turns, seed in
        [("magrpo", 1, 1), ("magrpo", 1, 2), ("magrpo", 2, 1), ("ppo", 1, 1)]
    ]  # fmt: skip
    groups = [(group.name, group.run_names) for group in grouped(runs)]
    assert groups == [
        ("MAGRPO num_turns=1", ("magrpo_1_1", "magrpo_1_2")),
        ("MAGRPO num_turns=2", ("magrpo_2_1",)),
        ("PPO", ("ppo_1_1",)),
    ]
    named = grouped(runs, ["one", "two", "other"])
    assert [group.label for group in named] == [
        "one (magrpo_1_1, magrpo_1_2)", "two (magrpo_2_1)", "other (ppo_1_1)",
    ]  # fmt: skip
    with pytest.raises(ReportError, match=r"--labels: 2 for 3 settings; name each of: mag"):
        grouped(runs, ["one", "two"])
    written = write_comparison(runs, tmp_path / "out")
    assert [path.name for path in written] == [
        "comparison.html", "comparison.png", "comparison.svg",
    ]  # fmt: skip
    page = Page(written[0].read_text())
    assert page.open == [] and page.fetched == []
    text = "".join(page.text)
    assert "MAGRPO num_turns=2" in text and "magrpo_1_1, magrpo_1_2" in text
    assert "Mean reward, held-out tasks" in text
    assert written[2].read_text().lstrip().startswith("<?xml")
    write_report(tmp_path / "magrpo_1_2")
    page = Page(write_comparison(runs, tmp_path / "out")[0].read_text())
    assert page.fetched == ["../magrpo_1_2/report.html"]  # a way to click, of the run that has one


def test_a_ninth_setting_is_dashed():
    drawn = svg(Chart("", [Series(f"{i}", [0, 1], [0, i], i) for i in range(9)]))
    lines = dict(re.findall(r'<g data-s="(\d)"><path [^>]*style="([^"]*)"', drawn))
    assert len(lines) == 9 and "var(--c1)" in lines["0"] and "var(--c1)" in lines["8"]
    assert "dasharray" in lines["8"] and "dasharray" not in lines["0"]


def test_a_drawing_is_the_same_each_time_and_takes_its_colours_from_the_page():
    chart = Chart("A <b>title</b>", [Series("", [0, 1], [0.5, 0.25], dots=True)], percent=True)
    drawn = svg(chart)
    assert drawn == svg(chart)
    assert "&lt;b&gt;title" in drawn and "<b>" not in drawn
    assert not re.search(r"#[0-9a-f]{6}[^0-9a-f]|<style|<metadata|http", drawn)
    other = svg(Chart("Another", chart.series, percent=True))  # no id twice on a page
    assert not set(re.findall(r' id="([^"]*)"', drawn)) & set(re.findall(r' id="([^"]*)"', other))


def test_pictures_are_the_same_each_time(tmp_path):
    chart = Chart("Costs in $, not $\\frac{", [Series("$x_{", [0, 1], [0.5, 0.25])], wide=True)
    files = [tmp_path / f"{i}.{kind}" for i in range(2) for kind in ("svg", "pdf", "png")]
    write_charts([chart], *files[:3])
    write_charts([chart], *files[3:])
    assert [f.read_bytes() for f in files[:3]] == [f.read_bytes() for f in files[3:]]


def test_a_long_line_is_thinned():
    line = Series("x", range(2000), [float(i) for i in range(2000)])
    chart = Chart("Long", [line])
    axis = Figure().subplots()
    draw(axis, chart)
    xs, ys = axis.lines[0].get_data()
    assert len(xs) == 300 and list(xs) == list(ys)


def test_figures_by_themselves_for_papers(run_dir, tmp_path, capsys):
    from matplotlib.image import imread

    def made(name: str, *arguments: Path | str) -> list[str]:
        folder = tmp_path / name
        assert main([*map(str, arguments), "--figures", str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {str(file) for file in folder.iterdir()} <= set(lines)
        for pdf in folder.glob("*.pdf"):
            assert pdf.read_bytes().startswith(b"%PDF") and b"/Type3" not in pdf.read_bytes()
            assert imread(pdf.with_suffix(".png")).shape[1] == 1020  # 3.4 inches at 300 dpi
        return sorted(path.stem for path in folder.glob("*.png"))

    assert made("one", run_dir) == ["reward", "reward_parts", "shares"]
    two = [logged(tmp_path / name, reward_mean=[0.0, 1.0], pass_rate=[0.0, 0.5]) for name in "ab"]
    both = made("both", *two, "--out", tmp_path / "out")
    assert both == ["train_pass_rate", "train_reward_mean"]


def test_only_seeds_of_one_setting_are_merged(tmp_path):
    def run(name: str, seed: int, **changes: str) -> Run:
        folder = make_run(tmp_path / name, seed=seed, updates=5)
        for file, text in changes.items():
            path = next(folder.glob(f"{file}.*"))
            path.unlink() if not text else path.write_text(text + path.read_text())
        return read_run(folder)

    def together(*runs: Run) -> list[int]:
        return [len(group.runs) for group in grouped(runs)]

    first = run("a", 1)
    assert together(first, run("b", 2)) == [2]
    assert together(first, run("c", 1)) == [1, 1]  # the same seed: something else differs
    script = json.dumps({"command": "train_grpo.py --config x"})
    other = run("d", 2, summary="")
    (other.path / "environment.json").write_text(script)
    assert read_run(other.path).algorithm == "grpo"  # whatever its directory is called
    assert together(first, read_run(other.path)) == [1, 1]
    assert together(run("e", 2, config=""), run("f", 3, config="")) == [1, 1]
    assert together(first, run("g", 2, config="reward: {target: x.y:Z}\n")) == [1, 1]
    changed = {
        "phase": "eval", "task_id": "new", "problem": "", "update": 0, "reward": 1.0,
        "reward_task_mean": 1.0, "roles_N": [], "completions_N": [],
    }  # fmt: skip
    assert together(first, run("h", 2, samples=json.dumps(changed) + "\n")) == [1, 1]


@pytest.mark.filterwarnings("error")
def test_the_picture_has_one_legend_and_room_for_its_axes(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    folders = []
    for i in range(6):
        folder = make_run(tmp_path / f"a_run_with_quite_a_long_name_{i}", updates=5)
        keys = "".join(f"  {key}_of_a_setting: {i}\n" for key in ("first", "second", "third"))
        with (folder / "config.yaml").open("a") as file:
            file.write(keys)
        folders.append(str(folder))
    assert main([*folders, "--out", str(tmp_path / "out")]) == 0
    figure = drawn[-1]
    (legend,) = figure.legends
    assert not any(axis.get_legend() for axis in figure.axes)
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == 6 and all(f"name_{i}" in texts[i] for i in range(6))
    for axis in figure.axes:
        box = axis.get_position()
        assert box.width > 0.3 and box.height * figure.get_figheight() > 2  # inches


def test_labels_belong_to_a_comparison(run_dir, capsys):
    assert main([str(run_dir), "--labels", "a"]) == 2
    assert capsys.readouterr().err.startswith("error: --labels: names the settings of a comparison")


def test_a_run_still_going_is_shown_without_summary(tmp_path):
    folder = make_run(tmp_path / "magrpo_x", updates=5)
    assert "not finished" not in render(read_run(folder))
    summary = json.loads((folder / "summary.json").read_text())
    summary["env_steps"] -= 1  # of an earlier end: the run was resumed
    (folder / "summary.json").write_text(json.dumps(summary))
    text = render(read_run(folder))
    assert "not finished" in text and "wall time" not in text
    (folder / "summary.json").unlink()
    text = render(read_run(folder))
    assert "MAGRPO" in text and "not finished" in text
    with pytest.raises(ReportError):
        read_run(tmp_path)


def test_runs_that_write_no_report_do_not_import_matplotlib():
    code = (
        "import sys, comlrl.loggers, comlrl.loggers.model_card, comlrl.loggers.report.write;"
        "sys.exit('matplotlib' in sys.modules)"
    )
    processes.python("-c", code)


def test_values_that_no_axis_can_show_are_left_out(tmp_path):
    folder = logged(
        tmp_path, reward_mean=[0.0, 1e308, 1.0, float("inf")], loss=[-1e308, 1e200, 0, 1]
    )
    run = read_run(folder)
    assert run.series("train", "reward_mean")[1] == [0.0, 1.0]
    write_report(folder)


def test_smoothing():
    assert smoothed([0, 3, 6], 3) == [1.5, 3, 4.5]  # (0+3)/2, (0+3+6)/3, (3+6)/2
    assert smoothed([0, 3, 6], 9) == [3, 3, 3] and smoothed([], 3) == []
    assert smoothed([1e30, 1, 1, 1], 3)[2:] == [1, 1]  # not lost beside a very large value


def test_names_of_metrics_are_read_once(tmp_path):
    class Counted(dict):
        read = 0

        def __iter__(self):
            Counted.read += 1
            return super().__iter__()

    run = read_run(logged(tmp_path, reward_mean=[0.0, 1.0], loss=[1.0, 0.5]))
    records = [record | {"metrics": Counted(record["metrics"])} for record in run.records]
    sections(run := replace(run, records=tuple(records)))
    assert Counted.read <= len(records) and run.names("train") == ["reward_mean", "loss"]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def browse(profile: Path, page: Path, width: int, *options: str) -> str:
    """What the browser prints about a page that it has opened in its own profile."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-quic", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={width},900", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the PATH")
@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"task": " MINI/1 "}, lambda s: s["task_id"] in ("mini/1", "mini/10", "mini/11")),
        ({"passed": "0"}, lambda s: not s["passed"]),
        ({"low": "1.1", "high": "3.9"}, lambda s: 1.1 <= s["reward"] <= 3.9),
        ({"order": "reward"}, lambda s: True),
        ({"text": "MINI/3"}, lambda s: s["task_id"] == "mini/3"),
    ],
)
def test_the_filter_shows_what_was_asked_for(run_dir, tmp_path, chosen, kept):
    script = (
        "<script>onload = () => { const form = document.getElementById('filter');"
        f"for (const [k, v] of Object.entries({json.dumps(chosen)})) form.elements[k].value = v;"
        "form.dispatchEvent(new Event('input'));"
        "document.title = [...document.querySelectorAll('.episode:not([hidden])')]"
        ".map(e => e.dataset.task).join() + ';' + form.querySelector('output').textContent; }"
        "</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text((run_dir / "report.html").read_text().replace("</body>", script))
    dumped = browse(tmp_path / "profile", page, 1000, "--dump-dom")
    found = re.search("<title>(.*);(.*)</title>", dumped)
    assert found, dumped[-500:]
    shown = [e.sample for e in episodes(read_run(run_dir))]
    if "order" in chosen:
        shown.sort(key=lambda s: s["reward"])
    wanted = [s["task_id"] for s in shown if kept(s)]
    assert found[1].split(",") == wanted and found[2] == f"{len(wanted)} of 12"


def title_after(page: Path, html: str, script: str) -> str:
    """The title that a script gives the page once it is loaded."""
    page.write_text(html.replace("</body>", f"<script>onload = () => {{{script}}}</script></body>"))
    dumped = browse(page.parent / "profile", page, 1200, "--dump-dom")
    found = re.search("<title>(.*)</title>", dumped)
    assert found, dumped[-500:]
    return found[1]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the PATH")
def test_settings_can_be_hidden_and_the_table_sorted(run_dir, tmp_path):
    other = make_run(tmp_path / "ppo_1_1", algorithm="ppo", updates=5)
    written = write_comparison([read_run(run_dir), read_run(other)], tmp_path / "out", ["a", "b"])
    script = """
      document.querySelectorAll(".key input")[1].click();
      const marks = [...document.querySelectorAll("svg [data-s]")];
      const left = marks.filter(m => m.style.display !== "none");
      const shown = [...new Set(left.map(m => m.dataset.s))];
      const head = document.querySelector(".card .sorted th");
      const cells = () => [...document.querySelectorAll(".card .sorted td:first-child")];
      const names = () => cells().map(cell => cell.innerText);
      const before = names(); head.click(); const down = names(); head.click();
      document.title = [shown, before, down, names()].map(one => one.join(" ")).join(";");
    """
    title = title_after(tmp_path / "p.html", written[0].read_text(), script)
    assert title == "0;a b;a b;b a"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on the PATH")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_nothing_overflows_and_the_scheme_is_followed(run_dir, tmp_path, width, dark):
    from PIL import Image

    # A frame has the phone's width where the browser's own window has a larger minimum.
    frame = tmp_path / "frame.html"
    probe = tmp_path / "page.html"
    page = (run_dir / "report.html").read_text()
    script = (
        "<script>onload = () => { const wide = document.documentElement.scrollWidth;"
        "parent.postMessage(wide, '*'); }</script></body>"
    )
    probe.write_text(page.replace("</body>", script))
    frame.write_text(
        f"<body style='margin:0'><iframe src='page.html' style='width:{width}px;height:900px;"
        "border:0'></iframe><script>onmessage = e => document.title = 'w' + e.data;</script></body>"
    )
    shot = tmp_path / "shot.png"
    look = partial(browse, tmp_path / "profile", frame, max(width, 500))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dumped = look(*scheme, "--virtual-time-budget=3000", "--dump-dom")
    found = re.search(r"<title>w(\d+)</title>", dumped)
    assert found, dumped[-500:]
    assert int(found[1]) <= width
    look(*scheme, f"--screenshot={shot}")
    pixels = np.asarray(Image.open(shot).convert("L"))[:, :width]
    assert (np.median(pixels) < 60) if dark else (np.median(pixels) > 200)
    assert pixels.std() > 10  # not blank


def test_the_marks_of_a_chart():
    """A band, a dashed ninth colour, a faint line without a name, and areas on both sides of 0."""
    lines = [
        Series("raw", [0, 1], [1.0, 2.0], 0, faint=True),
        Series("mean", [0, 1], [1.0, 3.0], 0, [0.5, 2.5], [1.5, 3.5]),
        Series("ninth", [0, 1], [2.0, 2.0], 8, dots=True),
    ]
    chart = Chart("Reward", lines, y_range=(0.0, 4.0), x_label="steps")
    axis = Figure().subplots()
    draw(axis, chart)
    ceiling = 1  # a dotted line
    assert len(axis.lines) - ceiling == 3 and len(axis.collections) == 1
    assert [text for text, _ in chart.legend] == axis.get_legend_handles_labels()[1]
    assert [line.get_linestyle() for line in axis.lines[:3]] == ["-", "-", "--"]
    assert axis.get_xlabel() == "steps"
    assert axis.get_ylim() == (0.0, pytest.approx(4.12))
    # Parts 1, −1 and 1, 1: tops 2 and 1, bottoms 0 and −1; three areas, two names.
    parts = [Series("a", [0, 1], [1.0, -1.0]), Series("b", [0, 1], [1.0, 1.0], 1)]
    chart, axis = Chart("Parts", parts, "stacked"), Figure().subplots()
    draw(axis, chart)
    heights = [area.get_paths()[0].vertices[:, 1] for area in axis.collections]
    assert [(h.min(), h.max()) for h in heights] == [(0, 1), (-1, 0), (0, 2)]
    assert axis.get_ylim()[0] < -1 and axis.get_ylim()[1] > 2
    assert [text for text, _ in chart.legend] == axis.get_legend_handles_labels()[1] == ["a", "b"]


def test_a_task_that_got_worse_has_another_colour():
    series = [
        Series("before", range(3), [0.0, 1.0, 1.0]),
        Series("after", range(3), [1.0, 0.0, 1.0]),
    ]
    axis = Figure().subplots()
    draw(axis, Chart("Tasks", series, "change", y_range=(0.0, 1.0)))
    colours = [to_hex(colour) for colour in axis.collections[-1].get_facecolors()]
    assert colours == [COLOURS[2], COLOURS[1], COLOURS[7]]
    assert axis.get_ylim()[0] < 0 and axis.get_ylim()[1] > 1  # dots at the ends are whole
