"""The batch size of evaluations, in a module without torch, as ``--dry-run`` imports it."""

AT_ONCE = 256  # trees; more need more memory and are hardly faster


def at_once(tasks: int) -> int:
    """Return how many samples of each of ``tasks`` tasks are grown together."""
    return max(1, AT_ONCE // max(1, tasks))
