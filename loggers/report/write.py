"""The report page of one run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from comlrl.files import replace
from comlrl.loggers.report.charts import figures, sections
from comlrl.loggers.report.lines import learning_series, reward_ceiling
from comlrl.loggers.report.page import page
from comlrl.loggers.report.run_data import Run, damaged, read_run
from comlrl.loggers.report.sample_episodes import episodes, yaml
from comlrl.run_files import REPORT


def write_report(run_dir: str | Path) -> Run:
    """Write ``report.html`` and ``curves.png`` into a run directory; return the run as read.

    Raises ReportError if it is not a valid run.
    """
    from comlrl.loggers.report.pictures import write_charts

    run = read_run(run_dir)
    # The folder's name, and files from other programs, may contain lone surrogates.
    with damaged(run.path):
        replace(run.path / REPORT, render(run).encode("utf-8", "replace"))
        write_charts(list(figures(run).values()), run.path / "curves.png")
    return run


def learned(run: Run) -> str:
    """Compare the first and the last evaluation in words; empty without two evaluations.

    The reward counts as changed if the 95% intervals of the two means do not overlap.
    """
    lines = [line for line in learning_series(run) if line.dots and len(line.ys_X) > 1]
    if not lines:
        return ""
    ys = lines[0].ys_X
    low, high = lines[0].low_X or ys, lines[0].high_X or ys
    change = (
        "rose" if low[-1] > high[0] else "fell" if high[-1] < low[0] else "did not clearly change"
    )
    ceiling = reward_ceiling(run)
    of = "" if ceiling is None else f", of at most {ceiling:g}"
    words = [f"held-out reward {change}: {ys[0]:.2f} → {ys[-1]:.2f}{of}"]
    for title, name in (
        (run.view.passed, "pass_rate"),
        ("agents follow the same convention", "convention_match_rate"),
    ):
        _, shares = run.series("eval", name)
        words += [f"{title}: {shares[0]:.0%} → {shares[-1]:.0%}"] if len(shares) > 1 else []
    return "; ".join(words)


def render(run: Run) -> str:
    """Return the page of one run as self-contained HTML."""
    return page(
        title=run.path.name,
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        sections=sections(run),
        view=run.view,
        episodes=episodes(run),
        config=yaml(run.config_text) if run.config_text else None,
        environment=run.environment,
        summary=run.summary if run.finished else {},
    )


def _subtitle(run: Run) -> str:
    model = run.config.get("agent_model", {}).get("name")
    section = run.config.get(run.algorithm, {})
    agents = section.get("num_agents")
    words = [
        run.algorithm.upper(),
        f"{agents} agent{'s' if agents != 1 else ''}" if agents else "",
        str(model or ""),
        str(run.config.get("dataset", {}).get("name") or ""),
        f"seed {run.config['seed']}" if "seed" in run.config else "",
        "" if run.finished else "not finished",
    ]
    return " · ".join(word for word in words if word)


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return (label, value, source) of the headline numbers."""
    tiles = []
    _, rewards = run.series("eval", "reward_mean")
    ceiling = reward_ceiling(run)
    if rewards:
        of = "" if ceiling is None else f" of {ceiling:g}"
        tiles.append(("held-out reward", f"{rewards[-1]:.2f}{of}", f"from {rewards[0]:.2f}"))
    _, passes = run.series("eval", "pass_rate")
    if passes:
        tiles.append((run.view.passed, f"{passes[-1]:.0%}", f"from {passes[0]:.0%}"))
    accuracy = run.preferences.get("reward_model_accuracy")
    if accuracy is not None:
        tiles.append(("reward model", f"{accuracy:.0%}", "held-out pairs ordered rightly"))
    steps = run.env_steps
    updates = max((r["update"] for r in run.records), default=0)
    tiles.append(("environment steps", f"{steps:,}", f"{updates:,} updates"))
    summary = run.summary if run.finished else {}
    seconds = summary.get("wall_seconds")
    train = summary.get("train") or {}
    rate = train.get("joint_actions_per_second")
    if seconds is not None:
        under = f"{rate:,.1f} joint actions/s in training" if rate is not None else ""
        if evaluations := summary.get("evaluation_seconds"):
            under = (
                f"{timedelta(seconds=round(evaluations))} of it evaluations; {under}".removesuffix(
                    "; "
                )
            )
        tiles.append(("wall time", str(timedelta(seconds=round(seconds))), under))
    memory = train.get("peak_memory_mb")
    if memory is not None:
        tokens = train.get("tokens_per_second")
        under = f"{tokens:,.0f} tokens/s" if tokens is not None else ""
        tiles.append(("peak memory", f"{memory:,.0f} MB", under))
    return tiles
