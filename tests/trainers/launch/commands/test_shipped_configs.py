"""The shipped YAML files: they load, their keys are read, their settings are the published ones."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from comlrl.builtin import TINY_CODER
from comlrl.config.algorithms import SECTIONS, MAGRPOConfig
from comlrl.trainers.launch.cost.dry_run import describe
from comlrl.trainers.launch.cost.tree_size import growth
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.update.minibatches import like_parts
from tests.support.runs import algorithm_of, read_config, resolved

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_loads_as_it_is_written(path):
    config, notices = read_config(path, algorithm_of(path))
    assert notices == []  # no older spelling in what we ship
    for section, keys in yaml.safe_load(path.read_text()).items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                assert config.to_dict()[section][key] == value


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_a_run_writes_down_gives_the_same_object(path, tmp_path):
    config, _ = read_config(path, algorithm_of(path))
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
    again, notices = read_config(written, algorithm_of(path))
    assert again == config
    assert notices == []


def _attributes_read() -> set[str]:
    """Names of all attributes that the program reads, checks of configurations left out."""
    names: set[str] = set()
    for room in ("comlrl", "trainers", "rewards", "external", "loggers"):
        for file in (ROOT / room).rglob("*.py"):
            if file.name == "relations.py":  # validating is not using
                continue
            tree = ast.parse(file.read_text())
            for item in ast.walk(tree):
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load):
                    names.add(item.attr)
                elif isinstance(item, ast.Call) and getattr(item.func, "id", "") == "getattr":
                    names |= {a.value for a in item.args if isinstance(a, ast.Constant)}
    return names


def test_every_key_of_the_shipped_files_is_read_by_something():
    read = _attributes_read()
    for path in SHIPPED:
        tree = yaml.safe_load(path.read_text())
        keys = {key for value in tree.values() if isinstance(value, dict) for key in value}
        keys |= {key for key, value in tree.items() if not isinstance(value, dict)}
        keys -= set(tree.get("prompts", {}))  # templates by role, and the style of the domain's
        assert sorted(keys - read) == [], path.name


def test_every_key_of_magrpo_is_read_by_something():
    assert (
        sorted({f.name for f in dataclasses.fields(SECTIONS["magrpo"])} - _attributes_read()) == []
    )


# Published settings: epochs, learning rate for all weights, temperature, top-p, threshold, shift,
# nodes in an update (of ours: a chain has 2, a full tree 5 at least).
PUBLISHED = {
    "magrpo_he": (6, 2e-5, 0.7, 0.9, -0.2, -4, 4),
    "magrpo_che": (8, 2e-5, 0.6, 0.6, -0.2, -4, 4),
    "magrpo_mbpp": (8, 3e-5, 0.8, 0.95, -0.2, -4, 2),
    "grpo_he": (6, 2e-5, 0.8, 0.95, -0.1, -2.1, 2),
    "grpo_che": (20, 2e-5, 0.8, 0.95, -0.1, -2.1, 2),
    "grpo_mbpp": (8, 3e-5, 0.8, 0.95, -0.1, -2.1, 2),
    "mt_magrpo_he": (6, 2e-5, 0.7, 0.9, 4.0, 0, 4),
    "mt_magrpo_che": (8, 2e-5, 0.8, 0.95, 4.0, 0, 4),
    "mt_magrpo_mbpp": (8, 2e-5, 0.8, 0.95, 4.0, 0, 4),
    "mt_grpo_he": (6, 2e-5, 0.8, 0.95, 2.1, 0, 2),
    "mt_grpo_che": (8, 2e-5, 0.8, 0.95, 2.1, 0, 2),
    "mt_grpo_mbpp": (8, 2e-5, 0.8, 0.95, 2.1, 0, 2),
    **dict.fromkeys(
        ("ippo_he", "ippo_che", "mappo_he", "mappo_che"), (80, 5e-6, 0.6, 0.6, -0.2, -4, 4)
    ),
}
SPLITS = {
    "he": ("openai/openai_humaneval", "test[33:163]", "test[:32]"),
    "che": ("OpenMLRL/CoopHumanEval", "test[16:]", "test[:16]"),
    "mbpp": ("OpenMLRL/MBPP", "test[15:65]", "test[:15]"),
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_one_sampling_is_one_update(path):
    """In every shipped file whose update is on-policy; and its first words on that are true."""
    config, work, _ = resolved(path)
    section = config.online
    if not isinstance(section, MAGRPOConfig):
        return
    nodes = section.batch_size * growth(section).nodes
    assert len(like_parts(nodes, section.train_batch_size)) == 1
    note = describe(config, sampling(config, work.roles).limits(len(work.roles)))
    assert "optimizer updates" in note and "on-policy" not in note
    text = path.read_text()
    for size in re.findall(r"(?:an|is an)\s+(?:# )?update of (\d+)", text.replace("\n  #", "")):
        assert int(size) == nodes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    path = ROOT / "configs" / f"{name}_config.yaml"
    config, _ = read_config(path, algorithm_of(path))
    epochs, rate, temperature, top_p, threshold, shift, nodes = PUBLISHED[name]
    section = config.section
    assert section.num_train_epochs == epochs
    assert section.learning_rate == pytest.approx(10 * rate)  # LoRA: ten times as much
    assert f"{rate:.1e}".replace("e-0", "e-") in path.read_text()  # and the file says so
    assert (section.temperature, section.top_p, section.top_k) == (temperature, top_p, None)
    assert section.early_termination_threshold == threshold
    assert config.reward_processor.enabled == (shift != 0)
    assert config.reward_processor.shift == shift
    tree = growth(section).nodes
    assert section.batch_size * tree == max(nodes, tree)
    assert (section.num_turns, section.max_new_tokens) == (2, 256)
    assert (section.discount, section.eval_num_samples) == (0.9, 4)
    assert section.num_agents == (1 if "grpo" in name.split("_") else 2)
    if section.chains:  # published: an evaluation every 40 tasks, of which a step has two
        assert (section.num_generations, section.eval_interval, section.logging_steps) == (
            1,
            20,
            10,
        )
        assert section.value_learning_rate == section.learning_rate
        assert section.critic_model == config.agent_model.name
        centralized = (section.critic, section.granularity) == ("centralized", "turn")
        assert centralized == name.startswith("mappo")
    else:
        assert (section.num_generations, section.eval_interval) == (4, 4)
        assert section.logging_steps == 50 and not section.advantage_normalization
    data = config.dataset
    assert (data.name, data.train_split, data.eval_split) == SPLITS[name.rsplit("_", 1)[1]]
    assert config.agent_model.name == "Qwen/Qwen2.5-Coder-3B"
    assert (config.agent_model.torch_dtype, config.agent_model.max_length) == ("bfloat16", 2048)
    assert (config.external.mode, config.external.sandbox_slice) == ("level_feedback", 1)
    assert (config.seed, config.wandb.project) == (42, "comlrl")
    if name.startswith("mt_"):
        assert (section.handoff, section.turn_gradient_weights) == ("random", [1.2, 0.8])
        keys = config.external
        assert (keys.history, keys.original_prompt, keys.previous_response) == ("last", True, True)
    else:
        assert (section.handoff, section.turn_gradient_weights) == (None, None)
        assert config.external.history == "full"


def test_published_settings_of_tldr(tmp_path):
    from transformers import AutoTokenizer

    config, _ = read_config(ROOT / "configs/magrpo_tldr_config.yaml", "magrpo")
    section, data = config.section, config.dataset
    assert (config.domain, config.agent_model.name) == ("writing", "Qwen/Qwen3-1.7B")
    assert (data.name, data.train_split, data.eval_split) == (
        "trl-lib/tldr", "train[:1100]", "test[:1100]"
    )  # fmt: skip
    assert section.learning_rate == pytest.approx(10 * 5e-6)  # LoRA: ten times as much
    assert (section.num_agents, section.num_turns, section.num_generations) == (2, 1, 4)
    assert (section.num_train_epochs, section.max_new_tokens) == (2, 256)
    assert section.joint_mode == "align"
    assert (section.temperature, section.top_p, section.top_k) == (0.7, 0.9, None)
    assert (section.eval_interval, section.eval_num_samples, section.logging_steps) == (20, 4, 50)
    assert section.advantage_normalization and section.batch_size == section.train_batch_size == 1
    assert config.reward_processor.scale_factor == 1 and config.reward_processor.shift == 0
    # Agents read plain text, whatever template the model's folder has.
    own = AutoTokenizer.from_pretrained(TINY_CODER, chat_template="{{ messages }}")
    own.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    keywords = config.agent_model.tokenizer_kwargs
    assert AutoTokenizer.from_pretrained(tmp_path, **keywords).chat_template is None


@pytest.mark.parametrize("benchmark", ["he", "che", "mbpp"])
@pytest.mark.parametrize("algorithm", ["magrpo", "grpo"])
def test_the_files_of_two_turns_say_how_full_tree_and_handoff_differ(algorithm, benchmark):
    # align, G = 4, two turns: full tree 4 + 4 · 4 = 20 joint actions a task, handoff 4 + 4 = 8
    tree, handoff = f"{algorithm}_{benchmark}", f"mt_{algorithm}_{benchmark}"
    for name, own, partner, other in ((tree, 20, handoff, 8), (handoff, 8, tree, 20)):
        file = ROOT / "configs" / f"{name}_config.yaml"
        config, _ = read_config(file, algorithm)
        assert growth(config.section).joint_actions == own
        head = file.read_text().split("\nagent_model:")[0]
        assert f"{own} scored" in head and f"{other} scored" in head and partner in head


REAL = {
    *(f"{name}_che" for name in ("magrpo", "mt_magrpo", "seq_magrpo", "magrpo_program", "grpo",
                                 "ippo", "mappo", "shppo", "madpo", "marlhf")),
    "magrpo_he", "magrpo_mbpp", "magrpo_writing",
}  # fmt: skip


def test_the_real_model_has_a_file_for_every_algorithm_on_the_published_splits():
    stems = {path.stem.removeprefix("smollm2_"): path for path in SHIPPED if "smollm2" in path.stem}
    files = {name: path for name, path in stems.items() if not name.endswith("_functions")}
    assert set(files) == REAL
    for name, path in files.items():
        config, _ = read_config(path, algorithm_of(path))
        assert config.agent_model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert "agent_model.name=models/smollm2-135m-instruct" in path.read_text()
        data, kind = config.dataset, name.rsplit("_", 1)[1]
        if kind in SPLITS:
            assert (data.name, data.train_split, data.eval_split) == SPLITS[kind]
            assert re.search(r"^# dataset\.name=\w+\.jsonl$", path.read_text(), re.MULTILINE)
        assert (config.section.eval_num_samples, config.section.eval_answers) == (16, 4)
