"""The shipped splits and the command line of the tools that make builtin data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Maker:
    """``rows``: (seed, number, what is left out, name in their task_id; None: the seed) → rows;
    raises ValueError where there are not that many."""

    what: str  # plural
    rows: Callable[[int, int, Collection[str], str | None], list[Row]]
    column: str  # what identifies a row
    seeds: Mapping[str, tuple[int, int]]  # shipped split → seed, rows
    paths: Mapping[str, Path]  # shipped split → file

    def shipped(self, *splits: str) -> set[str]:
        """Return the keys of the rows of the shipped splits (of all, if none is named)."""
        return {
            json.loads(line)[self.column]
            for split in splits or self.paths
            for line in self.paths[split].read_text(encoding="utf-8").splitlines()
        }

    def write_shipped(self, paths: Mapping[str, Path]) -> None:
        """Make the shipped splits; each leaves out the rows of those before it."""
        taken: set[str] = set()
        for split, (seed, num) in self.seeds.items():
            rows = self.rows(seed, num, taken, split)
            taken |= {row[self.column] for row in rows}
            write(rows, paths[split])

    def main(self, **variants: Maker) -> None:
        """Run the command line; a flag named after a variant selects it instead of this maker."""
        parser = argparse.ArgumentParser(description=f"Make fresh {self.what}.")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--num", type=int, help=f"how many {self.what}")
        parser.add_argument("--out", type=Path, help="the .jsonl file to write")
        parser.add_argument("--shipped", action="store_true", help="write the shipped splits again")
        for flag, variant in variants.items():
            parser.add_argument(
                f"--{flag}", dest="maker", action="store_const", const=variant, help=variant.what
            )
        args = parser.parse_args()
        maker: Maker = getattr(args, "maker", None) or self
        if args.shipped:
            maker.write_shipped(maker.paths)
            return
        if args.num is None or args.num < 1 or args.out is None:
            parser.error("--num (at least 1) and --out are needed")
        try:
            write(maker.rows(args.seed, args.num, maker.shipped(), None), args.out)
        except (OSError, ValueError) as error:
            parser.exit(2, f"error: {error}\n")


def write(rows: Collection[Row], out: Path) -> None:
    """Write a JSON line for each row."""
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
