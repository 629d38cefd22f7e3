"""YAML → older spellings → overrides → checks: the settings become a ``Config``."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comlrl.config import paths
from comlrl.config.algorithms import SINGLE_TURN_KEYS, CommonConfig
from comlrl.config.keys import Key, fits, keys_of
from comlrl.config.resolved import Config
from comlrl.config.sections import OPTIONAL_SECTIONS, SECTIONS, RoleSampling, Root
from comlrl.errors import UserError

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
    "generation.max_kept": "generation.max_support",
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
    """One dotted key with its value and where it was set."""

    key: str
    value: Any
    source: str


@functools.cache
def _defaults(sections: tuple[tuple[str, type], ...]) -> DictConfig:
    """Of all sections, by name. Kept, as making them anew takes longer than all the rest."""
    values = OmegaConf.create({name: OmegaConf.structured(cls) for name, cls in sections})
    for name, _ in sections:
        OmegaConf.set_readonly(values[name], False)
    return values


class Loader:
    """Collects settings of one algorithm in order and turns them into a Config."""

    def __init__(self, algorithm: str, sections: Mapping[str, type]) -> None:
        """``sections``: algorithm sections by name, the algorithm's own first."""
        self.algorithm = algorithm
        self.algorithm_sections = dict(sections)
        self.sections: dict[str, type] = {**SECTIONS, **sections}
        self.folder = Path.cwd()  # of the file that was read last
        self.beside = self.folder  # where its paths are looked for
        self.notices: list[str] = []
        self.given: dict[str, str] = {}  # key → source, of every key that was set
        self._values = copy.deepcopy(_defaults(tuple(self.sections.items())))
        self._root = OmegaConf.structured(Root)
        self._asked: set[str] = set()  # of OPTIONAL_SECTIONS
        self.keys = [f"{s}.{name}" for s, cls in self.sections.items() for name in keys_of(cls)]
        self.keys += keys_of(Root)

    def read(self, path: str | Path) -> None:
        """Take every key of a YAML file."""
        self.folder = self.beside = Path(os.path.abspath(path)).parent
        for key, value in self.leaves(load_yaml(path)):
            self.set(Setting(key, value, str(path)))

    def set(self, setting: Setting) -> None:
        """Take one setting; a later one for the same key wins.

        Raises UserError for an unknown key or a value of the wrong type.
        """
        key = self._rename(setting)
        if key is None:
            return
        where = f"{key} ({setting.source})"
        for text in check_values(setting.value, where):
            _check_text(text, where)
        is_text = key.partition(".")[0] == "prompts"  # an empty one is not a missing value
        value = setting.value if is_text else _normalise(setting.value)
        older = VALUE_ALIASES.get(key.rpartition(".")[2], {})
        if isinstance(value, str | bool | None) and value in older:
            shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
            self.notices.append(f"{key}: {shown} is read as '{older[value]}'")
            value = older[value]
        if key.endswith(".comparator") and isinstance(value, dict) and len(value) == 1:
            value = "".join(f"{kind}: {name}" for kind, name in value.items())
        if key == "reward_processor.shift" and value is None:  # older files: reward_shift: null
            value = 0.0
        if key in self.sections:
            if isinstance(value, dict):  # a whole section as one override
                for name, inner in value.items():
                    self.set(Setting(f"{key}.{name}", inner, setting.source))
                if key in OPTIONAL_SECTIONS:
                    self._asked.add(key)
                return
            if key not in OPTIONAL_SECTIONS or value is not None:
                raise UserError(f"{key}: {value!r} is not a section; write `{key}.<key>=<value>`")
            self._asked.discard(key)
            return
        if (section := key.partition(".")[0]) in OPTIONAL_SECTIONS:
            self._asked.add(section)
        self._assign(key, self._absolute(key, value, setting), setting)
        self.given[key] = setting.source

    def build(self) -> Config:
        """The frozen object. Relations between keys are checked by ``validate``. Raises UserError
        where an override refers to a key that there is not."""
        try:
            self._split_older_critic()
            built = self._built()
        except OmegaConfBaseException as error:
            raise UserError(f"--override: {' '.join(str(error).split())}") from error
        return share_common_keys(built, self.given)

    def _built(self) -> Config:
        off = set(OPTIONAL_SECTIONS) - self._asked
        shared: dict[str, Any] = {n: None if n in off else self._section(n) for n in SECTIONS}
        return Config(
            algorithm=self.algorithm,
            agents=_tuple(self._root.agents),
            agent_devices=_tuple(self._root.agent_devices),
            domain=self._root.domain,
            prompts=dict(self._root.prompts),
            seed=self._root.seed,
            sampling=_sampling(OmegaConf.to_container(self._root.sampling)),
            init_from=self._root.init_from,
            sections={n: self._section(n) for n in self.algorithm_sections},
            folder=self.folder,
            beside=self.beside,
            **shared,
        )

    def _split_older_critic(self) -> None:
        """Read ``critic: centralized`` alone as in older files, in which it meant three things:
        values of turns, and the KL in the loss, as well."""
        older = {"granularity": "turn", "kl_in": "loss"}
        meant = {key: value for key, value in older.items() if f"ppo.{key}" not in self.given}
        section = self._values.get("ppo", {})
        if section.get("critic") != "centralized" or "granularity" not in meant:
            return
        settings = " and ".join(f"{key}: {value}" for key, value in meant.items())
        notice = f"ppo.critic: centralized is read with {settings}, as it used to mean"
        if notice not in self.notices:
            self.notices.append(notice)
        section.update(meant)

    def _section(self, name: str) -> Any:
        return OmegaConf.to_object(self._values[name])

    def leaves(self, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            is_section = key in self.sections or key == "model"
            if isinstance(value, dict) and (is_section or (not prefix and key not in self.keys)):
                yield from self.leaves(value, f"{key}.")
                if key in OPTIONAL_SECTIONS and not value:
                    self._asked.add(key)
            elif not (value is None and is_section and key not in OPTIONAL_SECTIONS):
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

    def _absolute(self, key: str, value: Any, setting: Setting) -> Any:
        head, _, tail = key.partition(".")
        if (f"<algo>.{tail}" if head in self.algorithm_sections else key) not in paths.KEYS:
            return value
        folders = [self.beside, Path.cwd()]
        return paths.absolute(value, folders[::-1] if setting.source[:2] == "--" else folders)

    def _assign(self, key: str, value: Any, setting: Setting) -> None:
        target, name = self._locate(key, value, setting)
        own = self._key(key)
        assert own is not None
        if isinstance(value, float) and value.is_integer() and int in own.members:
            value = int(value)  # 1e6 is a whole number to a person
        truth = own.members == (bool,)
        try:
            if isinstance(value, bool) != truth and (truth or int in own.members):
                raise OmegaConfBaseException("a truth value is not a number")
            OmegaConf.update(target, name, value, merge=False)
            taken = OmegaConf.select(target, name)
        except (OmegaConfBaseException, OverflowError, RecursionError) as error:
            raise UserError(
                f"{key}: {_shown(value)} ({setting.source}) is not valid; give {own.expected}"
            ) from error
        if isinstance(taken, float) and not math.isfinite(taken):
            raise UserError(f"{key}: {value!r} ({setting.source}) is not a finite number")
        if isinstance(taken, int) and abs(taken) >= 1 << 63:
            raise UserError(f"{key}: an integer of more than 64 bits ({setting.source}); give less")

    def _locate(self, key: str, value: Any, setting: Setting) -> tuple[Any, str]:
        section, _, name = key.partition(".")
        known = self._key(key)
        if known is not None:
            if section not in self.sections and (not name or known.is_mapping):
                return self._root, key
            head, _, rest = name.partition(".")
            if not rest or known.is_mapping or isinstance(self._values[section][head], Mapping):
                return self._values[section], name
        own = key.rpartition(".")[2]  # a key of another section is likelier meant than a like name
        near = [k for k in self.keys if k.rpartition(".")[2] == own]
        near = near or difflib.get_close_matches(key, self.keys, 1, 0.5)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise UserError(f"{key}: unknown key, given {value!r} ({setting.source}){hint}")

    def _key(self, key: str) -> Key | None:
        """The key that a dotted name is of, or is an entry of; None: there is none."""
        section, _, name = key.partition(".")
        if section in self.sections and name:
            return keys_of(self.sections[section]).get(name.partition(".")[0])
        return keys_of(Root).get(section)


def share_common_keys(config: Config, given: Mapping[str, str]) -> Config:
    """MARLHF: one value of each common key, for the collection, the loop and the online stage.

    ``given``: key → where it was given. Given in both sections, the RL algorithm's own counts,
    unless only ``marlhf:``'s was given on the command line.
    """
    own, online = config.algorithm, config.online_name
    if own == online:
        return config
    values = {}
    for key in keys_of(CommonConfig).keys() - set(SINGLE_TURN_KEYS):
        general, special = given.get(f"{own}.{key}"), given.get(f"{online}.{key}")
        wins = special is None or (
            general is not None and general.startswith("--") and not special.startswith("--")
        )
        values[key] = getattr(config.sections[own if wins else online], key)
    shared = {n: dataclasses.replace(config.sections[n], **values) for n in (own, online)}
    return dataclasses.replace(config, sections={**config.sections, **shared})


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping, references to other keys resolved. Raises UserError naming the
    file."""
    try:
        with open(path, encoding="utf-8") as file:  # before OmegaConf copies what aliases repeat
            where = f"--config: {str(path)!r}"
            for text in check_values(yaml.safe_load(file), where):
                _check_text(text, where)
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"--config: {str(path)!r} does not exist; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {str(path)!r} cannot be read: {error}") from None
    except RecursionError:
        raise UserError(f"--config: {str(path)!r} is nested too deep") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"--config: {str(path)!r} is not valid YAML: {line}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config: {str(path)!r} holds no mapping; write `section: …`")
    return {str(key): value for key, value in tree.items()}


MAX_VALUES = 100_000  # in one setting, or in one file


def check_values(value: Any, where: str) -> list[str]:
    """Return the texts in a YAML value. Raises UserError for one that could not be copied, printed
    or stored: it holds itself, repeats its aliases without measure, or has an integer of more than
    64 bits."""
    pending, count, texts = [value], 0, []
    while pending:
        item, count = pending.pop(), count + 1
        if count > MAX_VALUES:
            raise UserError(
                f"{where}: more than {MAX_VALUES:,} values, or an alias that holds itself; write "
                "less, without aliases"
            )
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
        elif isinstance(item, str):
            texts.append(item)
        elif isinstance(item, int) and abs(item) >= 1 << 63:
            raise UserError(f"{where}: an integer of more than 64 bits; give less")
    return texts


def _check_text(text: str, where: str) -> None:
    """Raises UserError for an interpolation that is not a reference to another key, and for bytes
    of a command line that the locale cannot decode."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(
            f"{where}: {_shown(text)} cannot be read in this locale; set PYTHONUTF8=1, or "
            "LC_ALL=C.UTF-8"
        )
    rest, more = text, 1
    while more:  # a reference may have others in it
        rest, more = REFERENCE.subn("x", rest)
    if OPENING.search(rest):
        raise UserError(
            f"{where}: {_shown(text)} has an interpolation that is not a reference; only "
            "${section.key} is read: write the value itself"
        )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


def parse_override(item: str) -> Setting:
    """``a.b=value`` with a YAML or Python literal. Raises UserError where there is no ``=``."""
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--override: {item!r} is not `key=value`")
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


def _checked(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of ``RoleSampling``. Raises UserError for an unknown key or another type."""
    known = keys_of(RoleSampling)
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
            raise UserError(f"{name}.{key}: unknown key, given {value!r}; {hint}")
        if not any(fits(value, member) for member in known[key].members):
            raise UserError(f"{name}.{key}: {value!r} is not valid; give {known[key].expected}")
    return values


def _sampling(given: Any) -> dict[str, RoleSampling]:
    """``sampling`` with its values checked. Raises UserError."""
    found = {}
    for role, values in given.items():
        if values is not None and not isinstance(values, dict):
            raise UserError(
                f"sampling.{role}: {values!r} is not a mapping; write sampling.{role}.KEY=VALUE"
            )
        if values:
            found[role] = RoleSampling(**_checked(f"sampling.{role}", values))
    return found


def _tuple(items: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if items is None else tuple(items)
