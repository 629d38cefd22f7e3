"""``--dry-run``: counts worked out by hand, sizes against real models, every shipped file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from comlrl.builtin import COOPMINI, TINY_CODER
from comlrl.config.algorithms import MAGRPOConfig, PPOConfig
from comlrl.config.resolved import Config
from comlrl.rewards.sandbox import levels
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.cost.dry_run import describe
from comlrl.trainers.launch.cost.tree_size import growth, scored, training_steps
from comlrl.trainers.launch.wiring.model_size import model_size
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from tests.support import tiny_models
from tests.support.runs import SHIPPED, algorithm_of, load

ROOT = Path(__file__).parents[4]


def described(config: Config) -> str:
    roles = validate(config).roles
    return describe(config, sampling(config, roles).limits(len(roles)))


def section(**keys) -> MAGRPOConfig:
    return MAGRPOConfig(**{"num_generations": 2, "num_turns": 2} | keys)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_described_without_network(path):
    text = described(load(path))
    if "program" in path.stem:  # how often its agents are called is known once it is played
        counted = ["episodes", "completions ≤"]
    else:
        counted = ["candidates" if "madpo" in path.stem else "joint actions", "generation calls"]
    for word in ("agent", *counted, "tokens", "weights", "tasks"):
        assert word in text


@pytest.mark.parametrize(
    ("keys", "nodes", "joint_actions"),
    [
        # One task, G = 2, N = 2, T = 2; half of 12, 8, 40 and 16 for two tasks.
        ({}, 3, 6),  # align: 1 + 2 nodes of 2 joint actions
        ({"handoff": "random"}, 2, 4),  # 1 + 1 nodes of 2
        ({"joint_mode": "cross"}, 5, 20),  # 1 + 4 nodes of 2² = 4
        ({"joint_mode": "cross", "handoff": "best"}, 2, 8),  # 1 + 1 nodes of 4
        ({"num_turns": 3, "num_generations": 3}, 13, 39),  # 1 + 3 + 9 nodes of 3
        ({"num_agents": 3, "joint_mode": "cross", "num_turns": 1}, 1, 8),  # 2³
        ({"num_agents": 4, "joint_mode": "counterfactual", "num_turns": 1}, 1, 10),  # 2 + 4 · 2
    ],
)
def test_growth(keys, nodes, joint_actions):
    tree = growth(section(**keys))
    assert (tree.nodes, tree.joint_actions) == (nodes, joint_actions)
    # every node: 2 (or as many as there are) agents × G completions
    each = keys.get("num_agents", 2) * keys.get("num_generations", 2)
    assert tree.completions == nodes * each


@pytest.mark.parametrize(
    ("keys", "nodes", "joint_actions", "completions", "turns"),
    [
        # G = 4, then 2 below each: 1 + 4 nodes, 8 joint actions, 4 + 8 completions.
        ({}, 5, 8, 12, 1),
        ({"num_agents": 3}, 13, 16, 28, 1),  # 1 + 4 + 8 nodes, 4 + 8 + 16 completions
        ({"num_turns": 2}, 5 + 8 * 5, 8 + 64, 12 + 8 * 12, 1 + 8),  # each of the 8 is continued
        ({"num_turns": 3, "handoff": "random"}, 15, 24, 36, 3),  # one of the 8 does
        ({"num_turns": 3, "handoff": "best", "handoff_width": 2}, 35, 56, 84, 7),  # 1 + 2 + 4 turns
        ({"num_generations_sequential": 3}, 5, 12, 16, 1),
    ],
)
def test_growth_where_agents_act_in_order(keys, nodes, joint_actions, completions, turns):
    keys = {"num_turns": 1, "num_generations": 4, "turn_order": "sequential"} | keys
    tree = growth(section(**keys))
    assert (tree.nodes, tree.joint_actions) == (nodes, joint_actions)
    assert (tree.completions, tree.turns) == (completions, turns)


def test_growth_of_a_wider_handoff():
    # G = 4, two of four are continued: 1 + 2 + 4 nodes of 4.
    tree = growth(section(num_generations=4, num_turns=3, handoff="random", handoff_width=2))
    assert (tree.nodes, tree.joint_actions) == (7, 28)


def test_greedy_rollouts_are_scored_and_counted():
    # Two turns, G = 2: 1 + 2 nodes of 2 joint actions are 6. A greedy chain from the root scores
    # 2 more, one from each of its 2 children 1 more: 6 + 4.
    keys = section(advantage="greedy")
    assert scored(keys, growth(keys)) == 10
    keys = section(advantage="greedy", joint_mode="cross", num_turns=1)
    assert scored(keys, growth(keys)) == 4 + 1
    assert scored(section(), growth(section())) == 6
    # In order, G = 2 and 2: 4 joint actions, and a greedy one from each of 1 + 2 nodes.
    keys = section(advantage="greedy", turn_order="sequential", num_turns=1)
    assert scored(keys, growth(keys)) == 4 + 3


def test_growth_of_chains():
    # PPO: G = 4 samples at turn 1, each continued alone: 1 + 4 + 4 nodes, 4 + 4 + 4 joint actions.
    tree = growth(PPOConfig(num_agents=2, num_turns=3, num_generations=4))
    assert (tree.nodes, tree.joint_actions, tree.completions) == (9, 12, 24)


def test_the_first_of_the_ends_decides():
    # 10 tasks in batches of 4: 3 steps an epoch.
    assert training_steps(section(batch_size=4, num_train_epochs=2), 10, 6) == 6
    assert training_steps(section(batch_size=4, num_train_epochs=2, max_steps=5), 10, 6) == 5
    # 13 environment steps at 6 a step: the third step passes them.
    assert training_steps(section(batch_size=4, num_train_epochs=2, max_env_steps=13), 10, 6) == 3
    assert training_steps(section(num_train_epochs=2), None, 6) is None
    assert training_steps(section(num_train_epochs=2, max_steps=7), None, 6) == 7


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("builtin:coopmini", "train[2:10]", "8"),
        ("builtin:coopmini", "train[:25%]", "96"),
        ("openai/openai_humaneval", "test[33:163]", "130"),
        ("openai/openai_humaneval", "test[16:]", "unknown"),
        ("openai/openai_humaneval", "test[5:3]", "unknown"),
    ],
)
def test_training_tasks_are_counted(capsys, name, split, expected):
    _, out, _ = dry_run(capsys, f"dataset.name={name}", f"dataset.train_split={split}")
    (line,) = [line for line in out.splitlines() if line.startswith("training tasks")]
    assert line.split()[2] == expected


def test_a_size_is_read_from_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    sizes = {
        "Qwen/Qwen2.5-Coder-3B": 3e9,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1.5e9,
        "HuggingFaceTB/SmolLM2-135M": 135e6,
        "deepseek-ai/deepseek-coder-6.7b-base": 6.7e9,
        "openai-community/gpt2": None,
        "a/b8bit": None,
    }
    for name, expected in sizes.items():
        assert model_size(name).parameters == expected


def test_sizes_agree_with_the_built_team():
    from comlrl.models.pretrained import build_team

    config = load(ROOT / "configs" / "magrpo_quickstart.yaml")
    size = model_size("builtin:tiny-coder")
    agent = build_team(config).agents[0]
    base = [p for name, p in agent.model.named_parameters() if "lora_" not in name]
    assert size.parameters == sum(p.numel() for p in base)
    assert size.adapter(config.lora) == sum(p.numel() for p in agent.parameters())
    shape = agent.model.config
    # keys and values of every layer: 2 × layers × key/value heads × width of a head
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    assert size.cache == 2 * shape.num_hidden_layers * shape.num_key_value_heads * width


def in_cache(folder: Path, name: str = "a/b") -> Path:
    """A model in the hub's cache."""
    place = folder / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("c0ffee")
    return shutil.copytree(TINY_CODER, place / "snapshots/c0ffee")


def test_a_model_in_the_hub_cache_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    in_cache(tmp_path).joinpath("model.safetensors").unlink()  # its config.json is enough
    size, same = model_size("a/b"), model_size("builtin:tiny-coder")
    assert size.parameters == same.parameters and size.linear == same.linear


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_sizes_of_other_families(kind, tmp_path):
    from comlrl.models.pretrained import build_team

    path = str(tiny_models.folder(kind))
    config = load(ROOT / "configs" / "magrpo_quickstart.yaml")
    config = replace(config, agent_model=replace(config.agent_model, name=path))
    size, agent = model_size(path), build_team(config).agents[0]
    base = [p for name, p in agent.model.named_parameters() if "lora_" not in name]
    assert size.parameters == sum(p.numel() for p in base)
    if config.lora.target_modules == "all-linear":
        assert size.adapter(config.lora) == sum(p.numel() for p in agent.parameters())


def test_the_counts_of_a_published_run(capsys):
    text = described(load(ROOT / "configs" / "magrpo_he_config.yaml"))
    numbers = {
        line.split("  ")[0]: [int(n.replace(",", "")) for n in line.split()[-2:]]
        for line in text.splitlines()
        if line.startswith(
            ("tasks", "nodes", "joint", "completions", "sampled", "optimizer", "generation calls")
        )
    }
    # 130 tasks one by one, 6 epochs: 780 steps. A tree: 1 + 4 nodes, 20 joint actions,
    # 5 × 4 × 2 completions of 256 tokens; one update of all 5 nodes.
    assert numbers["tasks"] == [1, 780]
    assert numbers["nodes ≤"] == [5, 3900]
    assert numbers["joint actions ≤"] == [20, 15600]
    assert numbers["completions ≤"] == [40, 31200]
    assert numbers["sampled tokens ≤"] == [10240, 7987200]
    assert numbers["optimizer updates ≤"] == [1, 780]
    assert numbers["generation calls"] == [2, 1560]  # both agents decode together, at two turns
    assert "not strictly on-policy" not in capsys.readouterr().err
    assert "5.6 GiB" in text  # 3e9 parameters × 2 bytes / 2³⁰ = 5.59


def test_passes_multiply_the_updates(capsys):
    items = ["magrpo.update_epochs=3", "magrpo.train_batch_size=4"]
    _, out, err = dry_run(capsys, *items, config="magrpo_he_config")
    (line,) = [line for line in out.splitlines() if line.startswith("optimizer updates")]
    assert line.split()[-2:] == ["6", "4,680"]  # 5 nodes are 2 parts; 3 passes; 780 steps
    assert "on-policy" not in err  # their ratio tells how far the policy has gone


@pytest.mark.parametrize(("dtype", "weights", "adds"), [("bfloat16", 2, 16), ("float32", 4, 12)])
def test_the_memory_of_weights_that_are_trained(dtype, weights, adds):
    """Gradients, two moments and masters in float32; float32 weights are their own masters."""
    config = load(ROOT / "configs" / "magrpo_quickstart.yaml")
    model = replace(config.agent_model, torch_dtype=dtype)
    config = replace(config, agent_model=model, lora=replace(config.lora, enabled=False))
    size = model_size(config.agent_model.name).parameters
    lines = described(config).splitlines()
    for label, each in (("weights", weights), ("training adds", adds)):
        (line,) = [line for line in lines if line.startswith(label + " ")]
        assert f" {2 * each * size / 2**20:.1f} MiB " in line  # of two agents


@pytest.mark.parametrize(
    ("keys", "expected"),
    [  # two agents' prompts of 200 tokens, and 50 new ones
        ({"eval_answers": 3}, f"{2 * 2 * (200 + 3 * 50):,} tokens at once, in evaluations"),
        (
            {"eval_answers": 3, "num_turns": 2, "num_generations": 2},
            f"{2 * 3 * 2 * (200 + 50):,} tokens at once, in",
        ),
        ({"eval_answers": 500}, f"{2 * 2 * (200 + 128 * 50):,} tokens at once, in evaluations"),
        ({"eval_answers": 3, "eval_num_samples": 1}, f"{2 * (200 + 4 * 50):,} tokens at once\n"),
        ({"eval_answers": 3, "eval_interval": 0}, f"{2 * (200 + 4 * 50):,} tokens at once\n"),
    ],
)
def test_evaluations_count_for_the_memory(keys, expected):
    """All answers read a prompt once, at later turns each its own; at most 256 at once."""
    config = load(ROOT / "configs" / "magrpo_quickstart.yaml")
    few = {"batch_size": 1, "num_generations": 4, "eval_num_samples": 2, "max_new_tokens": 50}
    magrpo = replace(config.section, **few | keys)
    model = replace(config.agent_model, max_length=250)
    text = described(replace(config, sections={"magrpo": magrpo}, agent_model=model))
    assert expected in text


def test_the_memory_of_a_reference():
    """DPO's is held beside weights that are all trained, whatever kl_coef."""
    config = load(ROOT / "configs" / "madpo_quickstart.yaml")
    config = replace(config, lora=replace(config.lora, enabled=False))
    assert config.section.dpo_reference == "round"
    assert "reference adds" not in described(config)
    start = replace(config.section, dpo_reference="start")
    assert "reference adds" in described(replace(config, sections={"madpo": start}))


def test_the_memory_of_language_model_critics():
    """3e9 parameters · 2 bytes beside the agents' own, once, whether one critic or two."""
    for name, count in (("mappo_he", "1 critic "), ("ippo_che", "2 critics ")):
        lines = described(load(ROOT / "configs" / f"{name}_config.yaml")).splitlines()
        (weights,) = [line for line in lines if line.startswith("critic model")]
        (adapters,) = [line for line in lines if line.startswith("critic adapters")]
        assert "5.6 GiB" in weights and count in adapters
    config = load(ROOT / "configs" / "mappo_quickstart.yaml")
    section = replace(config.section, critic_model="builtin:tiny-coder", critic="independent")
    text = described(replace(config, sections={"ppo": section}))
    own, critics = (
        next(
            line.split()[len(label.split())] for line in text.splitlines() if line.startswith(label)
        )
        for label in ("adapters", "critic adapters")
    )
    assert own == critics  # as many adapters of as many numbers
    # All weights: of each critic. One for all where the policy is one.
    shared = replace(section, shared_policy=True)
    full = replace(config, lora=replace(config.lora, enabled=False), sections={"ppo": shared})
    assert "1 critic with Adam" in described(full)


def dry_run(capsys, *overrides: str, config: str = "magrpo_quickstart") -> tuple[int, str, str]:
    """Exit code, what was printed, and what was refused."""
    file = ROOT / "configs" / f"{config}.yaml"
    algorithm = algorithm_of(file)
    arguments = ["--config", str(file), "--dry-run", "--override", *overrides]
    code = main(algorithm, lambda run: pytest.fail("built a trainer"), arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def not_checked(out: str) -> list[str]:
    return [line.split(":")[1].strip() for line in out.splitlines() if "not checked: " in line]


def test_all_is_at_hand_in_the_quickstart_and_no_weights_are_loaded(capsys, monkeypatch):
    import safetensors.torch
    import transformers

    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded")
    )
    monkeypatch.setattr(safetensors.torch, "load_file", lambda *a, **k: pytest.fail("loaded"))
    code, out, _ = dry_run(capsys)
    assert code == 0 and not_checked(out) == []


def solved_rows(folder: Path) -> str:
    """Four rows: solved, with a wrong solution, with one that does not compile, without one."""
    rows = []
    for number, body in enumerate(["return x + 1", "return x", "return (", None]):
        row = {
            "task_id": f"row/{number}",
            "prompt": "def f(x):\n    '''Adds one.'''\n",
            "test": "def check(candidate):\n    assert candidate(1) == 2\n",
            "entry_point": "f",
        }
        rows.append(row | ({"canonical_solution": f"    {body}\n"} if body else {}))
    file = folder / "solved.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"dataset.name={file}"


def test_solutions_of_rows_are_scored(capsys, tmp_path):
    """The rows that hold one are counted; with the flag, those that fail are named."""
    data = [solved_rows(tmp_path), "dataset.train_split=t[:3]", "dataset.eval_split=t[3:]"]
    _, out, _ = dry_run(capsys, *data)
    assert "3 of 4" in out and "--check-solutions" in out
    code, out, _ = dry_run(capsys, *data, "--check-solutions")
    assert code == 0 and "1 of 3" in out
    named = [line for line in out.splitlines() if line.startswith("cannot be won: ")]
    assert ["row/1" in named[0], "row/2" in named[1], len(named)] == [True, True, 2]
    data[-1] = data[1] = "dataset.train_split=t[3:]"
    data.append("dataset.eval_split=t[3:]")
    assert "--check-solutions" not in dry_run(capsys, *data)[1]
    file = str(ROOT / "configs" / "magrpo_quickstart.yaml")
    assert main("magrpo", pytest.fail, ["--config", file, "--check-solutions"]) == 2
    assert "--check-solutions" in capsys.readouterr().err


def test_one_process_speaks_for_all(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert dry_run(capsys, "sandbox.isolation=bubblewrap") == (0, "", "")


def test_names_of_the_hub_are_reported_as_not_checked(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    code, out, _ = dry_run(capsys, config="magrpo_he_config")
    assert code == 0 and not_checked(out) == ["dataset.name", "agent_model.name"]


def broken_rows(folder: Path) -> Path:
    """The third row asserts nothing."""
    rows = (COOPMINI["eval"]).read_text().splitlines()[:3]
    bad = json.loads(rows[2]) | {"task_id": "bad", "test": "def check(candidate):\n    pass\n"}
    file = folder / "rows.jsonl"
    file.write_text("\n".join([*rows[:2], json.dumps(bad)]) + "\n")
    return file


def test_every_row_of_local_data_is_checked(capsys, tmp_path):
    data = f"dataset.name={broken_rows(tmp_path)}"
    code, out, err = dry_run(capsys, data, "dataset.train_split=test", "dataset.eval_split=test")
    assert code == 2 and out == ""
    assert err.startswith("error: dataset.name: ") and "'bad'" in err and err.count("\n") == 1
    code, out, _ = dry_run(
        capsys, data, "dataset.train_split=test[:2]", "dataset.eval_split=test[:2]"
    )
    assert code == 0 and not_checked(out) == []
    both = ["dataset.train_split=test[:2]", "dataset.eval_split=test"]  # each split is read
    assert dry_run(capsys, data, *both)[0] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent_model.name=/no/such", "agent_model.name: '/no/such' does not exist"),
        ("agent_model.name=./no_such", "agent_model.name: './no_such' does not exist"),
        ("agent_model.name=docs", "docs' cannot be loaded"),
        (
            "agent_model.name=builtin:other",
            "did you mean `builtin:tiny-coder`?",
        ),
        ("dataset.name=/no/such", "dataset.name: '/no/such' does not exist"),
        ("dataset.name=no/such.jsonl", "dataset.name: 'no/such.jsonl' does not exist"),
        ("dataset.eval_split=nowhere", "dataset.eval_split: 'nowhere'"),
        ("output.dir=/proc/nowhere", "output.dir: '/proc/nowhere' cannot be written"),
        ("external.sandbox_slice=all", ""),
        ("external.mode=expert_edits", "DEEPSEEK_API_KEY"),
        ("magrpo.max_new_tokens=2040", "has a prompt of"),
    ],
)
def test_what_a_run_would_refuse_is_refused(capsys, monkeypatch, override, message):
    monkeypatch.delenv("DEEPSEEK_API_KEY", raising=False)
    monkeypatch.chdir(ROOT)
    more = ["agent_model.max_length=2048"] if "max_new" in override else []
    code, out, err = dry_run(capsys, override, *more)
    if not message:
        assert code == 0
        return
    assert code == 2 and out == "" and message in err
    assert err.splitlines()[-1].startswith("error: ")


def test_a_bad_split_of_the_hub_is_refused_unseen(capsys):
    code, _, err = dry_run(capsys, "dataset.train_split=test[x:3]", config="magrpo_he_config")
    assert code == 2 and "dataset.train_split: 'test[x:3]' is not a split" in err


def test_a_model_folder_needs_tokenizer_and_weights(capsys, tmp_path):
    model = shutil.copytree(TINY_CODER, tmp_path / "model")
    assert dry_run(capsys, f"agent_model.name={model}")[0] == 0
    (model / "model.safetensors").unlink()
    code, _, err = dry_run(capsys, f"agent_model.name={model}")
    assert code == 2 and "no *.safetensors" in err
    shutil.copy(TINY_CODER / "model.safetensors", model)
    (model / "config.json").write_text("{")
    assert dry_run(capsys, f"agent_model.name={model}")[0] == 2


def test_a_model_in_the_hubs_cache_is_checked(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = in_cache(tmp_path)
    code, out, _ = dry_run(capsys, "agent_model.name=a/b")
    assert code == 0 and not_checked(out) == []
    (snapshot / "model.safetensors").unlink()  # interrupted while it came
    code, out, _ = dry_run(capsys, "agent_model.name=a/b")
    assert code == 0 and not_checked(out) == ["agent_model.name"]


def test_an_isolation_that_this_machine_lacks_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(levels, "failure", lambda level: "not installed")
    code, _, err = dry_run(capsys, "sandbox.isolation=bubblewrap")
    assert code == 2 and "sandbox.isolation" in err


def test_models_that_are_to_be_split_are_checked_without_being_split(capsys):
    keys = (
        "generation.backend=vllm",
        "generation.vllm_url=http://localhost:1",
        "magrpo.top_p=null",
    )
    code, out, _ = dry_run(capsys, "distributed.strategy=fsdp", *keys)
    assert code == 0 and not_checked(out) == ["generation.vllm_url"]


@pytest.mark.parametrize(
    ("keys", "advised"),
    [  # tasks × completions × agents
        (("magrpo.batch_size=32", "magrpo.num_generations=4"), False),  # 256 rows
        (("magrpo.batch_size=33", "magrpo.num_generations=4"), True),
        (("magrpo.max_new_tokens=1024", "agent_model.max_length=2048"), False),
        (("magrpo.max_new_tokens=1025", "agent_model.max_length=2048"), True),
        (("agent_model.name=Qwen/Qwen2.5-Coder-14B",), True),
    ],
)
def test_a_server_is_advised_for_many_rows_long_answers_and_large_models(capsys, keys, advised):
    code, out, err = dry_run(capsys, "magrpo.num_agents=2", "magrpo.num_turns=1", *keys)
    assert code == 0, err
    assert ("generation.backend=vllm" in out) == advised


def test_files_of_an_earlier_run_are_looked_for(capsys):
    once = "madpo.num_iterations=1"
    code, _, err = dry_run(capsys, once, "madpo.preferences=/no/such", config="madpo_quickstart")
    assert code == 2 and "preferences: '/no/such' cannot be read" in err
    given = ("marlhf.num_iterations=1", "marlhf.reward_model=/no/such")
    code, _, err = dry_run(capsys, *given, config="marlhf_quickstart")
    assert code == 2 and "marlhf.reward_model: '/no/such' holds no" in err
