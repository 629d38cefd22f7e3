"""Draws docs/credit.svg: trees of two turns, align and cross, and a turn in which agents act in
order; and how their rewards become credit.

    python tools/draw_credit.py

Two agents, two completions each, discount 0.9. The returns and advantages in the drawing are
computed by ``comlrl.credit.returns`` and ``comlrl.credit.advantages`` from the rewards below.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from comlrl.credit.advantages import sibling_advantages  # noqa: E402
from comlrl.credit.returns import completion_returns, joint_returns, mean  # noqa: E402
from comlrl.types import AgentTurn, Completion, Node, Score, Task, Tree  # noqa: E402

FILE = ROOT / "docs" / "credit.svg"
DISCOUNT = 0.9
# Rewards of the root's joint actions, and of those of each child, in the order of the actions.
REWARDS = {
    "align": ([1.5, 2.5], [[2.0, 3.0], [3.0, 4.0]]),
    "cross": (
        [1.5, 0.5, 1.5, 2.5],
        [[2.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0]],
    ),
}
BELOW = [[1.5, 2.5], [1.0, 4.0]]  # main's joint actions below each of aux's completions
INK, SOFT, AUX, MAIN, PAPER = "#1f2933", "#7b8794", "#0b6e99", "#b44d12", "#ffffff"


def make_tree(mode: str) -> Tree:
    """Make two turns of two agents with two completions each, scored by ``REWARDS``."""
    actions = ((0, 0), (1, 1)) if mode == "align" else tuple(itertools.product((0, 1), (0, 1)))
    completion = Completion("", (), True)
    agents = (AgentTurn((), (), (completion, completion)),) * 2

    def node(turn: int, parent: int, action: int, rewards: list[float]) -> Node:
        scores = tuple(Score(r) for r in rewards)
        return Node(
            turn=turn,
            parent=parent,
            parent_action=action,
            agents_N=agents,
            joint_actions_K=actions,
            scores_K=scores,
            rewards_K=tuple(rewards),
        )

    root, children = REWARDS[mode]
    nodes = [node(1, -1, -1, root)] + [node(2, 0, k, r) for k, r in enumerate(children)]
    return Tree(Task(""), tuple(nodes), mode, None)  # type: ignore[arg-type]


def make_turn_in_order() -> Tree:
    """Make one turn: aux writes two completions, main two below each, scored by ``BELOW``."""
    turns = (AgentTurn((), (), (Completion("", (), True),) * 2),)
    actions = ((0,), (1,))
    nodes = [
        Node(
            turn=1,
            parent=-1,
            parent_action=-1,
            agents_N=turns,
            joint_actions_K=actions,
            scores_K=(),
            rewards_K=(),
        )
    ]
    for k, rewards in enumerate(BELOW):
        scores = tuple(map(Score, rewards))
        nodes.append(
            Node(
                turn=1,
                parent=0,
                parent_action=k,
                agents_N=turns,
                joint_actions_K=actions,
                scores_K=scores,
                rewards_K=tuple(rewards),
                first_agent=1,
            )
        )
    return Tree(Task("", {}), tuple(nodes), "align", None)


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{words}</text>"
    )


def number(value: float, sign: bool = False) -> str:
    value = round(value, 4) + 0.0
    return (f"{value:+.6g}" if sign and value else f"{value:.6g}").replace("-", "−")


def name(agent: int, generation: int) -> str:
    word = ("aux", "main")[agent]
    return f'<tspan fill="{(AUX, MAIN)[agent]}">{word}{"₁₂"[generation]}</tspan>'


def shape(tree: Tree, x: float, y: float, labels: tuple[str, str]) -> list[str]:
    """Draw the tree: a box per node with a dot per joint action, an edge per child."""
    children, count = tree.children(0), len(tree.nodes[0].joint_actions_K)
    step = 150 / len(children)
    parts = [box(x, y + 75 - 8 * count, count, labels[0], upright=True)]
    for action, child in children.items():
        start, end, right = y + 83 - 8 * count + 16 * action, y + step * (child - 0.5), x + 140
        parts.append(
            f'<path d="M{x + 14} {start} C {x + 80} {start}, {x + 70} {end}, {right - 3} {end}" '
            f'fill="none" stroke="{SOFT}"/>'
        )
        parts.append(box(right, end - 8, count, labels[1] if child == 1 else ""))
    return parts


def box(x: float, y: float, count: int, label: str, *, upright: bool = False) -> str:
    width, height = (16, 16 * count) if upright else (16 * count, 16)
    dots = "".join(
        f'<circle cx="{x + 8 + 16 * k * (not upright)}" cy="{y + 8 + 16 * k * upright}" r="4" '
        f'fill="{INK}"/>'
        for k in range(count)
    )
    return (
        f'<rect x="{x - 3}" y="{y - 3}" width="{width + 6}" height="{height + 6}" rx="6" '
        f'fill="{PAPER}" stroke="{SOFT}"/>{dots}'
        + text(x + width / 2, y - 10, label, fill=SOFT, anchor="middle")
    )


def credit(tree: Tree, x: float, y: float) -> list[str]:
    """List returns of the root's joint actions, then each agent's return and advantage."""
    returns = joint_returns(tree, DISCOUNT)
    root = tree.nodes[0]
    parts = [
        text(x, y, "joint action", fill=SOFT),
        text(x + 120, y, "R = r + γ · child's mean", fill=SOFT),
    ]
    for k, (aux, main) in enumerate(root.joint_actions_K):
        line = y + 24 * (k + 1)
        future = mean(returns[tree.children(0)[k]])
        parts.append(text(x, line, f"{name(0, aux)} {name(1, main)}"))
        parts.append(
            text(
                x + 120,
                line,
                f"{number(root.rewards_K[k])} + {DISCOUNT} · {number(future)} = "
                f"{number(returns[0][k])}",
            )
        )
    x += 330
    parts += [text(x, y, "completion", fill=SOFT), text(x + 95, y, "its mean R", fill=SOFT)]
    parts.append(text(x + 190, y, "advantage Â", fill=SOFT))
    for agent in root.acting:
        returns_G = completion_returns(root, agent, returns[0])
        for g, advantage in enumerate(sibling_advantages(returns_G, "mean")):
            line = y + 24 * (2 * agent + g + 1)
            parts.append(text(x, line, name(agent, g)))
            parts.append(text(x + 95, line, number(returns_G[g])))
            parts.append(text(x + 190, line, number(advantage, sign=True), bold=True))
    return parts


def credit_in_order(tree: Tree, x: float, y: float) -> list[str]:
    """List the agent's returns and advantages at each node."""
    returns = joint_returns(tree, DISCOUNT)
    heads = {0: "completion", 150: "R", 320: "advantage Â"}
    parts = [text(x + at, y, words, fill=SOFT) for at, words in heads.items()]
    line = y
    for index, node in enumerate(tree.nodes):
        returns_G = completion_returns(node, node.first_agent, returns[index])
        for g, advantage in enumerate(sibling_advantages(returns_G, "mean")):
            line += 24
            below = f" below {name(0, node.parent_action)}" if node.first_agent else ""
            how = number(returns_G[g])
            if not node.first_agent:
                values = " + ".join(map(number, returns[tree.children(0)[g]]))
                how = f"({values}) / 2 = {how}"
            parts.append(text(x, line, name(node.first_agent, g) + below))
            parts.append(text(x + 150, line, how))
            parts.append(text(x + 320, line, number(advantage, sign=True), bold=True))
    return parts


def draw() -> str:
    """Return the complete drawing."""
    titles = {
        "align": "align: the g-th of each agent. G joint actions at a node",
        "cross": "cross: every combination. G² joint actions at a node",
    }
    parts = []
    for row, (mode, title) in enumerate(titles.items()):
        y, tree = 20 + 220 * row, make_tree(mode)
        parts.append(text(24, y + 14, title, size=15, bold=True))
        parts += shape(tree, 30, y + 32, ("turn 1", "turn 2"))
        parts += credit(tree, 310, y + 62)
    title = "in order: aux, then main below each of aux's completions. One turn"
    parts.append(text(24, 474, title, size=15, bold=True))
    parts += shape(make_turn_in_order(), 30, 492, ("aux", "main"))
    parts += credit_in_order(make_turn_in_order(), 310, 512)
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 930 690" width="930" height="690" '
        'font-family="system-ui, sans-serif" role="img" aria-label="Trees and the '
        f'credit of each completion, align, cross and in order">\n'
        f'<rect width="930" height="690" rx="12" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
