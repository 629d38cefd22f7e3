"""The batch size of evaluations. Imports no torch, because ``--dry-run`` needs it."""

AT_ONCE = 256  # trees; with more the memory grows and the speed hardly does


def at_once(tasks: int) -> int:
    """Return the number of samples of so many tasks that are grown together."""
    return max(1, AT_ONCE // max(1, tasks))
