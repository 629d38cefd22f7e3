"""Loading of a ``Config``: YAML, older spellings, overrides, then checks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comlrl.config import paths
from comlrl.config.algorithms import SECTIONS as ALGORITHMS
from comlrl.config.algorithms import SINGLE_TURN_KEYS, CommonConfig
from comlrl.config.hints import WITHOUT_EFFECT, hint
from comlrl.config.keys import Key, fits, keys_of
from comlrl.config.resolved import Config
from comlrl.config.sections import (
    OPTIONAL_SECTIONS,
    SECTIONS,
    AgentConfig,
    AgentLora,
    ApiConfig,
    RoleSampling,
    Root,
)
from comlrl.config.yaml_values import (
    Setting,
    check_text,
    check_values,
    load_yaml,
    normalise,
    printed,
)
from comlrl.errors import UserError, near

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
VALUE_ALIASES: dict[str, dict[Any, str]] = {
    "joint_mode": {"aligned": "align", "crossed": "cross"},
    "rl_algorithm": {"mareinforce": "reinforce", "marloo": "rloo"},
    "dpo_reference": {True: "start", False: "none", None: "none"},
}


# Nested mappings in the settings of one agent.
OF_AGENT = {"sampling": RoleSampling, "lora": AgentLora, "api": ApiConfig}


@functools.cache
def _defaults(sections: tuple[tuple[str, type], ...]) -> DictConfig:
    """Build the defaults of all sections, by name. Cached, as this dominates the time of loading
    a configuration."""
    values = OmegaConf.create({name: OmegaConf.structured(cls) for name, cls in sections})
    for name, _ in sections:
        OmegaConf.set_readonly(values[name], False)
    return values


class Loader:
    """Collector of one algorithm's settings, in order, that builds a Config from them."""

    def __init__(self, algorithm: str, sections: Mapping[str, type]) -> None:
        """Set up the loader. ``sections``: the algorithm's sections by name, its own first."""
        self.algorithm = algorithm
        self.algorithm_sections = dict(sections)
        self.sections: dict[str, type] = {**SECTIONS, **sections}
        self.folder = Path.cwd()  # folder of the last file read
        self.beside = self.folder  # folder against which its paths are resolved
        self.notices: list[str] = []
        self.sources: dict[str, str] = {}  # key that was set → source
        self._values = copy.deepcopy(_defaults(tuple(self.sections.items())))
        self._root = OmegaConf.structured(Root)
        self._present: set[str] = set()  # enabled OPTIONAL_SECTIONS
        self._unknown: dict[str, Setting] = {}  # by key
        self.keys = [f"{s}.{name}" for s, cls in self.sections.items() for name in keys_of(cls)]
        self.keys += keys_of(Root)

    def read(self, path: str | Path) -> None:
        """Set every key of a YAML file."""
        self.folder = self.beside = Path(os.path.abspath(path)).parent
        for key, value in self.leaves(load_yaml(path)):
            self.set(Setting(key, value, str(path)))

    def set(self, setting: Setting) -> None:
        """Set one key; a later setting replaces an earlier one.

        Raises UserError for a value of the wrong type. Unknown keys are reported by ``build``.
        """
        key = self._rename(setting)
        if key is None:
            return
        where = f"{key} ({setting.source})"
        for text in check_values(setting.value, where):
            check_text(text, where)
        is_text = key.partition(".")[0] == "prompts"  # an empty prompt is not a missing value
        value = setting.value if is_text else normalise(setting.value)
        older = VALUE_ALIASES.get(key.rpartition(".")[2], {})
        if isinstance(value, str | bool | None) and value in older:
            shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
            self.notices.append(f"{key}: {shown} is read as '{older[value]}'")
            value = older[value]
        if key == "reward_processor.shift" and value is None:  # older files: reward_shift: null
            value = 0.0
        if key in self.sections:
            if isinstance(value, dict):  # one override sets a whole section
                for name, inner in value.items():
                    self.set(Setting(f"{key}.{name}", inner, setting.source))
                if key in OPTIONAL_SECTIONS:
                    self._present.add(key)
                return
            if key not in OPTIONAL_SECTIONS or value is not None:
                form = (
                    f"{key}.KEY=VALUE" if setting.source[:2] == "--" else f"{key}: {{KEY: VALUE}}"
                )
                raise UserError(f"{key}: {value!r} ({setting.source}) has no keys; write `{form}`")
            self._present.discard(key)
            return
        if (section := key.partition(".")[0]) in OPTIONAL_SECTIONS:
            self._present.add(section)
        self._assign(key, self._absolute(key, value, setting), setting)
        self.sources[key] = setting.source

    def build(self) -> Config:
        """Return the frozen configuration. ``Config.check`` checks relations between keys.

        Raises UserError for unknown keys, naming them all, and for an override that refers to one.
        """
        self._refuse_unknown()
        try:
            self._split_older_critic()
            return self._built()
        except OmegaConfBaseException as error:
            raise UserError(f"--override: {' '.join(str(error).split())}") from error

    def _built(self) -> Config:
        off = set(OPTIONAL_SECTIONS) - self._present
        values = {n: OmegaConf.to_object(v) for n, v in self._values.items() if n not in off}
        sections: Any = {n: values[n] for n in self.algorithm_sections}
        shared: dict[str, Any] = {n: values.get(n) for n in SECTIONS}
        devices = self._root.agent_devices
        shared_sections = share_common_keys(self.algorithm, sections, self.sources)
        return Config(
            algorithm=self.algorithm,
            agents=_agents(self._root.agents),
            agent_devices=None if devices is None else tuple(devices),
            domain=self._root.domain,
            prompts=dict(self._root.prompts),
            seed=self._root.seed,
            sampling=_sampling(OmegaConf.to_container(self._root.sampling)),
            init_from=self._root.init_from,
            sections=end_by_steps(self.algorithm, shared_sections, self.sources),
            folder=self.folder,
            beside=self.beside,
            **shared,
        )

    def _split_older_critic(self) -> None:
        """Read ``critic: centralized`` without ``granularity`` as in older files, where it also
        implied values per turn and the KL in the loss."""
        older = {"granularity": "turn", "kl_in": "loss"}
        meant = {key: value for key, value in older.items() if f"ppo.{key}" not in self.sources}
        section = self._values.get("ppo", {})
        if section.get("critic") != "centralized" or "granularity" not in meant:
            return
        settings = " and ".join(f"{key}: {value}" for key, value in meant.items())
        notice = f"ppo.critic: centralized is read with {settings}, as it used to mean"
        if notice not in self.notices:
            self.notices.append(notice)
        section.update(meant)

    def leaves(self, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            is_section = key in self.sections or key == "model"
            below_unknown = key.partition(".")[0] not in {*self.sections, *self.keys}
            if isinstance(value, dict) and (is_section or below_unknown):
                yield from self.leaves(value, f"{key}.")
                if key in OPTIONAL_SECTIONS and not value:
                    self._present.add(key)
            elif not (value is None and is_section and key not in OPTIONAL_SECTIONS):
                yield key, value

    def _rename(self, setting: Setting) -> str | None:
        key = setting.key
        if key.startswith("model.") and key not in ALIASES:
            new: str | None = "agent_model." + key.removeprefix("model.")
        else:
            head, _, tail = key.partition(".")
            generic = f"<algo>.{tail}" if head in self.algorithm_sections else key
            gone = head if head in WITHOUT_EFFECT else tail
            if gone in WITHOUT_EFFECT and setting.value == WITHOUT_EFFECT[gone]:
                return None
            if generic not in ALIASES:
                return key
            new = ALIASES[generic]
            new = new and new.replace("<algo>", head)
        text = f"is read as `{new}`" if new else "is ignored"
        self.notices.append(f"{setting.source}: `{key}` {text}")
        return new

    def _absolute(self, key: str, value: Any, setting: Setting) -> Any:
        head, _, tail = key.partition(".")
        generic = f"<algo>.{tail}" if head in self.algorithm_sections else key
        names_model = tail.endswith(".model") and not tail.endswith(".api.model")
        if head == "agents" and (names_model or isinstance(value, dict)):
            generic = head
        if generic not in paths.KEYS:
            return value
        folders = [self.beside, Path.cwd()]
        return paths.absolute(value, folders[::-1] if setting.source[:2] == "--" else folders)

    def _assign(self, key: str, value: Any, setting: Setting) -> None:
        located = self._locate(key)
        if located is None:
            self._unknown[key] = dataclasses.replace(setting, key=key)
            return
        target, name = located
        option = self._key(key)
        assert option is not None
        if key.startswith("agents.") and isinstance(self._root.agents, ListConfig):
            raise UserError(
                f"{key}: {printed(value)} ({setting.source}), and agents is a list; write it as a "
                "mapping, {ROLE: {model: NAME}}"
            )
        if isinstance(value, float) and value.is_integer() and int in option.members:
            value = int(value)  # accept 1e6 as an integer
        truth = option.members == (bool,)
        try:
            if isinstance(value, bool) != truth and (truth or int in option.members):
                raise OmegaConfBaseException("a truth value is not a number")
            OmegaConf.update(target, name, value, merge=False)
            taken = OmegaConf.select(target, name)
        except (OmegaConfBaseException, OverflowError, RecursionError) as error:
            raise UserError(
                f"{key}: {printed(value)} ({setting.source}) is not valid; use {option.expected}"
            ) from error
        if isinstance(taken, float) and not math.isfinite(taken):
            raise UserError(
                f"{key}: {value!r} ({setting.source}) is not a finite number; use a finite one"
            )
        if isinstance(taken, int) and abs(taken) >= 1 << 63:
            raise UserError(
                f"{key}: an integer of more than 64 bits ({setting.source}); use a smaller one"
            )

    def _locate(self, key: str) -> tuple[Any, str] | None:
        """Return the container of a key's value, and its name in it; None if the key is unknown."""
        section, _, name = key.partition(".")
        option = self._key(key)
        if option is None:
            return None
        if section not in self.sections:
            nested = option.is_mapping or option.annotation is Any
            return (self._root, key) if not name or nested else None
        head, _, rest = name.partition(".")
        nested = option.is_mapping or isinstance(self._values[section][head], Mapping)
        return (self._values[section], name) if nested or not rest else None

    def _refuse_unknown(self) -> None:
        """Raise UserError for all unknown keys at once."""
        if not self._unknown:
            return
        hints = [
            hint(key, self.keys, self.algorithm) or self._of_other_algorithm(key)
            for key in self._unknown
        ]
        (setting, fix), *others = zip(self._unknown.values(), hints, strict=True)
        text = f"{setting.key}: unknown key, set to {printed(setting.value)} ({setting.source})"
        text += f"; {fix}" if fix else ""
        if others:
            listed = ", ".join(f"{s.key}{f' ({fix})' if fix else ''}" for s, fix in others)
            text += f"; also unknown: {listed}; docs/configuration.md lists all keys"
        raise UserError(text)

    def _of_other_algorithm(self, key: str) -> str:
        section = key.partition(".")[0]
        return f"`{section}` is a section of train_{section}.py" if section in ALGORITHMS else ""

    def _key(self, key: str) -> Key | None:
        """Return the key that a dotted name refers to, itself or by an entry; None if unknown."""
        section, _, name = key.partition(".")
        if section in self.sections and name:
            return keys_of(self.sections[section]).get(name.partition(".")[0])
        return keys_of(Root).get(section)


def share_common_keys(
    outer: str, sections: Mapping[str, CommonConfig], sources: Mapping[str, str]
) -> Mapping[str, CommonConfig]:
    """Give MARLHF's collection, loop and online stage the same value of each common key.

    ``outer``: the run's algorithm. ``sources``: key → where it was set. If both sections set a key,
    the RL algorithm's value is used, unless only ``marlhf:``'s was set on the command line.
    """
    online = sections[outer].learns_by
    if online is None:
        return sections
    values = {}
    for key in keys_of(CommonConfig).keys() - set(SINGLE_TURN_KEYS):
        general, special = sources.get(f"{outer}.{key}"), sources.get(f"{online}.{key}")
        wins = special is None or (
            general is not None and general.startswith("--") and not special.startswith("--")
        )
        values[key] = getattr(sections[outer if wins else online], key)
    shared = {n: dataclasses.replace(sections[n], **values) for n in (outer, online)}
    return {**sections, **shared}


def end_by_steps(
    outer: str, sections: Mapping[str, CommonConfig], sources: Mapping[str, str]
) -> Mapping[str, CommonConfig]:
    """Remove the default limit of one epoch if max_steps or max_env_steps is set, as in
    transformers' Trainer. With several rounds, each remains limited to one pass.

    ``outer``: the run's algorithm. ``sources``: key → where it was set.
    """
    section = sections[outer]
    chosen = any(f"{name}.num_train_epochs" in sources for name in sections)
    endless = section.max_steps is None and section.max_env_steps is None
    if chosen or endless or getattr(section, "num_iterations", 1) > 1:
        return sections
    return {n: dataclasses.replace(s, num_train_epochs=None) for n, s in sections.items()}


def _checked(name: str, values: Any, cls: type) -> Any:
    """Build a ``cls`` from a mapping. Raises UserError if it is not a mapping, or for an unknown
    key or a wrong type."""
    keys = keys_of(cls)
    if values is not None and not isinstance(values, dict):
        raise UserError(f"{name}: {values!r} is not a mapping; write {name}.KEY=VALUE")
    for key, value in (values or {}).items():
        if key not in keys:
            hint = near(key, keys, "there are {}")
            raise UserError(f"{name}.{key}: unknown key, set to {value!r}; {hint}")
        if not any(fits(value, member) for member in keys[key].members):
            raise UserError(f"{name}.{key}: {value!r} is not valid; use {keys[key].expected}")
    return cls(**(values or {}))


def _sampling(by_role: Any) -> dict[str, RoleSampling]:
    """Check ``sampling`` and return its settings by role. Raises UserError."""
    checked = {role: _checked(f"sampling.{role}", v, RoleSampling) for role, v in by_role.items()}
    return {role: sampling for role, sampling in checked.items() if by_role[role]}


def _agents(value: Any) -> tuple[str, ...] | dict[str, AgentConfig] | None:
    """Check ``agents`` and return its models or settings. Raises UserError."""
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, str):
                raise UserError(
                    f"agents: {item!r} is not the name of a model; use one name for each agent, or "
                    "a mapping {ROLE: {KEY: VALUE}}"
                )
        return tuple(value)
    if value is not None and not isinstance(value, dict):
        raise UserError(
            f"agents: {value!r}; use a list of models' names, or {{ROLE: {{KEY: VALUE}}}}"
        )
    agents = {
        role: _checked(f"agents.{role}", values, AgentConfig)
        for role, values in (value or {}).items()
    }
    for role, agent in agents.items():
        settings = {
            name: _checked(f"agents.{role}.{name}", getattr(agent, name), cls)
            for name, cls in OF_AGENT.items()
            if getattr(agent, name) is not None
        }
        if "api" in settings:
            if agent.train and "train" in (value or {})[role]:
                raise UserError(
                    f"agents.{role}.train: true with agents.{role}.api, whose weights are not "
                    "here; leave train out"
                )
            settings["train"] = False
        agents[role] = dataclasses.replace(agent, **settings)
    return agents or None
