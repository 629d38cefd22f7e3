"""``count``: how many tests passed, and nothing else."""


class Count:
    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, attempts):
        return [self._texts(attempt) for attempt in attempts]

    def _texts(self, attempt):
        outcomes = attempt.score.facts.outcomes
        passed = sum(outcome.passed for outcome in outcomes)
        told = f"Feedback:\n{passed} of {len(outcomes)} tests passed."
        return tuple(f"{told}\n{text}" for text in self.prompts.revision_N(attempt))
