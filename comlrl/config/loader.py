"""YAML → older spellings → overrides → checks: what was said becomes a ``Config``."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comlrl.config.sections import SECTIONS, Config, ConfigError, Root

# Older spellings; "<algo>" stands for the algorithm's section. None: accepted and ignored.
ALIASES: dict[str, str | None] = {
    "model_name": "agent_model.name",
    "model.type": None,
    "agent_model.type": None,
    "<algo>.agent_learning_rate": "<algo>.learning_rate",
    "<algo>.termination_threshold": "<algo>.early_termination_threshold",
    "<algo>.external_original_prompt": "external.original_prompt",
    "<algo>.external_previous_response": "external.previous_response",
    "external.expert_edits_model": "external.expert_model",
    "<algo>.per_device_train_batch_size": "<algo>.batch_size",
    "<algo>.rollout_buffer_size": "<algo>.train_batch_size",
    "output.save_model": "output.save_final_model",
    "<algo>.reward_shift": "reward_processor.shift",
    "<algo>.advantage_mode": "<algo>.advantage",
}
# Of an interpolation: what opens one (an odd number of backslashes escapes it), and a whole one
# that names another key. Others call resolvers, such as oc.env: they read what is not in the file.
OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
REFERENCE = re.compile(OPENING.pattern + r"\s*[\w.\[\]-]+\s*\}")
VALUE_ALIASES: dict[str, dict[Any, str]] = {
    "joint_mode": {"aligned": "align", "crossed": "cross"},
    "rl_algorithm": {"mareinforce": "reinforce", "marloo": "rloo"},
    "dpo_reference": {True: "start", False: "none", None: "none"},
}


@dataclass(frozen=True)
class Setting:
    """One dotted key with its value and where it was said."""

    key: str
    value: Any
    source: str


class Loader:
    """Collects settings of one algorithm in order and turns them into a Config."""

    def __init__(self, algorithm: str, sections: Mapping[str, type]) -> None:
        """``sections``: algorithm sections by name, the algorithm's own first."""
        self.algorithm = algorithm
        self.algorithm_sections = dict(sections)
        self.sections: dict[str, type] = {**SECTIONS, **sections}
        self.folder = Path.cwd()  # of the file that was read last
        self.notices: list[str] = []
        self.given: dict[str, str] = {}  # key → source, of everything that was said
        self._values = OmegaConf.create(
            {name: OmegaConf.structured(cls) for name, cls in self.sections.items()}
        )
        self._root = OmegaConf.structured(Root)
        for name in self.sections:
            OmegaConf.set_readonly(self._values[name], False)
        self._wandb = False
        self.keys = [f"{s}.{f.name}" for s, c in self.sections.items() for f in _fields(c)]
        self.keys += [f.name for f in _fields(Root)]

    def read(self, path: str | Path) -> None:
        """Take every key of a YAML file."""
        self.folder = Path(path).absolute().parent
        for key, value in self._leaves(load_yaml(path)):
            self.set(Setting(key, value, str(path)))

    def set(self, setting: Setting) -> None:
        """Take one setting; a later one for the same key wins.

        Raises ConfigError for an unknown key or a value of the wrong type.
        """
        key = self._rename(setting)
        if key is None:
            return
        value = _normalise(setting.value)
        older = VALUE_ALIASES.get(key.rpartition(".")[2], {})
        if isinstance(value, str | bool | None) and value in older:
            said = f"'{value}'" if isinstance(value, str) else json.dumps(value)
            self.notices.append(f"{key}: {said} is read as '{older[value]}'")
            value = older[value]
        if key.endswith(".comparator") and isinstance(value, dict) and len(value) == 1:
            value = "".join(f"{kind}: {name}" for kind, name in value.items())
        if key == "reward_processor.shift" and value is None:  # older files: reward_shift: null
            value = 0.0
        if key in self.sections:
            if isinstance(value, dict):  # a whole section as one override
                for name, inner in value.items():
                    self.set(Setting(f"{key}.{name}", inner, setting.source))
                if key == "wandb":
                    self._wandb = True
                return
            if key != "wandb" or value is not None:
                raise ConfigError(f"{key}: {value!r} is not a section; write `{key}.<key>=<value>`")
            self._wandb = False
            return
        if key.startswith("wandb."):
            self._wandb = True
        self._assign(key, value, setting)
        self.given[key] = setting.source

    def build(self) -> Config:
        """The frozen object. Relations between keys are checked by ``validate``. Raises ConfigError
        where an override refers to a key that there is not."""
        try:
            return self._build()
        except OmegaConfBaseException as error:
            raise ConfigError(f"--override: {' '.join(str(error).split())}") from error

    def _build(self) -> Config:
        shared = {n: self._section(n) for n in SECTIONS if n != "wandb"}
        return Config(
            algorithm=self.algorithm,
            agents=_tuple(self._root.agents),
            agent_devices=_tuple(self._root.agent_devices),
            domain=self._root.domain,
            prompts=dict(self._root.prompts),
            seed=self._root.seed,
            init_from=self._root.init_from,
            wandb=self._section("wandb") if self._wandb else None,
            sections={n: self._section(n) for n in self.algorithm_sections},
            folder=self.folder,
            **shared,
        )

    def _section(self, name: str) -> Any:
        return OmegaConf.to_object(self._values[name])

    def _leaves(self, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            is_section = key in self.sections or key == "model"
            if isinstance(value, dict) and (is_section or (not prefix and key not in self.keys)):
                yield from self._leaves(value, f"{key}.")
                if key == "wandb" and not value:
                    self._wandb = True
            elif not (value is None and is_section and key != "wandb"):
                yield key, value

    def _rename(self, setting: Setting) -> str | None:
        key = setting.key
        if key.startswith("model.") and key not in ALIASES:
            new: str | None = "agent_model." + key.removeprefix("model.")
        else:
            head, _, tail = key.partition(".")
            generic = f"<algo>.{tail}" if head in self.algorithm_sections else key
            if generic not in ALIASES:
                return key
            new = ALIASES[generic]
            new = new and new.replace("<algo>", head)
        text = f"is read as `{new}`" if new else "is ignored"
        self.notices.append(f"{setting.source}: `{key}` {text}")
        return new

    def _assign(self, key: str, value: Any, setting: Setting) -> None:
        target, name = self._locate(key, value, setting)
        _check_texts(value, f"{key} ({setting.source})")
        if isinstance(value, float) and value.is_integer() and self._wants_int(key):
            value = int(value)  # 1e6 is a whole number to a person
        try:
            if isinstance(value, bool) != (self._annotation(key) == "bool") and self._strict(key):
                raise OmegaConfBaseException("a truth value is not a number")
            OmegaConf.update(target, name, value, merge=False)
            taken = OmegaConf.select(target, name)
        except (OmegaConfBaseException, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{key}: {_shown(value)} ({setting.source}) is not valid: expected "
                f"{self._expected(key)}"
            ) from error
        if isinstance(taken, float) and not math.isfinite(taken):
            raise ConfigError(f"{key}: {value!r} ({setting.source}) is not a finite number")
        if isinstance(taken, int) and abs(taken) >= 1 << 63:
            raise ConfigError(
                f"{key}: an integer of more than 64 bits ({setting.source}); give less"
            )

    def _locate(self, key: str, value: Any, setting: Setting) -> tuple[Any, str]:
        section, _, name = key.partition(".")
        if section in {f.name for f in _fields(Root)} and (not name or _is_dict(Root, section)):
            return self._root, key
        known = (
            {f.name for f in _fields(self.sections[section])} if section in self.sections else ()
        )
        if name.partition(".")[0] in known:
            head, _, rest = name.partition(".")
            if (
                not rest
                or isinstance(self._values[section][head], Mapping)
                or _is_dict(self.sections[section], head)
            ):
                return self._values[section], name
        own = key.rpartition(".")[2]  # a key of another section is likelier meant than a like name
        near = [k for k in self.keys if k.rpartition(".")[2] == own]
        near = near or difflib.get_close_matches(key, self.keys, 1, 0.5)
        mend = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(f"{key}: unknown key, given {value!r} ({setting.source}){mend}")

    def _annotation(self, key: str) -> str:
        section, _, name = key.partition(".")
        cls: type = Root
        wanted = section
        if section in self.sections and name:
            cls, wanted = self.sections[section], name.partition(".")[0]
        for f in _fields(cls):
            if f.name == wanted:
                return str(f.type)
        return "Any"

    def _strict(self, key: str) -> bool:
        return self._annotation(key) == "bool" or self._wants_int(key)

    def _wants_int(self, key: str) -> bool:
        return "int" in re.findall(r"\w+", self._annotation(key))

    def _expected(self, key: str) -> str:
        text = re.sub(r"Literal\[(.*?)\]", r"one of \1", self._annotation(key))
        return text.replace('"', "'").replace(" | None", " or null")


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping, references to other keys resolved. Raises ConfigError naming the
    file."""
    try:
        loaded = OmegaConf.load(path)
        _check_texts(OmegaConf.to_container(loaded), f"--config: {str(path)!r}")
        tree = OmegaConf.to_container(loaded, resolve=True)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"--config: {str(path)!r} does not exist; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {str(path)!r} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"--config: {str(path)!r} is nested too deep") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"--config: {str(path)!r} is not valid YAML: {line}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: {str(path)!r} holds no mapping; write `section: …`")
    return {str(key): value for key, value in tree.items()}


def _check_texts(value: Any, where: str) -> None:
    """Raises ConfigError where a text in ``value`` has an interpolation that is no reference to
    another key, or bytes of a command line that are none of the locale's."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, where)
    if not isinstance(value, str):
        return
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(
            f"{where}: {_shown(value)} cannot be read in this locale; set PYTHONUTF8=1, or "
            "LC_ALL=C.UTF-8"
        )
    rest, more = value, 1
    while more:  # a reference may have others in it
        rest, more = REFERENCE.subn("x", rest)
    if OPENING.search(rest):
        raise ConfigError(
            f"{where}: {_shown(value)} has an interpolation that is no reference; of these only "
            "${section.key} is read: write the value itself"
        )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


def parse_override(item: str) -> Setting:
    """``a.b=value`` with a YAML or Python literal. Raises ConfigError where there is no ``=``."""
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--override: {item!r} is not `key=value`")
    key, text = key.strip(), text.strip()
    value = text if key.startswith("prompts.") else parse_value(text)  # templates have braces
    return Setting(key, value, "--override")


def parse_value(text: str) -> Any:
    """A value as YAML 1.2 or Python would read it; otherwise the text itself."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):  # 1e6, which YAML 1.1 calls a string
        return float(text)
    if re.fullmatch(r"[+-]?0\d{1,99}", text):  # 010 is ten here, not octal eight
        return int(text)
    for read in (ast.literal_eval, yaml.safe_load):
        try:
            return read(text) if text else None
        except (ValueError, SyntaxError, yaml.YAMLError, MemoryError, RecursionError):
            continue
    return text


def _normalise(value: Any) -> Any:
    """One spelling of nothing, and no tuples, whatever the source was."""
    if isinstance(value, str) and value in ("None", "null", "~", ""):
        return None
    if isinstance(value, list | tuple):
        return [_normalise(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _normalise(item) for key, item in value.items()}
    return value


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _is_dict(cls: type, name: str) -> bool:
    return any(f.name == name and str(f.type).startswith("dict") for f in _fields(cls))


def _tuple(items: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if items is None else tuple(items)
