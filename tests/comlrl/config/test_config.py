"""Configuration: overrides, older flags and spellings, one-line refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comlrl.config.algorithms import SECTIONS
from comlrl.config.hints import SYNONYMS
from comlrl.config.keys import keys_of
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.config.sections import Root
from comlrl.errors import UserError
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.vllm import urls
from tests.support.processes import python
from tests.support.runs import read_config

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "magrpo_quickstart.yaml")


def parse(*arguments: str, algorithm: str = "magrpo", file: str = QUICKSTART) -> Any:
    """(config, notices) of a command line."""
    config, _, notices = resolve(
        algorithm, parse_arguments(algorithm, ["--config", file, *arguments])
    )
    return config, notices


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return str(file)


# ---------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("magrpo.top_k=null", None),
        ("magrpo.top_k=None", None),
        ("magrpo.top_k=~", None),
        ("magrpo.top_k=", None),
        ("magrpo.max_env_steps=1e6", 1_000_000),
        ("magrpo.max_env_steps=1.5E3", 1500),
        ("magrpo.max_steps=010", 10),
        ("magrpo.learning_rate=1e-4", 1e-4),
        ("magrpo.learning_rate=3", 3.0),
        ("magrpo.advantage_normalization=True", True),
        ("magrpo.advantage_normalization=true", True),
        ("magrpo.advantage_normalization=False", False),
        ("magrpo.joint_mode=cross", "cross"),
        ("magrpo.joint_mode='cross'", "cross"),
        ('magrpo.joint_mode="cross"', "cross"),
        ("magrpo.handoff=best", "best"),
        ("external.sandbox_slice='all'", "all"),
        ("external.sandbox_slice=all", "all"),
        ("external.sandbox_slice=-2", -2),
        ("dataset.train_split=test[:16]", "test[:16]"),
        ("dataset.train_split=test[33:163]", "test[33:163]"),
        ("output.dir=out/a=b", "out/a=b"),
        ("seed=7", 7),
        ("lora.target_modules=[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("lora.target_modules=['q_proj','v_proj']", ["q_proj", "v_proj"]),
        ("agent_model.special_tokens={pad_token: <pad>}", {"pad_token": "<pad>"}),
        ("agent_model.model_kwargs.use_cache=false", False),
        ("wandb.tags=[a,b]", ["a", "b"]),
    ],
)
def test_an_override_reads_yaml_and_python(item, expected):
    config, _ = parse("--override", item)
    value: Any = config.to_dict()
    for part in item.partition("=")[0].split("."):
        value = value[part]
    assert value == expected
    assert type(value) is type(expected)


def test_overrides_may_be_many_repeated_and_whole_sections():
    config, _ = parse(
        "--override", "seed=1", "magrpo.num_turns=2", "--override", "seed=2",
        "magrpo.turn_gradient_weights=[1.5,0.5]", "wandb={project: mine, mode: offline}",
    )  # fmt: skip
    assert config.seed == 2
    assert config.section.turn_gradient_weights == [1.5, 0.5]
    assert (config.wandb.project, config.wandb.mode) == ("mine", "offline")
    for section, key in (("wandb", "project"), ("trackio", "project")):
        asked = f"{section}.{key}=x"
        assert getattr(getattr(parse("--override", asked)[0], section), key) == "x"
        assert getattr(parse("--override", asked, f"{section}=null")[0], section) is None
    assert parse("--override", "agents=[a/b,c/d]")[0].agents == ("a/b", "c/d")


def test_file_then_older_flags_then_overrides(tmp_path):
    file = write(tmp_path, "magrpo: {num_train_epochs: 3, num_turns: 1}\nlora: {r: 4}\n")
    assert parse(file=file)[0].section.num_train_epochs == 3
    config, _ = parse("--num_epochs", "5", "--lora_rank", "8", file=file)
    assert (config.section.num_train_epochs, config.lora.r) == (5, 8)
    # The override wins wherever it stands.
    config, _ = parse("--override", "magrpo.num_train_epochs=7", "--num_epochs", "5", file=file)
    assert (config.section.num_train_epochs, config.lora.r) == (7, 4)


def test_older_flags_of_the_multi_agent_scripts():
    config, _ = parse(
        "--model_name", "Qwen/Qwen2.5-Coder-3B", "--output_base_dir", "here", "--num_epochs", "2",
        "--num_turns", "2", "--turn_gradient_weights", "1.2", "0.8",
    )  # fmt: skip
    assert config.agent_model.name == "Qwen/Qwen2.5-Coder-3B"
    assert config.output.base_dir == "here"
    section = config.section
    assert (section.num_train_epochs, section.num_turns) == (2, 2)
    assert section.turn_gradient_weights == [1.2, 0.8]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "epochs"),
    [
        ("magrpo", [], 1),
        ("magrpo", ["magrpo.max_steps=9"], None),
        ("magrpo", ["magrpo.max_env_steps=9"], None),
        ("magrpo", ["magrpo.max_steps=null"], 1),
        ("magrpo", ["magrpo.max_steps=9", "magrpo.num_train_epochs=1"], 1),
        ("madpo", ["madpo.max_steps=9"], None),
        ("madpo", ["madpo.max_steps=9", "madpo.num_iterations=3"], 1),  # passes of a round
        ("marlhf", ["magrpo.max_steps=9"], None),
        ("marlhf", ["magrpo.max_steps=9", "marlhf.num_train_epochs=2"], 2),
    ],
)
def test_a_limit_of_steps_lifts_the_default_limit_of_epochs(algorithm, overrides, epochs, tmp_path):
    file = write(tmp_path, "seed: 1\n")
    arguments = ["--override", *overrides] if overrides else []
    config, _ = parse(*arguments, algorithm=algorithm, file=file)
    assert {config.section.num_train_epochs, config.online.num_train_epochs} == {epochs}


@pytest.mark.parametrize("algorithm", ["ppo", "shppo"])
def test_older_flags_of_ppo_and_shppo(algorithm, tmp_path):
    file = write(tmp_path, f"{algorithm}: {{max_steps: 9, num_agents: 1}}\n")
    config, _ = parse(
        "--base_model", "qwen", "--lora_rank", "8", "--learning_rate", "1e-5", "--num_steps", "1e6",
        "--num_agents", "2", "--save_dir", "there", algorithm=algorithm, file=file,
    )  # fmt: skip
    assert config.agent_model.name == "Qwen/Qwen2.5-Coder-1.5B"
    assert (config.lora.r, config.output.dir) == (8, "there")
    section = config.section
    assert (section.learning_rate, section.num_agents) == (1e-5, 2)
    assert section.max_env_steps == 1_000_000  # alone ends the run
    assert (section.max_steps, section.num_train_epochs) == (None, None)


OLDER = {
    "model_name: a/b": ("agent_model.name", "a/b"),
    "model: {name: a/b}": ("agent_model.name", "a/b"),
    "model: {temperature: 0.5}": ("agent_model.temperature", 0.5),
    "magrpo: {agent_learning_rate: 1.0e-5}": ("magrpo.learning_rate", 1e-5),
    "magrpo: {joint_mode: aligned}": ("magrpo.joint_mode", "align"),
    "magrpo: {joint_mode: crossed}": ("magrpo.joint_mode", "cross"),
    "magrpo: {advantage_mode: rloo}": ("magrpo.advantage", "rloo"),
    "magrpo: {termination_threshold: -0.2}": ("magrpo.early_termination_threshold", -0.2),
    "magrpo: {external_original_prompt: true}": ("external.original_prompt", True),
    "magrpo: {external_previous_response: false}": ("external.previous_response", False),
    "external: {expert_edits_model: gpt}": ("external.expert_model", "gpt"),
    "magrpo: {per_device_train_batch_size: 3}": ("magrpo.batch_size", 3),
    "magrpo: {rollout_buffer_size: 2}": ("magrpo.train_batch_size", 2),
    "output: {save_model: true}": ("output.save_final_model", True),
    "magrpo: {reward_shift: -4}": ("reward_processor.shift", -4.0),
}


@pytest.mark.parametrize("text", OLDER)
def test_an_older_spelling_is_read_with_a_notice(text, tmp_path):
    config, notices = read_config(write(tmp_path, text + "\n"), "magrpo")
    key, expected = OLDER[text]
    section, _, name = key.partition(".")
    assert config.to_dict()[section][name] == expected
    assert len(notices) == 1 and "\n" not in notices[0]
    assert key in notices[0]


def test_model_type_is_ignored_with_a_notice(tmp_path):
    config, notices = read_config(write(tmp_path, "model: {type: qwen}\n"), "magrpo")
    assert config.agent_model.name == "builtin:tiny-coder"
    assert notices == [f"{tmp_path}/config.yaml: `model.type` is ignored"]


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (["magrpo.advantage=raw", "reward_processor.shift=-4"], "every completion is pushed"),
        (["magrpo.advantage=raw"], ""),
        (["reward_processor.shift=-4"], ""),  # cancels against the siblings
        (
            ["magrpo.advantage=raw", "reward_processor.shift=-4", "reward_processor.enabled=false"],
            "",
        ),
    ],
)
def test_a_shift_without_a_baseline_gives_a_notice(items, text):
    _, notices = parse("--override", *items, "magrpo.num_turns=2")
    notices = [notice for notice in notices if "no effect" not in notice]
    assert len(notices) == bool(text)
    assert all(text in notice for notice in notices)


OLDER_CRITICS = {  # settings beside critic=centralized → granularity, kl_in, and the notice
    (): ("turn", "loss", "granularity: turn and kl_in: loss"),
    ("ppo.kl_in=reward",): ("turn", "reward", "granularity: turn,"),
    ("ppo.granularity=turn",): ("turn", "reward", None),
    ("ppo.granularity=turn", "ppo.kl_in=loss", "ppo.kl_coef=0.1"): ("turn", "loss", None),
}


@pytest.mark.parametrize("settings", OLDER_CRITICS, ids=str)
def test_a_centralized_critic_alone_is_read_as_it_used_to_be(settings):
    granularity, kl_in, notice_text = OLDER_CRITICS[settings]
    file = str(ROOT / "configs/ppo_quickstart.yaml")
    items = ["ppo.num_agents=2", "ppo.critic=centralized", *settings]
    config, notices = parse("--override", *items, algorithm="ppo", file=file)
    assert (config.section.granularity, config.section.kl_in) == (granularity, kl_in)
    assert [n for n in notices if "used to mean" in n] == [
        n for n in notices if notice_text is not None and notice_text in n
    ]
    assert (notice_text is not None) == any("used to mean" in n for n in notices)


def test_an_older_spelling_of_another_algorithm(tmp_path):
    file = write(tmp_path, "ppo: {rollout_buffer_size: 8, agent_learning_rate: 1.0e-5}\n")
    config, notices = read_config(file, "ppo")
    assert (config.section.train_batch_size, config.section.learning_rate) == (8, 1e-5)
    assert len(notices) == 2
    for old, now in {"mareinforce": "reinforce", "marloo": "rloo"}.items():
        file = write(tmp_path, f"marlhf: {{rl_algorithm: {old}}}\n")
        config, notices = read_config(file, "marlhf")
        assert config.section.rl_algorithm == now
        assert notices == [f"marlhf.rl_algorithm: '{old}' is read as '{now}'"]
    with pytest.raises(UserError, match="maremax"):  # another baseline than remax here
        read_config(write(tmp_path, "marlhf: {rl_algorithm: maremax}\n"), "marlhf")


# ----------------------------------------------------------------------------------- refusals

VLLM = [
    "generation.backend=vllm", "generation.vllm_url=http://localhost:8000", "magrpo.top_p=null"
]  # fmt: skip
REFUSED = [  # overrides → what the line must name
    (["magrpo.learning_rat=1"], ["magrpo.learning_rat", "1", "magrpo.learning_rate"]),
    (["learning_rate=1e-4"], ["learning_rate", "magrpo.learning_rate"]),
    (["grpo.learning_rate=1e-4"], ["grpo.learning_rate", "magrpo.learning_rate"]),
    (["sandbox.timeouts=3"], ["sandbox.timeouts", "sandbox.timeout"]),
    (["magrpo.seed=3"], ["magrpo.seed", "3", "did you mean `seed`?"]),
    (["magrpo.save_best=true"], ["magrpo.save_best", "True", "`output.save_best`"]),
    (["magrpo.num_turns=two"], ["magrpo.num_turns", "'two'", "whole number"]),
    (["magrpo.num_turns=1.5"], ["magrpo.num_turns", "1.5", "whole number"]),
    (["magrpo.num_turns=true"], ["magrpo.num_turns", "True", "whole number"]),
    (["magrpo.num_turns=null"], ["magrpo.num_turns", "None"]),
    (
        ["magrpo.advantage_normalization=1"],
        ["magrpo.advantage_normalization", "1", "true or false"],
    ),
    (["magrpo.joint_mode=zip"], ["magrpo.joint_mode", "'zip'", "align", "cross"]),
    (["magrpo.handoff=worst"], ["magrpo.handoff", "'worst'", "random", "best"]),
    (["magrpo.advantage=std"], ["magrpo.advantage", "'std'", "rloo"]),
    (["magrpo=3"], ["magrpo", "3"]),
    (["seed"], ["seed", "key=value"]),
    (["=3"], ["key=value"]),
    (["magrpo.num_generations=1"], ["magrpo.num_generations", "1", "advantage=raw"]),
    (["magrpo.num_generations=0", "magrpo.advantage=raw"], ["magrpo.num_generations", "0"]),
    (["magrpo.turn_order=random"], ["magrpo.turn_order", "'random'", "sequential"]),
    (
        ["magrpo.turn_order=sequential", "magrpo.joint_mode=cross"],
        ["magrpo.joint_mode", "cross", "turn_order=sequential", "align"],
    ),
    (
        ["magrpo.turn_order=sequential", "magrpo.num_generations_sequential=1"],
        ["magrpo.num_generations_sequential", "1", "advantage=raw"],
    ),
    (["magrpo.handoff_width=0"], ["magrpo.handoff_width", "0", "at least 1"]),
    (
        ["magrpo.num_turns=2", "magrpo.handoff=best", "magrpo.handoff_width=9"],
        ["magrpo.handoff_width", "9", "8 joint actions", "handoff=null"],
    ),
    (["magrpo.turn_gradient_weights=[1,2]"], ["turn_gradient_weights", "num_turns=1"]),
    (["magrpo.turn_gradient_weights=[-1]"], ["turn_gradient_weights", "-1", "below 0"]),
    (["reward_processor.scale_factor=0"], ["reward_processor.scale_factor", "0", "above 0"]),
    (["lora.alpha=0"], ["lora.alpha", "0", "above 0"]),
    (["sandbox.memory_mb=0"], ["sandbox.memory_mb", "0", "above 0"]),
    (["generation.max_batch_tokens=0"], ["generation.max_batch_tokens", "0", "above 0"]),
    (["generation.vllm_patience=0"], ["generation.vllm_patience", "0", "above 0"]),
    (["generation.backend=vlm"], ["generation.backend", "'vlm'", "vllm"]),
    (["generation.backend=vllm"], ["generation.vllm_url", "null", "address"]),
    *(
        ([*VLLM, f"generation.vllm_url={given}"], ["generation.vllm_url", *words])
        for given, *words in (
            ("[]", "[]", "address, or a list"),
            ("[http://a,b:1]", "'b:1'", "http://"),
            ("[http://a,3]", "3 is not an address"),
            ("[http://a,http://b,http://a/]", "'http://a' appears twice"),
            ("{aux: http://a, mian: http://b}", "'mian' is not an agent's role", "'aux', 'main'"),
            ("{aux: http://a}", "no server for 'builtin:tiny-coder'", "URL"),
            ("{aux: http://a, main: [http://b, 5]}", ".main: 5 is not an address"),
        )
    ),
    *(
        ([*VLLM, "agents=[a,b]", f"generation.vllm_url={given}"], ["generation.vllm_url", *words])
        for given, *words in (
            ("http://x", "'http://x' is for 'a' and 'b'", "one model", "{MODEL: URL"),
            ("{a: http://x, b: [http://y, http://x/]}", "'http://x' is for 'a' and 'b'"),
            ("{a: http://x}", "no server for 'b'", "{b: URL}"),
            ("{a: http://x, c: http://y}", "'c' is not", "'aux', 'main', 'a', 'b'"),
        )
    ),
    (
        [
            *VLLM,
            "agents=[a,b]",
            "generation.vllm_url={a: http://x, b: http://y}",
            "lora.enabled=false",
        ],
        ["lora.enabled", "false", "adapters are sent", "whole models", "builtin"],
    ),
    (
        [*VLLM, "generation.vllm_url=localhost:8000"],
        ["generation.vllm_url", "localhost", "http://"],
    ),
    *(
        ([*VLLM, item], [named, "generation.backend=vllm", *words])
        for item, named, *words in (
            ("lora.enabled=false", "lora.enabled", "false", "whole models"),
            ("lora.target_modules=[q_proj,lm_head]", "lora.target_modules", "lm_head", "head"),
            ("lora.target_modules='.*(q_proj|lm_head)'", "lora.target_modules", "lm_head"),
        )
    ),
    ([*VLLM, "lora.target_modules='(q_proj'"], ["lora.target_modules", "(q_proj", "pattern"]),
    (["generation.overlap=1"], ["generation.overlap", "1", "backend=builtin", "backend=vllm"]),
    ([*VLLM, "generation.overlap=2"], ["generation.overlap", "2", "use 0 or 1"]),
    ([*VLLM, "generation.overlap=true"], ["generation.overlap", "True", "use 0 or 1"]),
    ([*VLLM, "generation.importance_cap=0.5"], ["generation.importance_cap", "0.5", "at least 1"]),
    (["magrpo.max_steps=null"], ["max_steps", "max_env_steps", "num_train_epochs"]),
    (["magrpo.temperature=0"], ["magrpo.temperature", "0"]),
    (["magrpo.learning_rate=0"], ["magrpo.learning_rate", "0"]),
    (["magrpo.learning_rate=-1e-4"], ["magrpo.learning_rate", "-0.0001"]),
    (["magrpo.learning_rate=nan"], ["magrpo.learning_rate", "nan", "finite"]),
    (["magrpo.max_grad_norm=.inf"], ["magrpo.max_grad_norm", "inf", "finite"]),
    (["reward_processor.shift=nan"], ["reward_processor.shift", "nan", "finite"]),
    (["magrpo.discount=1.5"], ["magrpo.discount", "1.5", "at least 0 and at most 1"]),
    (["magrpo.batch_size=0"], ["magrpo.batch_size", "0", "at least 1"]),
    (["magrpo.top_p=2"], ["magrpo.top_p", "2"]),
    (["magrpo.top_p=0"], ["magrpo.top_p", "0", "null"]),
    (["magrpo.top_p=null", "agent_model.top_p=1.5"], ["top_p", "1.5"]),
    (["agent_model.top_k=-1"], ["top_k", "-1", "null"]),
    (["magrpo.top_k=0"], ["magrpo.top_k", "0", "null"]),
    (["magrpo.top_p=0.9", "generation.max_support=0"], ["generation.max_support", "0"]),
    (["magrpo.temperature=-1"], ["magrpo.temperature", "-1"]),
    (["agents=[a,b,c]"], ["agents", "num_agents=2"]),
    (["agents=a"], ["agents", "'a'"]),
    (["agents=[a, {main: b}]"], ["agents", "{'main': 'b'}"]),
    (["agents=[a,b]", "agents.main.train=false"], ["agents.main.train", "list"]),
    (["agents={mian: {}}"], ["agents.mian", "`main`"]),
    (["agents.main=b"], ["agents.main", "'b'"]),
    (["agents.main.trian=false"], ["agents.main.trian", "`train`"]),
    (["agents.main.train=0"], ["agents.main.train", "0"]),
    (["agents.main.learning_rate=0"], ["agents.main.learning_rate", "0"]),
    (["agents.main.model=3"], ["agents.main.model", "3"]),
    (["agents.main.sampling.stops=[a]"], ["agents.main.sampling.stops", "`stop`"]),
    (["agents.main.sampling.top_p=2"], ["agents.main.sampling.top_p", "2"]),
    (["agents.main.sampling.top_k=2", "sampling.main.top_p=0.5"], ["agents.main.sampling"]),
    (["agents.main.train=false", "agents.aux.train=false"], ["agents.main.train", "all agents"]),
    (["agents.main={train: false, learning_rate: 1}"], ["agents.main.learning_rate", "train"]),
    (["evaluation.temperature=-1"], ["evaluation.temperature", "-1"]),
    (["evaluation.max_new_tokens=4096"], ["evaluation.max_new_tokens", "max_length"]),
    (["lora.r=0"], ["lora.r", "0"]),
    (["sandbox.timeout=0"], ["sandbox.timeout", "0"]),
    (["external.mode=loud"], ["external.mode", "'loud'", "level_feedback", "expert_edits"]),
    (["external.sandbox_slice=some"], ["external.sandbox_slice", "'some'", "all or null"]),
    (["agent_model.max_length=32"], ["agent_model.max_length", "32", "max_new_tokens=48"]),
    (["agent_model.torch_dtype=int8"], ["agent_model.torch_dtype", "'int8'", "bfloat16"]),
]


MEANT = [  # algorithm, the unknown key, and the key that it names
    ("magrpo", "magrpo.lr", "magrpo.learning_rate"),
    ("magrpo", "gamma", "magrpo.discount"),
    ("magrpo", "magrpo.gamma", "magrpo.discount"),
    ("magrpo", "magrpo.beta", "magrpo.kl_coef"),
    ("madpo", "madpo.beta", "madpo.dpo_beta"),
    ("ppo", "ppo.cliprange", "ppo.clip_range"),
    ("ppo", "algorithm.gae_lam", "ppo.gae_lambda"),
    ("ppo", "actor_rollout_ref.actor.optim.lr", "ppo.learning_rate"),
    ("ppo", "critic.optim.critic_lr", "ppo.value_learning_rate"),
    ("grpo", "max_completion_length", "grpo.max_new_tokens"),
    ("grpo", "data.max_response_length", "grpo.max_new_tokens"),
    ("grpo", "lora_alpha", "lora.alpha"),
    ("magrpo", "magrpo.reference_kl_coef", "magrpo.kl_coef"),
    ("magrpo", "magrpo.parallel_training", "torchrun"),
    ("magrpo", "output.save_path", "final_model"),
    ("magrpo", "ppo.critic", "train_ppo"),
    ("magrpo", "magrop.num_turns", "magrpo.num_turns"),
    ("magrpo", "dataset.eval_splits", "dataset.eval_split"),
]


@pytest.mark.parametrize(("algorithm", "key", "meant"), MEANT, ids=lambda value: str(value))
def test_an_unknown_key_names_what_it_means(algorithm, key, meant):
    with pytest.raises(UserError) as error:
        parse(
            "--override", f"{key}=1", algorithm=algorithm,
            file=QUICKSTART.replace("magrpo", algorithm),
        )  # fmt: skip
    line = str(error.value)
    assert line.startswith(f"{key}:")
    assert f"`{meant}`" in line if "." in meant else meant in line


def test_every_name_of_another_library_leads_to_a_key():
    keys = {f"{s}.{k}" for s, cls in (SECTIONS | SHARED).items() for k in keys_of(cls)}
    keys |= set(keys_of(Root))
    last = {key.rpartition(".")[2] for key in keys}
    assert [k for k in SYNONYMS if k not in keys and k not in last] == []


def test_all_unknown_keys_are_named_at_once(tmp_path):
    text = "magrpo: {lr: 1, reference_devices: [cuda:0]}\nsandbx: {timeout: 3}\n"
    with pytest.raises(UserError) as error:
        parse("--override", "gamma=1", file=write(tmp_path, text))
    for key in ("magrpo.lr", "magrpo.reference_devices", "sandbx.timeout", "gamma"):
        assert key in str(error.value)
    for meant in ("magrpo.learning_rate", "sandbox.timeout", "magrpo.discount", "migration.md"):
        assert meant in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--magrpo.learning_rate=1e-4", "--seed=7"],
        ["--override", "seed=7", "--magrpo.learning_rate=1e-4"],
        ["--magrpo.learning_rate=1e-4", "--override", "seed=7"],
        ["--override", "--magrpo.learning_rate=1e-4", "--seed=7"],
    ],
)
def test_a_sweeps_agent_may_pass_settings_as_options(arguments):
    config, _ = parse(*arguments)
    assert (config.section.learning_rate, config.seed) == (1e-4, 7)


@pytest.mark.parametrize("word", ["--nothing", "--dry_run", "nothing", "--magrpo.lr=1"])
def test_other_words_on_the_command_line_are_refused(word):
    with pytest.raises(UserError) as error:
        parse(word)
    assert word.strip("-").partition("=")[0] in str(error.value)


def test_shppo_has_a_layer_that_no_server_has():
    with pytest.raises(UserError, match=r"generation\.backend=vllm with shppo, .*; use builtin"):
        parse(
            "--override", *VLLM[:2], algorithm="shppo", file=QUICKSTART.replace("magrpo", "shppo")
        )


@pytest.mark.parametrize("algorithm", ["madpo", "marlhf"])
def test_rounds_do_not_know_what_comes_next(algorithm):
    with pytest.raises(
        UserError, match=rf"generation\.overlap: 1 with {algorithm}, .*; set it to 0"
    ):
        parse(
            "--override", *VLLM[:2], "generation.overlap=1", algorithm=algorithm,
            file=QUICKSTART.replace("magrpo", algorithm),
        )  # fmt: skip


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_server_may_sample_with_truncation_and_ahead(top_p):
    config, notices = parse("--override", *VLLM, f"magrpo.top_p={top_p}", "generation.overlap=1")
    assert config.generation.backend == "vllm" and config.generation.overlap == 1 and not notices


@pytest.mark.parametrize(
    ("given", "agents", "expected"),
    [
        ("http://a", None, [("http://a",)] * 2),
        ("[http://a,http://b/]", None, [("http://a", "http://b")] * 2),
        ("http://a", "[m,m]", [("http://a",)] * 2),
        (
            "{m: http://a, n: [http://b, http://c]}",
            "[m,n]",
            [("http://a",), ("http://b", "http://c")],
        ),
        ("{main: http://b, m: http://a}", "[m,m]", [("http://a",), ("http://b",)]),
        ("{aux: http://a, main: http://b}", None, [("http://a",), ("http://b",)]),
    ],
)
def test_the_servers_of_each_policy(given, agents, expected):
    items = [*VLLM, f"generation.vllm_url={given}", *([f"agents={agents}"] if agents else [])]
    config, _ = parse("--override", *items)
    assert urls(config.generation.vllm_url, config.model_names, ("aux", "main")) == tuple(expected)


def test_a_path_that_is_too_long_is_one_line(capsys):
    name = "x" * 300
    data = ["--config", QUICKSTART, "--dry-run", "--override", f"dataset.name={name}.jsonl"]
    for given in (["--config", name], data):
        assert main("magrpo", None, given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and name in line


@pytest.mark.parametrize(("items", "named"), REFUSED, ids=lambda value: str(value[0]))
def test_a_mistake_is_refused_in_one_line(items, named):
    with pytest.raises(UserError) as error:
        parse("--override", *items)
    line = str(error.value)
    assert "\n" not in line
    for word in named:
        assert word in line


@pytest.mark.parametrize(
    ("algorithm", "items", "named"),
    [
        ("grpo", ["grpo.num_agents=2"], ["grpo.num_agents", "2", "magrpo"]),
        ("madpo", ["madpo.num_turns=2"], ["madpo.num_turns", "2"]),
        ("madpo", ["madpo.comparator=model: gpt-5"], ["madpo.comparator", "gpt-5", "reward"]),
        ("marlhf", ["marlhf.comparator={earlier: a}"], ["marlhf.comparator", "earlier"]),
        ("magrpo", ["mlflow.experiment=team"], ["mlflow.experiment", "trackio"]),
        ("magrpo", ["mlflow={experiment: team}"], ["mlflow", "team", "trackio"]),
        ("madpo", ["madpo.replay=last_k"], ["madpo.replay_rounds", "null"]),
        ("madpo", ["madpo.num_iterations=0"], ["madpo.num_iterations", "0", "1"]),
        ("madpo", ["madpo.replay_lambda=1.5"], ["madpo.replay_lambda", "1.5"]),
        (
            "madpo",
            ["madpo.num_iterations=2", "madpo.preferences=a.jsonl"],
            ["madpo.preferences", "a.jsonl", "num_iterations=1"],
        ),
        (
            "marlhf",
            ["marlhf.num_iterations=9", "marlhf.num_train_epochs=null", "marlhf.max_steps=8"],
            ["marlhf.num_train_epochs", "max_steps=8", "num_iterations=9"],
        ),
        (
            "marlhf",
            ["marlhf.num_iterations=2", "magrpo.refill=3"],
            ["magrpo.refill", "3", "num_iterations=2"],
        ),
        ("madpo", ["madpo.pair_selection=all"], ["preference_pairs_per_sample", "null"]),
        ("madpo", ["lora.dropout=0.1"], ["lora.dropout", "0.1", "madpo"]),
        (
            "madpo",
            [
                "madpo.use_environment_step=false",
                "madpo.num_train_epochs=null",
                "madpo.max_env_steps=99",
            ],
            ["madpo.max_env_steps", "99", "max_steps"],
        ),
        ("marlhf", ["magrpo.num_turns=2"], ["magrpo.num_turns", "2"]),
        (
            "marlhf",
            ["marlhf.rl_algorithm=reinforce", "reward_processor.shift=-4"],
            ["reward_processor.shift", "-4", "reinforce", "reward_processor.shift=0"],
        ),
        (
            "marlhf",
            ["magrpo.advantage=raw", "reward_processor.shift=2"],
            ["reward_processor.shift: 2", "reward_processor.shift=0"],
        ),
        ("ppo", ["lora.dropout=0.1"], ["lora.dropout", "0.1"]),
        ("magrpo", ["lora.dropout=0.1", "magrpo.update_epochs=2"], ["lora.dropout", "0.1"]),
        ("marlhf", ["lora.dropout=0.1", "magrpo.update_epochs=2"], ["lora.dropout", "0.1"]),
        ("grpo", ["grpo.update_epochs=0"], ["grpo.update_epochs", "0", "at least 1"]),
        ("grpo", ["grpo.update_epochs=2", "grpo.clip_range=0"], ["grpo.clip_range", "above 0"]),
        ("ppo", ["ppo.joint_mode=cross"], ["ppo.joint_mode", "cross"]),
        ("madpo", ["madpo.joint_mode=counterfactual"], ["madpo.joint_mode", "use align or cross"]),
        (
            "ppo",
            ["ppo.critic=centralized", "ppo.granularity=token"],
            ["ppo.granularity: token", "ppo.critic=centralized", "ppo.granularity=turn"],
        ),
        ("ppo", ["ppo.shared_policy=true", "agents=[a]"], ["agents", "share one policy"]),
        (
            "ppo",
            ["ppo.critic_model=a", "distributed.strategy=fsdp"],
            ["ppo.critic_model: 'a'", "distributed.strategy=replicate"],
        ),
        (
            "marlhf",
            ["marlhf.rl_algorithm=ppo", "ppo.shared_policy=true"],
            ["ppo.shared_policy", "marlhf", "set it to false"],
        ),
        ("shppo", ["shppo.gae_lambda=2"], ["shppo.gae_lambda", "2"]),
    ],
)
def test_what_does_not_go_together_is_refused(algorithm, items, named, tmp_path):
    file = write(tmp_path, f"{algorithm}: {{seed: 1}}\n".replace("seed: 1", ""))
    with pytest.raises(UserError) as error:
        parse("--override", *items, algorithm=algorithm, file=file)
    for word in named:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("magrpo: [1, 2]\n", "magrpo"),
        ("- a\n- b\n", "mapping"),
        ("magrpo: {a: [}\n", "YAML"),
        ("seed: ${nowhere}\n", "nowhere"),
        ("magrpo: {num_turn: 2}\n", "did you mean `magrpo.num_turns`?"),
        ("trainer: {num_turns: 2}\n", "trainer.num_turns"),
        ("actor_rollout_ref: {rollout: {n: 4}}\n", "did you mean `magrpo.num_generations`?"),
        ("data: {train_batch_size: 8}\n", "did you mean `magrpo.batch_size`?"),
    ],
)
def test_a_bad_file_is_named(text, named, tmp_path):
    with pytest.raises(UserError, match=r"(?s)^[^\n]*$") as error:
        read_config(write(tmp_path, text), "magrpo")
    assert named in str(error.value)


# ------------------------------------------------------------------------------ real processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "configs/nowhere.yaml"],
        ["--config", QUICKSTART, "--override", "magrpo.num_turns=two"],
        ["--config", QUICKSTART, "--override", "dataset.train_split=nowhere[:3]"],
        ["--config", QUICKSTART, "--override", "dataset.name=/nowhere/tasks.jsonl"],
        ["--config", QUICKSTART, "--override", "agent_model.name=/nowhere/model"],
        ["--config", QUICKSTART, "--override", "output.dir=/proc/nowhere"],
        ["--config", QUICKSTART, "--dry-run", "--override", "magrpo.batch_size=0"],
    ],
    ids=lambda arguments: arguments[-1],
)
def test_the_users_mistake_ends_with_2_and_one_line(arguments, tmp_path):
    folder = [] if "output.dir" in arguments[-1] else ["--override", f"output.dir={tmp_path}"]
    done = python("train_magrpo.py", *arguments, *folder, code=2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_without_a_config_the_usage_is_shown():
    assert "--config" in python("train_magrpo.py", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--config", QUICKSTART, "--override", "magrpo.nothing=1"], 2),
    ],
    ids=["help", "mistake"],
)
def test_answers_come_before_anything_heavy_is_imported(arguments, code):
    done = python("-X", "importtime", "train_magrpo.py", *arguments, code=code)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "comlrl.config.sections" in imported
    assert not imported & {"torch", "transformers", "datasets", "peft", "wandb", "rich"}


@pytest.mark.slow
def test_notices_go_to_stderr(tmp_path):
    file = write(tmp_path, "magrpo: {joint_mode: aligned, rollout_buffer_size: 4}\n")
    done = python("train_magrpo.py", "--config", file, "--dry-run")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["notice"] * 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("reward.arguments.bonos=share", "did you mean `bonus`"),
        ("reward.arguments.colour=red", "there are bonus, measure_need"),
        ("reward.arguments.bonus=half", "use any_test, share or team"),
        ("reward.arguments.need_bonus=1", "bonus=team"),
        ("reward.arguments.measure_need=yes please", "use true or false"),
        ("reward.argument.bonus=share", "did you mean `reward.arguments`"),
        ("reward.arguments=3", "reward.arguments: 3"),
    ],
)
def test_arguments_of_the_reward_are_strict(item, message):
    with pytest.raises(UserError, match=message):
        parse("--override", item)


def test_arguments_of_the_reward():
    overrides = ["reward.arguments.bonus=share", "reward.arguments.measure_need=true"]
    config, _ = parse("--override", *overrides)
    with validate(config).build_reward() as found:
        assert (found.bonus, found.measure_need) == ("share", True)
    grpo = QUICKSTART.replace("magrpo", "grpo")
    with pytest.raises(UserError, match="'share' has no effect on an agent without helpers"):
        parse("--override", *overrides, algorithm="grpo", file=grpo)
    parse("--override", "reward.arguments.bonus=team", algorithm="grpo", file=grpo)


# ------------------------------------------------------------------------- files of somebody else


def refused(file: str, *arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        parse(*arguments, file=file)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
    return str(raised.value)


RESOLVERS = [
    "${oc.env:COMLRL_SECRET}", "${ oc.env:COMLRL_SECRET}", "a\\\\${oc.env:COMLRL_SECRET}",
    "\\${oc.env:COMLRL_SECRET}", "${oc.${oc.env:COMLRL_SECRET}:x}", "${oc.decode:1}",
    "${oc.env:${agent_model.name}}", "${agent_model.name}${oc.env:COMLRL_SECRET}",
]  # fmt: skip


@pytest.mark.parametrize("text", RESOLVERS)
def test_a_file_does_not_read_the_environment(tmp_path, monkeypatch, text):
    """Also where a text is an interpolation only once the file's own escapes are resolved."""
    monkeypatch.setenv("COMLRL_SECRET", "s3cret")
    quickstart = Path(QUICKSTART).read_text()
    file = write(tmp_path, f"{quickstart}\nwandb:\n  project: '{text}'\n")
    assert "is not a reference" in refused(file)
    file = write(tmp_path, f"{quickstart}\nagents: [a, '{text}']\n")
    assert "is not a reference" in refused(file)


def test_an_override_does_not_read_the_environment(monkeypatch):
    monkeypatch.setenv("COMLRL_SECRET", "s3cret")
    for key in ("output.dir", "prompts.aux", "agent_model.model_kwargs.a"):
        assert "is not a reference" in refused(QUICKSTART, "--override", f"{key}={RESOLVERS[0]}")
    line = "agent_model.model_kwargs={a: {b: ['${oc.env:COMLRL_SECRET}']}}"
    assert "is not a reference" in refused(QUICKSTART, "--override", line)
    assert "'nothing'" in refused(QUICKSTART, "--override", "agents=['${nothing}',b]")


def test_references_to_other_keys_are_read(tmp_path):
    text = Path(QUICKSTART).read_text() + "\nwandb:\n  project: 'of ${magrpo.batch_size}'\n"
    config, _ = parse(file=write(tmp_path, text + "  name: ${wandb.project}\n"))
    expected = f"of {config.section.batch_size}"
    assert (config.wandb.project, config.wandb.name) == (expected, expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prompts: " + "[" * 3000 + "]" * 3000, "nested too deep"),
        ("x: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deep"),
        ("agents: [" + "9" * 5000 + "]", "digits"),
    ],
)
def test_a_file_that_no_reader_takes(tmp_path, line, message):
    file = write(tmp_path, Path(QUICKSTART).read_text() + f"\n{line}\n")
    assert message in refused(file)
    done = python("train_magrpo.py", "--config", file, code=2)
    assert done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.parametrize(
    "item",
    [
        "seed=" + "9" * 5000, "seed=0" + "9" * 5000, "seed=0x" + "f" * 5000, "seed=" + "9" * 400,
        "magrpo.learning_rate=" + "9" * 400, "lora.target_modules=" + "[" * 150 + "]" * 150,
    ],
)  # fmt: skip
def test_an_override_out_of_all_bounds(item):
    assert refused(QUICKSTART, "--override", item).startswith(item.partition("=")[0])
