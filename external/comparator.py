"""``comparator: model``: an external model says which of two joint answers is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from comlrl.preferences.comparing import Texts
from comlrl.quoting import clean
from comlrl.tasks.prompts import Prompts
from comlrl.types import Task
from external.service import ExpertError, Provider, Service, provider_of

MODEL = "default"  # what a service at a URL is asked for, unless the URL names one after a #

QUESTION = """\
Two teams were given one task, and every member answered its own prompt.

{prompts}

[A]
{first}

[B]
{second}

Which team's answers are better together? Answer with one word: A, B or TIE.
"""


def judge_of(given: str) -> tuple[str, Provider]:
    """(model, its service) of ``NAME`` or ``URL`` or ``URL#NAME``."""
    url, _, name = given.partition("#")
    if re.match(r"https?://", url):
        return name or MODEL, provider_of(name or MODEL, url)
    return given, provider_of(given, None)


class Judge:
    """Asks about each pair; answers that cannot be read are None. Raises ExpertError where the
    model cannot be had."""

    def __init__(self, prompts: Prompts, service: Service, max_in_flight: int = 4) -> None:
        self.prompts, self.service, self.max_in_flight = prompts, service, max_in_flight

    def __call__(self, task: Task, texts_P: Sequence[tuple[Texts, Texts]]) -> list[int | None]:
        with ThreadPoolExecutor(self.max_in_flight) as pool:
            answers = [pool.submit(self._ask, task, first, second) for first, second in texts_P]
            try:
                return [verdict(answer.result()) for answer in answers]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, task: Task, first: Texts, second: Texts) -> str:
        try:
            return self.service.ask(question(self.prompts, task, first, second))
        except ExpertError as failure:
            raise ExpertError(
                f"no verdict from {self.service.model!r} at {self.service.url} for "
                f"{task.task_id!r}: {failure}; check the comparator and its key"
            ) from failure


def question(prompts: Prompts, task: Task, first: Texts, second: Texts) -> str:
    """What the judge is asked: the agents' prompts, and both teams' answers."""
    texts = prompts.texts(task, len(first))
    return clean(
        QUESTION.format(
            prompts="\n\n".join(text.strip("\n") for text in texts),
            first="\n".join(first).strip("\n"),
            second="\n".join(second).strip("\n"),
        )
    )


def verdict(answer: str) -> int | None:
    """1, −1 or 0 of an answer whose last such word is A, B or TIE; None: there is no such word."""
    words = re.findall(r"\b(A|B|TIE|Tie|tie)\b", clean(answer))
    return {"A": 1, "B": -1, "TIE": 0}[words[-1].upper()] if words else None
