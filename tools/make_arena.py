"""Makes rows for the games of the arena.

    python tools/make_arena.py codebook --symbols 4 --letters 1 --num 16 --out FILE
    python tools/make_arena.py shards --question median --num 64 --out FILE
    python tools/make_arena.py chores --numbered --num 16 --out FILE

A row has ``task_id``, ``game`` and the fields that its game reads. Some games have nothing to
vary, and their rows are equal: a batch needs several. Evaluation rows of shards are not among its
training rows, for any number of agents; ``--evaluation`` makes such rows. ``--shipped`` writes the
shipped splits again, byte for byte.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.builtin import DATASETS
from comlrl.rewards.arena.shards import NAMES, right_answer
from tools.making import Row, write

# fmt: off
SYMBOLS = (
    "cat", "sun", "key", "boat", "tree", "ring", "fish", "lamp",
    "door", "star", "bell", "leaf", "coin", "drum", "kite", "rose",
)
# fmt: on
NUMBERS = range(1, 10)
QUESTIONS = ("largest", "median", "pair")
BLOCK, PROPOSALS = 64, 8000  # of the balancing of shards' evaluation rows
BATCH = 16  # rows of a game that has nothing to vary
SHIPPED: dict[str, tuple[int, int]] = {  # game → training rows, evaluation rows
    "codebook": (16, 16),
    "climbing": (BATCH, BATCH),
    "shards": (512, 64),
    "lock": (9, 9),
    "chores": (BATCH, BATCH),
    "levers": (BATCH, BATCH),
    "dilemma": (BATCH, BATCH),
}


def rows(
    game: str,
    num: int,
    *,
    seed: int = 0,
    evaluation: bool = False,
    symbols: int = len(SYMBOLS),
    letters: int = 2,
    question: str = "largest",
    holders: int = 8,
    numbered: bool = False,
) -> list[Row]:
    """Return ``num`` rows of a game; the same arguments give the same rows.

    Args:
        seed: of shards; the other games count through their rows.
        evaluation: shards: rows whose first two numbers no training row has.
        symbols, letters: codebook: the first S of ``SYMBOLS``, and the message's length m.
        question, holders: shards: what the judge is asked, and how many numbers a row has.
        numbered: chores: each prompt begins with its agent's number.
    """
    split = "eval" if evaluation else "train"
    if game == "codebook":
        chosen = list(SYMBOLS[:symbols])
        made = [
            {"symbol": chosen[i % symbols], "symbols": chosen, "letters": letters}
            for i in range(num)
        ]
    elif game == "shards":
        made = _shards(num, random.Random(f"{game}/{split}/{seed}"), evaluation, question, holders)
    elif game == "lock":
        pairs = list(itertools.product(range(3), repeat=2))
        made = [{"secrets": list(pairs[i % len(pairs)])} for i in range(num)]
    elif game == "chores" and numbered:
        made = [{"numbered": True} for _ in range(num)]
    else:
        made = [{} for _ in range(num)]
    name = f"arena-{game}"
    return [{"task_id": f"{name}/{split}/{i}", "game": name, **row} for i, row in enumerate(made)]


def held_out_pairs() -> set[tuple[int, ...]]:
    """Return the first two numbers of shards' evaluation rows: 16 of 72 pairs, 2 of 9 equal."""
    rng = random.Random("arena-shards")
    unequal = rng.sample(list(itertools.combinations(NUMBERS, 2)), 8)
    both = [pair for first, second in unequal for pair in ((first, second), (second, first))]
    return {*both, *((number, number) for number in rng.sample(NUMBERS, 2))}


def _shards(
    num: int, rng: random.Random, evaluation: bool, question: str, holders: int
) -> list[Row]:
    """Return different numbers, each row also with its first two exchanged.

    Of two holders, each is right in half of the rows. For ``pair`` every second row has a number
    twice instead.
    """
    held_out, rows = held_out_pairs(), list[Row]()
    while len(rows) < num:
        numbers = rng.sample(NUMBERS, holders)
        if question == "pair" and len(rows) % 2:
            first, second = rng.sample(range(holders), 2)
            numbers[first] = numbers[second]
        if (tuple(numbers[:2]) in held_out) == evaluation:
            rows.append({"numbers": numbers, "question": question})
            if question != "pair":
                rows.append({**rows[-1], "numbers": [numbers[1], numbers[0], *numbers[2:]]})
    if evaluation and question != "pair":
        for start in range(0, num, BLOCK):
            _balance(rows[start : start + BLOCK], rng, question)
    return rows[:num]


def _balance(rows: list[Row], rng: random.Random, question: str) -> None:
    """Reorder the numbers after the first two until each of any N holders is right about as
    often: a judge that always names one of them then scores the floor."""
    holders = len(rows[0]["numbers"])

    def imbalance() -> int:
        total = 0
        for n in range(3, holders + 1):
            right = Counter(right_answer(row["numbers"][:n], question) for row in rows)
            total += sum((n * right[name.lower()] - len(rows)) ** 2 for name in NAMES[:n])
        return total

    least = imbalance()
    for _ in range(PROPOSALS if holders > 2 else 0):
        at = 2 * rng.randrange(len(rows) // 2)
        before = rows[at]["numbers"][2:]
        unused = [n for n in NUMBERS if n not in rows[at]["numbers"]]
        after = [*before, *unused]
        i, j = rng.randrange(len(before)), rng.randrange(len(after))
        after[i], after[j] = after[j], after[i]
        for row in rows[at : at + 2]:
            row["numbers"][2:] = after[: len(before)]
        if (changed := imbalance()) <= least:
            least = changed
        else:
            for row in rows[at : at + 2]:
                row["numbers"][2:] = before


def write_shipped(datasets: Mapping[str, Mapping[str, Path]]) -> None:
    """Make the shipped splits of each data set, by its name."""
    for game, sizes in SHIPPED.items():
        paths = datasets[f"builtin:arena-{game}"]
        for split, num in zip(("train", "eval"), sizes, strict=True):
            write(rows(game, num, evaluation=split == "eval"), paths[split])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make rows for a game of the arena.")
    parser.add_argument("game", nargs="?", choices=SHIPPED)
    parser.add_argument("--num", type=int, help="how many rows")
    parser.add_argument("--out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--seed", type=int, default=0, help="of shards")
    parser.add_argument("--evaluation", action="store_true", help="shards: held-out numbers")
    parser.add_argument("--symbols", type=int, default=16, choices=range(2, 17), metavar="2..16")
    parser.add_argument("--letters", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--question", default="largest", choices=QUESTIONS)
    parser.add_argument("--holders", type=int, default=8, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--numbered", action="store_true", help="chores: with numbers")
    parser.add_argument("--shipped", action="store_true", help="write the shipped splits again")
    args = parser.parse_args()
    if args.shipped:
        write_shipped(DATASETS)
        return
    if args.game is None or args.num is None or args.num < 1 or args.out is None:
        parser.error("a game, --num (at least 1) and --out are needed")
    fields = {
        name: value
        for name, value in vars(args).items()
        if name not in ("game", "num", "out", "shipped")
    }
    try:
        write(rows(args.game, args.num, **fields), args.out)
    except OSError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
