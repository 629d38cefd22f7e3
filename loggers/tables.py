"""Markdown tables, in particular of evaluations and cross-play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.loggers.views import view_of
from comlrl.loggers.views.view import listed
from comlrl.quoting import one_line

NAME = 300  # maximum characters of a name
SHOWN = ("convention_match_rate", "completion_length_mean", "truncation_share")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table, the first column left-aligned and the others right-aligned."""
    texts = [[_text(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in texts
    ]
    rule = [":" + "-" * (width + 1) if i == 0 else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]]) + "\n"


def evaluation_table(result: Mapping[str, Any]) -> str:
    """Return one evaluation as Markdown: pass@k, reward and parts with 95% intervals, and cost."""
    metrics, intervals = result["metrics"], result["intervals"]
    names = [name for name in metrics if name.startswith("pass@")]
    names += [f"turn_{t}/reward_mean" for t in range(1, result["num_turns"] + 1)][:-1]
    names += ["reward_mean", *(f"agent_{i}/reward_mean" for i in range(result["num_agents"]))]
    names += [name for name in metrics if name.startswith("reward/")]
    names += listed(view_of(result["settings"]["domain"]).tables, metrics) + list(SHOWN)
    roles = {f"agent_{i}/": role for i, role in enumerate(result["roles"])}
    rows = [
        [_with_role(n, roles), metrics[n], _interval(intervals.get(n))]
        for n in names
        if n in metrics
    ]
    cost = [
        [name, counted(value) if name.startswith("flops") else value]
        for name, value in result["budget"].items()
    ]
    heading = f"# {_what(result)}\n\n{_how(result)}\n"
    return "\n".join(
        [heading, table(["metric", "mean", "95% interval"], rows), table(["budget", ""], cost)]
    )


def cross_play_table(result: Mapping[str, Any]) -> str:
    """Return a matrix per metric as Markdown; the last agent is from the column's run, the others
    from the row's."""
    runs, (others, last) = result["runs"], sides(result["roles"])
    names = [f"{i + 1}" for i in range(len(runs))]
    parts = ["# Cross-play\n", _how(result) + "\n"]
    parts += [f"{i + 1}. {code(run)}" for i, run in enumerate(runs)]
    for name, matrix in result["matrices"].items():
        summary = result["summary"][name]
        rows = [[f"{others} of {n}", *row] for n, row in zip(names, matrix, strict=True)]
        parts += [
            f"\n## {name}\n",
            table(["", *(f"{last} of {n}" for n in names)], rows),
            f"With themselves {_text(summary['self_play'])}, with others "
            f"{_text(summary['cross_play'])}: a gap of {_text(summary['gap'])}.",
        ]
    return "\n".join(parts) + "\n"


def replacement_table(result: Mapping[str, Any]) -> str:
    """Return Markdown: reward and cost of every team, then each agent's contribution."""
    replaced = {int(i): who for i, who in result["replaced"].items()}
    roles = {i: result["roles"][i] for i in sorted(replaced)}
    scores = list(result["contributions"])
    costs = [("tokens", "tokens_per_answer"), ("FLOPs", "flops_per_answer")]
    head = [*roles.values()]
    for name in scores:
        head += [name, "95% interval"]
    rows: list[list[Any]] = []
    for team in result["coalitions"]:
        who: list[Any] = ["itself" if i in team["present"] else replaced[i] for i in roles]
        for name in scores:
            who += [team["metrics"][name], _interval(team["intervals"][name])]
        who.append(f"{team['budget']['model_calls'] / (result['tasks'] * result['samples']):g}")
        rows.append(who + [counted(team["budget"][cost]) for _, cost in costs])
    head += ["calls", *(title for title, _ in costs)]
    heading = f"# {_what(result)}, agents replaced\n\n{_how(result)} Cost is of one answer.\n"
    parts = [heading, table(head, rows)]
    for name, contribution in result["contributions"].items():
        values = {"difference reward": "difference_rewards", "Shapley value": "shapley"}
        if len(roles) == 1:  # its Shapley value is its difference reward
            del values["Shapley value"]
        each: list[list[Any]] = [[role] for role in roles.values()]
        heads = ["agent"]
        for title, key in values.items():
            heads += [title, "95% interval"]
            for i, row in zip(roles, each, strict=True):
                estimate = contribution[key][str(i)]
                row += [_text(estimate["mean"]), _interval(estimate["interval"])]
        together = contribution["together"]
        parts += [
            f"## {name}\n",
            table(heads, each),
            f"Together {_text(together['mean'])} ({_interval(together['interval'])}).\n",
        ]
    return "\n".join(parts)


def _with_role(metric: str, roles: Mapping[str, str]) -> str:
    role = roles.get(metric[: metric.find("/") + 1])
    return f"{metric} ({role})" if role else metric


def sides(roles: Sequence[str]) -> tuple[str, str]:
    """Return the two sides of cross-play: all but the last agent, and the last."""
    return ", ".join(roles[:-1]), roles[-1]


def _what(result: Mapping[str, Any]) -> str:
    if result["baseline"]:
        return plain(f"Baseline {result['baseline']}, {result['model']}")
    return plain(result["checkpoint"] or f"{result['model']}, untrained")


def _how(result: Mapping[str, Any]) -> str:
    sampling = result["sampling"]
    drawn = f"temperature {sampling['temperature']}" if sampling["temperature"] else "greedy"
    cut = "".join(f", {k} {sampling[k]}" for k in ("top_p", "top_k") if sampling[k] is not None)
    settings = result.get("settings", {})
    by_role, agents = dict(settings.get("sampling", {})), settings.get("agents")
    if isinstance(agents, Mapping):
        by_role |= {role: a["sampling"] for role, a in agents.items() if a.get("sampling")}
    for role, changes in by_role.items():
        listed = " ".join(f"{key} {value}" for key, value in changes.items() if value is not None)
        cut += f", {role}: {listed}"
    return (
        f"{result['tasks']} tasks of {code(result['dataset'])} {plain(result['split'])}, "
        f"{result['samples']} answer(s) each, {result['num_agents']} agent(s), "
        f"{_order(result)}, {drawn}{cut}, "
        f"seed {result['seed']}."
    )


def _order(result: Mapping[str, Any]) -> str:
    """Return turns and turn order or, unless a baseline plays, the program that determines them."""
    program = result.get("settings", {}).get("program", {})
    played = program.get("target") or program.get("command")
    if played and not result["baseline"]:
        return f"program {code(played)}"
    return f"{result['num_turns']} turn(s), {result['turn_order']}"


def _interval(pair: Sequence[float] | None) -> str:
    return f"{_text(pair[0])} – {_text(pair[1])}" if pair else ""


def counted(value: float) -> str:
    """Format a number of tokens or operations with three significant digits, e.g. 245 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return _digits(value)


def _digits(value: float) -> str:
    """Format with three significant digits, or with the full integer part if it is longer."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else plain(value).replace("|", "\\|")


def plain(value: Any) -> str:
    """Escape an external name for one line of Markdown and for a terminal."""
    return one_line(str(value), NAME)


def code(value: Any) -> str:
    """Return an external name as Markdown code; backticks become apostrophes."""
    return "`" + plain(value).replace("`", "'") + "`"
