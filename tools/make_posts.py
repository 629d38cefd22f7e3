"""Makes small forum posts, to be summarized.

    python tools/make_posts.py --seed 7 --num 100 --out FILE

Rows are in the format of `trl-lib/tldr`: ``prompt`` (title and post, "TL;DR:" at the end) and
``completion``, a summary in one sentence; with ``situation``, what identifies the post. All of it
is put together from the phrases below. ``--shipped`` writes the two shipped splits again, byte for
byte.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.builtin import POSTS
from tools.making import Maker

SHIPPED = {"train": (0, 256), "eval": (1, 64)}  # split → seed, posts

# fmt: off
PEOPLE = (
    "sister", "brother", "neighbor", "roommate", "cousin", "uncle", "coach", "landlord",
    "coworker", "old friend", "new boss", "piano teacher",
)
SINCE = (
    "since March", "for two months", "since we moved", "for about a year", "since the holidays",
    "for three weeks", "since school started", "for most of the summer",
)
TRIED = (
    "I asked twice and got only a laugh", "I wrote a long note and heard nothing",
    "I talked about it over dinner", "I made a plan that was kept for one day",
    "I offered money and was turned down", "I said nothing and hoped that it would end",
    "I told a common friend, which made it worse", "I tried to joke about it",
)
WANTS = (
    "keep the peace at home", "say no without a fight", "get some rest", "be fair to both of us",
    "save a little money", "not lose a friend", "find a rule that lasts", "stop thinking about it",
)


class Trouble(NamedTuple):
    """An action of a person, as described in the title, the post and the summary."""

    does: str
    doing: str
    means: str  # for the writer


TROUBLES = (
    Trouble("borrows my bike", "borrowing my bike", "I walk to work in the rain"),
    Trouble("plays loud music", "playing loud music at night", "I fall asleep at my desk"),
    Trouble("feeds my dog sweets", "feeding my dog sweets", "the vet sends me large bills"),
    Trouble("eats my lunch", "eating the lunch that I pack", "I am hungry all afternoon"),
    Trouble("parks in my spot", "parking in my spot", "I drive around the block every night"),
    Trouble("forgets to pay me", "forgetting to pay me back", "my rent is late again"),
    Trouble("cancels our trips", "canceling our trips at the last hour", "I lose the tickets"),
    Trouble("corrects my speech", "correcting how I speak", "I have become shy with others"),
    Trouble("leaves the lights on", "leaving all the lights on", "the power bill has doubled"),
    Trouble("tells my secrets", "telling others my secrets", "I trust nobody at the office"),
    Trouble("kills my plants", "watering my plants to death", "the garden looks like a swamp"),
    Trouble("copies my work", "copying my work", "I am asked why the two look alike"),
)
# fmt: on


class Post(NamedTuple):
    """The choices that a post is made of."""

    person: str
    trouble: Trouble
    since: str
    tried: str
    wants: str

    @property
    def situation(self) -> str:
        """The identity of a post: posts that differ only in the rest share their situation."""
        return f"{self.person} | {self.trouble.does} | {self.tried}"


def draw_post(rng: random.Random) -> Post:
    person, trouble = rng.choice(PEOPLE), rng.choice(TROUBLES)
    return Post(person, trouble, rng.choice(SINCE), rng.choice(TRIED), rng.choice(WANTS))


def prompt_text(post: Post) -> str:
    """Return title and post, as they are shown to the agents."""
    return (
        f"TITLE: My {post.person} {post.trouble.does}\n\n"
        f"POST: My {post.person} has been {post.trouble.doing} {post.since}, and {post.tried}. "
        f"Now {post.trouble.means}. I want to {post.wants}. What should I do next?\n\n"
        "TL;DR:"
    )


def summary_text(post: Post) -> str:
    return (
        f"My {post.person} keeps {post.trouble.doing}, so {post.trouble.means}; "
        f"how can I {post.wants}?"
    )


def make_rows(
    seed: int, num: int, exclude: Collection[str] = (), name: str | None = None
) -> list[dict[str, Any]]:
    """Return ``num`` posts, no situation of them in ``exclude``; determined by the seed.

    ``name`` stands in their task_id (None: the seed). Raises ValueError where there are not that
    many.
    """
    rng, taken = random.Random(f"posts/{seed}"), set(exclude)
    most = len(PEOPLE) * len(TROUBLES) * len(TRIED) - len(taken)
    if num > most:
        raise ValueError(f"--num {num}: only {most} such posts exist; ask for fewer")
    rows: list[dict[str, Any]] = []
    while len(rows) < num:
        post = draw_post(rng)
        if post.situation in taken:
            continue
        taken.add(post.situation)
        rows.append(
            {
                "task_id": f"Posts/{seed if name is None else name}/{len(rows)}",
                "prompt": prompt_text(post),
                "completion": summary_text(post),
                "situation": post.situation,
            }
        )
    return rows


MAKER = Maker(what="posts", rows=make_rows, column="situation", seeds=SHIPPED, paths=POSTS)

if __name__ == "__main__":
    MAKER.main()
