"""The batch size of evaluations. Imports no torch, because ``--dry-run`` needs it."""

AT_ONCE = 256  # trees; with more the memory grows and the speed hardly does


def at_once(tasks: int) -> int:
    """Return how many samples of so many tasks are grown together."""
    return max(1, AT_ONCE // max(1, tasks))
