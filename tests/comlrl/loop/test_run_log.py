"""What goes into the records of a run, and when it is asked for."""

from __future__ import annotations

from comlrl.loop.records import LogRecord
from comlrl.loop.run_log import RunLog
from comlrl.loop.steps import Counters, Gathered, Step
from comlrl.rewards.code.domain import CODE
from comlrl.update.minibatches import Span


class Records:
    def __init__(self) -> None:
        self.records: list[LogRecord] = []

    def begin(self, mark) -> None: ...

    def log(self, record: LogRecord) -> None:
        self.records.append(record)

    def episodes(self, record, trees) -> None: ...

    def close(self) -> None: ...


class Counted:
    def __init__(self) -> None:
        self.new = self.whole = self.collected = 0

    def collect(self) -> None:
        self.new, self.whole, self.collected = 0, self.whole + self.new, self.collected + 1

    def metrics(self) -> dict[str, float]:
        count, self.new, self.whole = self.new + self.whole, 0, 0
        return {"importance/count": float(count)}

    def state(self) -> dict[str, int]:
        return {"whole": self.whole}

    def load(self, state) -> None:
        self.whole = state["whole"]


def test_what_training_has_sampled_is_asked_for_by_its_own_records_alone():
    logger, sampled = Records(), Counted()
    log, counters = RunLog(logger, CODE, lambda: {"standing": 7.0}, sampled), Counters()
    for index in range(1, 5):
        sampled.new += 1
        step = Step(index, 0, [])
        log.step(
            counters,
            step,
            Gathered(trees=[], env_steps=0, scored=0, tokens=0, span=Span(0, 1)),
            {},
            due=index == 4,
        )
        if index == 2:
            log.write(counters, "eval", {}, [])
    evaluation, training = (record.metrics for record in logger.records)
    assert "importance/count" not in evaluation and evaluation["standing"] == 7.0
    assert sampled.collected == 3
    assert training["importance/count"] == 4.0 and training["standing"] == 7.0
