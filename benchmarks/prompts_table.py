"""Which first prompts a chat model follows: wordings side by side, on an untrained team of two.

    python benchmarks/prompts_table.py [--model models/smollm2-135m-instruct]
        [--data OpenMLRL/CoopHumanEval] [--split test[16:66]] [--wordings plain rules …]

One answer an agent and problem, one turn, sampled at --temperature with no truncation. Prints a
Markdown table; answers and scores are written to --out, a JSONL file a wording. Those that are
there are read, not sampled anew; other settings need another --out. `docs/cookbook.md` says how to
use your own wording.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.stored_results import check_settings
from comlrl import files
from comlrl.errors import UserError
from comlrl.loggers.tables import table
from comlrl.rewards.code import chat_prompts, prompt_templates
from comlrl.types import Tree

ROOT = Path(__file__).resolve().parents[1]
RULES_HELPER = """\
Write a helper function for the following coding problem.

{problem}

Rules:
- Give the code of the function only, without explanation or examples.
- No markdown fences, and no text before or after the function.
- No tests and no example of its use.
- The helper is named '{name}' and is there to assist the function that solves the problem.
- It returns data that is useful for solving the problem.

Your answer has this form:
def {name}(...):
    # the code of your function
    return result
"""
RULES_MAIN = """\
Solve the following coding problem by writing the function that it asks for.

{problem}

There is a helper function that you can use: aux(...).

Rules:
- Give the code of the function only, without explanation or examples.
- No markdown fences, and no text before or after the function.
- No tests and no example of its use.
- Do not define aux() again.
- Write '{entry_point}' alone, as it is specified.
- Where it helps, call aux() and assign its result to a variable in your function.

Your answer has this form:
def {entry_point}({arguments}):
    # the code of your function
    return result
"""
SHARED_HELPER = """\
```python
{problem}
```
This function will call a helper, `{name}({arguments})`, for a part of the work. Write that \
helper, and not `{entry_point}`. Answer with one short Python function and nothing else:
```python
def {name}({parameters}):
```
"""
SHARED_MAIN = """\
```python
{problem}
```
Write this function. {helpers} already: call {them}, and do not define {them}. Answer with one \
short Python function and nothing else:
```python
{signature}
{calls}
```
"""
# how every answer starts, with the helper's parameters given away
SAME_PARAMETERS = "```python\ndef {name}({parameters}):"
# templates of aux and of main, and the prefill
WORDINGS: Mapping[str, tuple[str, str, str]] = {
    "plain": (
        prompt_templates.HELPER,
        prompt_templates.MAIN,
        "",
    ),  # of models without a chat template
    "rules": (RULES_HELPER, RULES_MAIN, ""),  # what the published project tells, in other words
    "start": (chat_prompts.HELPER, chat_prompts.MAIN, ""),
    "shared": (SHARED_HELPER, SHARED_MAIN, ""),
    "start, prefilled": (chat_prompts.HELPER, chat_prompts.MAIN, chat_prompts.PREFILL),
    "shared, prefilled": (SHARED_HELPER, SHARED_MAIN, chat_prompts.PREFILL),
    "parameters, prefilled": (SHARED_HELPER, SHARED_MAIN, SAME_PARAMETERS),
}
COLUMNS: Mapping[str, tuple[str, float]] = {  # heading → metric, and what it is multiplied by
    "aux defined": ("aux_defined_rate", 100),
    "main defined": ("main_defined_rate", 100),
    "compiles": ("syntax_rate", 100),
    "tests": ("test_fraction", 100),
    "calls aux": ("aux_called_rate", 100),
    "reward": ("reward", 1),
    "tokens": ("tokens", 1),
    "cut": ("cut", 100),
}


def sample(wording: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return an untrained team's answer to each problem: texts, tokens and reward breakdown."""
    from comlrl.trainers.launch.commands import evaluate as command
    from comlrl.trainers.launch.commands.evaluation_plan import make_plan, parse_arguments

    helper, main, prefill = WORDINGS[wording]
    stop = ["```"] if prefill else []  # the end of the block that the prefill has opened
    settings = {
        "agent_model.name": options.model,
        "dataset.name": options.data,
        "dataset.eval_split": options.split,
        "magrpo.max_new_tokens": options.tokens,
        "magrpo.temperature": options.temperature,
        "agent_model.stop": stop,
    }
    items = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    texts = {"aux": helper, "main": main, "prefill": prefill}
    items += [f"prompts.{key}={text}" for key, text in texts.items()]  # taken as they stand
    config = str(ROOT / "configs" / "magrpo_quickstart.yaml")
    plan = make_plan(parse_arguments(["--config", config, "--override", *items]))
    stage = command.build(plan, caching=True)
    try:
        trees = command.grower(plan, stage)()
    finally:
        stage.rollout.reward.close()
    domain, rows = stage.rollout.prompts.domain, []
    for tree in trees:
        assert isinstance(tree, Tree)
        team, score = tree.team(0, 0), tree.nodes[0].scores_K[0]
        rows.append(
            {
                "task_id": tree.task.task_id,
                "texts": [completion.text for _, completion in team],
                "tokens": sum(len(c.token_ids) for _, c in team) / len(team),
                "cut": sum(not c.finished for _, c in team) / len(team),
                "reward": score.value,
                **domain.measures(tree.joint_action(0, 0), score),
            }
        )
    return rows


def read(wording: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    file = options.out / f"{wording}.jsonl"
    if not file.exists():
        rows = sample(wording, options)
        files.replace(file, "".join(json.dumps(row) + "\n" for row in rows))
    return list(files.read_lines(file))


def row(wording: str, answers: Sequence[Mapping[str, Any]]) -> list[object]:
    cells: list[object] = [wording]
    for metric, times in COLUMNS.values():
        mean = times * sum(each[metric] for each in answers) / len(answers)
        cells.append(f"{mean:.0f} %" if times == 100 else f"{mean:.3g}")
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="models/smollm2-135m-instruct", help="a chat model")
    add("--data", default="OpenMLRL/CoopHumanEval", help="hub's name or a file")
    add("--split", default="test[16:66]")
    add("--tokens", type=int, default=128, help="of an answer, at most")
    add("--temperature", type=float, default=0.8)
    add("--wordings", nargs="+", default=list(WORDINGS), choices=list(WORDINGS))
    add("--out", type=Path, default=ROOT / "outputs" / "prompts")
    options = parser.parse_args(arguments)
    names = ("model", "data", "split", "tokens", "temperature")
    check_settings(options.out, {name: getattr(options, name) for name in names})
    try:
        body = [row(wording, read(wording, options)) for wording in options.wordings]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(["wording", *COLUMNS], body))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
