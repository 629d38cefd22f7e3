"""Writes ``docs/configuration.md`` from the dataclasses: python -m tools.config_reference

The page is made from what the fields themselves hold, and a test keeps it fresh.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from comlrl.config import algorithms as configs
from comlrl.config import loader, sections
from comlrl.config.keys import Key, in_words, in_yaml, keys_of
from comlrl.trainers.launch.commands.command_line import FLAGS

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
COMMON = configs.CommonConfig
SHARED_PARENTS = (configs.PreferenceConfig, configs.ActorCriticConfig)
HEAD = """\
# Configuration

This page lists every key with its type and default. `python -m tools.config_reference` writes it
from `comlrl/config/sections.py` and `comlrl/config/algorithms_*.py`.

A file is YAML, with the sections below and one named after the algorithm. Every key has a default.
`--override` takes dotted keys, for example
`--override magrpo.learning_rate=1e-4 dataset.eval_split=test[:16] wandb=null`. Values are YAML or
Python literals, and those of `prompts.*` plain text. The last of file, older flags and
`--override` wins.

## Start with these 12 keys

| key | why |
|---|---|
| `agent_model.name` | the model |
| `dataset.name`, `dataset.train_split`, `dataset.eval_split` | the tasks |
| `<algo>.num_agents` | the team's size |
| `<algo>.num_generations` | answers that are compared with each other |
| `<algo>.batch_size` | tasks of a training step |
| `<algo>.max_steps` | the length of the run |
| `<algo>.learning_rate` | the first to try when nothing improves |
| `<algo>.max_new_tokens` | too small a value cuts answers |
| `<algo>.eval_interval` | steps between evaluations |
| `output.dir` | where the run is saved |

## How keys are read

- **Mistakes.** An unknown key, a wrong type or contradictory values end the run with one line and
  exit code 2, before anything is loaded.
- **Keys without effect**, such as `external.original_prompt` with `external.history: full`, print a
  notice.
- **Interpolation.** `${section.key}` repeats the value of another key. No other interpolation is
  read.
- **Paths** (of a data set, a model, a run, `init_from`, …) are looked for beside the YAML file
  first, then in the working directory. Paths on the command line are looked for in the working
  directory first. A run's `config.yaml` has absolute paths, so you can evaluate it from anywhere.
- **`--dry-run`** checks rows of local data, local and cached models, the sandbox and files of
  earlier runs. It prints the cost of the run without loading weights, and names what it could not
  check, such as a name on the hub. With `--check-solutions` it also scores the solutions that the
  rows hold, and with `--measure` it makes two training steps.
"""


def table(keys: Sequence[Key]) -> str:
    rows = [
        f"| `{key.name}` | {_values(key)} | `{in_yaml(key.default)}` | "
        + key.description.replace("|", "\\|").replace("<", "\\<")
        + " |"
        for key in keys
    ]
    return "\n".join(["| key | type | default | what it is |", "|---|---|---|---|", *rows]) + "\n"


def _values(key: Key) -> str:
    """Describe a key's values, as a person reads them, and the bounds of its numbers."""
    text = ", ".join(in_words(key.annotation, "`"))
    text = text.replace("true, false", "true or false").replace("number, text", "number or text")
    return f"{text}; {key.range}" if key.range is not None else text


def reference() -> str:
    """Return the reference page."""
    parts = [HEAD, "## Top of the file\n", table(list(keys_of(sections.Root).values()))]
    parts += ["## `agents.ROLE`\n", _description(sections.AgentConfig)]
    parts += [table(list(keys_of(sections.AgentConfig).values()))]
    for name, of_agent in (("lora", sections.AgentLora), ("api", sections.ApiConfig)):
        parts += [f"## `agents.ROLE.{name}`\n", _description(of_agent)]
        parts += [table(list(keys_of(of_agent).values()))]
    for name, cls in sections.SECTIONS.items():
        parts += [f"## `{name}`\n", _description(cls), table(list(keys_of(cls).values()))]
    parts += [
        "## Algorithms: keys that all have\n",
        "They belong in the section named after the algorithm. An algorithm with another default "
        "lists the key again.\n",
        table(list(keys_of(COMMON).values())),
    ]
    for name, cls in configs.SECTIONS.items():
        parts += [f"## `{name}`\n", _description(cls)]
        additional = _additional_keys(cls, COMMON)
        parts += [table(additional)] if additional else []
    parts += ["## Older spellings\n", _older(), "## Older flags\n", _flags()]
    return "\n".join(parts)


def _description(cls: type) -> str:
    """Return a section's docstring, and that of the keys shared with another algorithm."""
    docs = [c.__doc__ or "" for c in (cls, *SHARED_PARENTS) if issubclass(cls, c)]
    paragraphs = [text for doc in docs for text in inspect.cleandoc(doc).split("\n\n")]
    return "\n\n".join(" ".join(text.replace("``", "`").split()) for text in paragraphs) + "\n"


def _additional_keys(cls: type, parent: type) -> list[Key]:
    """Return keys that differ from the parent's: new ones, and other defaults or meanings."""
    inherited = keys_of(parent)
    return [key for name, key in keys_of(cls).items() if inherited.get(name) != key]


def _older() -> str:
    rows = [
        f"| `{old}` | {f'`{new}`' if new else 'read and ignored'} |"
        for old, new in loader.ALIASES.items()
    ]
    rows += [
        f"| {key} `{old if isinstance(old, str) else json.dumps(old)}` | `{new}` |"
        for key, older in loader.VALUE_ALIASES.items()
        for old, new in older.items()
    ]
    note = "These still work, with a notice; `<algo>` is the algorithm's section.\n"
    return "\n".join([note, "| older | now |", "|---|---|", *rows]) + "\n"


def _flags() -> str:
    rows = [f"| `--{flag}` | `{key}` |" for flag, key in FLAGS.items()]
    note = (
        "`--base_model qwen` is Qwen/Qwen2.5-Coder-1.5B; `--num_steps` also sets "
        "`num_train_epochs` and `max_steps` to null.\n"
    )
    return "\n".join([note, "| flag | key |", "|---|---|", *rows]) + "\n"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(reference(), encoding="utf-8")
    print(f"written: {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
