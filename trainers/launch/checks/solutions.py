"""``--check-solutions``: scores the solutions in the data set with the run's reward."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from comlrl.quoting import one_line
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.types import JointAction, Task


def check_solutions(
    tasks: Sequence[Task], work: Work, num_agents: int, *, score: bool
) -> list[str]:
    """Report how many tasks contain a solution; with ``score``, also how many solutions pass, and
    one line for each that fails.

    If a task's own solution fails, its scoring is wrong or a dependency is missing, and no answer
    can pass.
    """
    solved = ((task, work.domain.reference(task, num_agents)) for task in tasks)
    actions = [JointAction(task, texts) for task, texts in solved if texts is not None]
    if not actions:
        return ["", f"{'solutions':<22}no row holds one"] if score else []
    if not score:
        hold = f"{len(actions):,} of {len(tasks):,} rows hold one"
        return ["", f"{'solutions':<22}{hold}; --check-solutions scores them"]
    reward = work.build_reward()
    try:
        scores = reward.score(actions)
    finally:
        reward.close()
    if all(scored.passed is None for scored in scores):
        mean = fmean(scored.task_value for scored in scores)
        return ["", f"{'solutions':<22}{len(scores):,} scored, mean reward {mean:.4g}"]
    failed = [
        f"cannot be won: {one_line(action.task.task_id)}: {one_line(work.domain.failure(scored))}"
        for action, scored in zip(actions, scores, strict=True)
        if not scored.passed
    ]
    passed = len(actions) - len(failed)
    return ["", f"{'solutions':<22}{passed:,} of {len(actions):,} pass", *failed]
