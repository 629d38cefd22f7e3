"""Metrics of hand-made trees, the arithmetic in comments; every name is in docs/metrics.md."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comlrl.evaluation import metrics as metrics_module
from comlrl.evaluation.metrics import task_reward
from comlrl.loggers.episode_log import EpisodeLogger
from comlrl.loggers.report.run_data import Run, read_run
from comlrl.loggers.samples import sample
from comlrl.loop.records import LogMark, LogRecord
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.types import Node, Score, Tree
from tests.support.documented import documented
from tests.support.fakes import code_task
from tests.support.made_runs import TASK, agent_turn, make_run, node, tree
from tests.support.runs import ALGORITHMS, Zygote, small_of
from tests.support.tiny_trainers import build


def tree_metrics(trees):
    return metrics_module.tree_metrics(trees, CODE)


def scored(found: RewardBreakdown, value: float | None = None) -> Score:
    """The score of a breakdown; ``value``: a reward model's, in its place."""
    task_reward = None if value is None else found.total
    value = found.total if value is None else value
    return Score(value, found.parts, found.passed_all, found, task_reward=task_reward)


IMPORTANCE = tuple(f"importance/{name}" for name in ("ratio_mean", "ratio_max", "truncated_share"))


def test_mean_and_spread_of_one_turn():
    other = replace(TASK, task_id="another")
    metrics = tree_metrics([tree(node([1.0, 3.0])), tree(node([2.0, 2.0]), task=other)])
    assert metrics["reward_mean"] == metrics["turn_1/reward_mean"] == 2.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5))  # squares 1, 1, 0, 0
    assert metrics["processed_reward_mean"] == 1.0  # processed rewards are one lower
    assert (metrics["tasks"], metrics["joint_actions"], metrics["turns_mean"]) == (2, 4, 1)


def test_a_task_that_is_answered_twice_is_one_task():
    metrics = tree_metrics([tree(node([1.0])), tree(node([2.0]))])
    assert (metrics["tasks"], metrics["joint_actions"], metrics["reward_mean"]) == (1, 2, 1.5)


def test_tasks_count_alike_whatever_their_number_of_joint_actions():
    metrics = tree_metrics([tree(node([4.0])), tree(node([0.0, 0.0, 0.0]))])
    assert metrics["reward_mean"] == pytest.approx(2.0)  # (4 + 0) / 2, not 4 / 4


def test_last_turn_reached_weighs_paths_and_not_nodes():
    grown = tree(
        node([0.0, 0.0]),
        node([4.0, 4.0], turn=2, parent=0, parent_action=0, terminated=True),
        node([0.0, 0.0], turn=2, parent=0, parent_action=1),
        node([1.0, 1.0], turn=3, parent=2, parent_action=0),
        node([1.0, 3.0], turn=3, parent=2, parent_action=1),
    )
    metrics = tree_metrics([grown])
    # Half of the paths end at turn 2 with 4; the others at turn 3 with 1, 1, 1 and 3, mean 1.5.
    assert metrics["reward_mean"] == 0.5 * 4.0 + 0.5 * 1.5
    assert task_reward(grown) == metrics["reward_mean"]
    assert metrics["turns_mean"] == 0.5 * 2 + 0.5 * 3
    assert metrics["turn_2/reward_mean"] == 2.0
    assert metrics["turn_3/reward_mean"] == 1.5
    assert metrics["turn_2/termination_share"] == 0.5
    assert metrics["termination_share"] == 0.5  # of the paths


def test_handoff_chain_ends_at_its_last_node():
    chain = tree(node([0.0, 1.0, 2.0]), node([3.0, 4.0], turn=2, parent=0, parent_action=2))
    assert tree_metrics([chain])["reward_mean"] == 3.5  # unpicked siblings of turn 1 do not count


def _in_order() -> Tree:
    """aux, then main below each of its two completions; below the first the branch ends, and of
    the other's two joint actions the second is continued by a turn of one completion each."""

    def act(agent, texts, scores=(), parent=-1, action=-1, turn=1, terminated=False):
        scored = tuple(map(Score, scores))
        joint = tuple((g,) for g in range(len(texts)))
        rewards = tuple(score.value - 1.0 for score in scored)
        return Node(
            turn=turn,
            parent=parent,
            parent_action=action,
            agents_N=(agent_turn(texts),),
            joint_actions_K=joint,
            scores_K=scored,
            rewards_K=rewards,
            terminated=terminated,
            first_agent=agent,
        )

    return tree(
        act(0, ["a", "aaa"]),
        act(1, ["mm", "mm"], [4.0, 3.0], 0, 0, terminated=True),
        act(1, ["m", "mmm"], [0.0, 2.0], 0, 1),
        act(0, ["aaaaa"], (), 2, 1, turn=2),
        act(1, ["mmmm"], [3.0], 3, 0, turn=2),
    )


def test_agents_in_order():
    grown = _in_order()
    metrics = tree_metrics([grown])
    # Half of the paths ended at turn 1 with 3.5; what is continued stands for the other half.
    assert metrics["reward_mean"] == task_reward(grown) == 0.5 * 3.5 + 0.5 * 3.0
    assert metrics["turn_1/reward_mean"] == 0.5 * 3.5 + 0.5 * 1.0
    assert metrics["turn_2/reward_mean"] == 3.0
    assert (metrics["turns_mean"], metrics["joint_actions"]) == (1.5, 5)
    assert metrics["turn_1/termination_share"] == metrics["termination_share"] == 0.5
    # Of the last turns: aux's 1 and 3 letters, by the half that ended; 5 by the half that went on.
    assert metrics["agent_0/completion_length_mean"] == 0.5 * 2 + 0.5 * 5
    assert metrics["agent_1/completion_length_mean"] == 0.5 * 2 + 0.5 * 4
    assert metrics["turn_1/completion_length_mean"] == 2.0  # aux's 2, and main's 2 and 2
    assert metrics["agent_1/duplicate_share"] == 0.5 * 0.5 + 0.5 * 0.0


def test_a_turn_in_order_that_is_handed_on_ends_where_that_ends():
    """Of four joint actions, below two completions of aux, one continues: nothing else is last."""
    whole = _in_order()
    going_on = replace(whole.nodes[1], terminated=False)
    grown = replace(whole, nodes=(whole.nodes[0], going_on, *whole.nodes[2:]), handoff="random")
    metrics = tree_metrics([grown])
    assert (metrics["reward_mean"], metrics["turns_mean"]) == (3.0, 2.0)
    assert metrics["turn_1/reward_mean"] == 2.25


def test_logs_show_the_team_of_a_joint_action_in_order(tmp_path):
    grown, record = _in_order(), LogRecord(step=5, update=1, epoch=0, phase="eval", metrics={})
    line = sample(record, grown, CODE)  # the first path, which ended at once
    assert (line["completions_N"], line["roles_N"]) == (["a", "mm"], ["aux", "main"])
    assert (line["rewards_T"], line["terminated"], line["turn"]) == ([4.0], True, 1)
    logger = EpisodeLogger(tmp_path / "episodes.jsonl", CODE)
    logger.begin(LogMark())
    logger.episodes(record, [grown])
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [each["completions_N"] for each in lines] == [
        ["a", "mm"], ["a", "mm"], ["aaa", "m"], ["aaa", "mmm"], ["aaaaa", "mmmm"],
    ]  # fmt: skip
    assert [len(each["prompts_N"]) for each in lines] == [2] * 5
    assert [each["processed_reward"] for each in lines] == [3.0, 2.0, -1.0, 1.0, 2.0]


def _outcome(passed: bool, timed_out: bool = False) -> TestOutcome:
    return TestOutcome("assert candidate(1)", passed, timed_out=timed_out)


def test_breakdowns():
    good = RewardBreakdown(
        aux_defined=0.4, main_defined=0.6, syntax=0.5, tests=1.0, uses_aux=0.5, not_wrapper=1.0,
        helpers=("aux",), defined=("aux", "f"), called=("aux",),
        outcomes=(_outcome(True), _outcome(True)), seconds=2.0,
    )  # fmt: skip
    half = RewardBreakdown(
        aux_defined=0.4, main_defined=0.6, syntax=0.5, tests=0.5, uses_aux=0.5, not_wrapper=0.0,
        aux_ignored=-0.5, helpers=("aux",), defined=("aux", "f"), called=("aux",),
        ignored=("aux",), wrapper=True,
        outcomes=(_outcome(True), _outcome(False, timed_out=True)), seconds=4.0,
    )  # fmt: skip
    broken = RewardBreakdown(
        aux_defined=0.4, main_defined=0.6, helpers=("aux",), defined=("aux", "f")
    )
    empty = RewardBreakdown(helpers=("aux",))
    scores = [scored(b) for b in (good, half, broken, empty)]
    metrics = tree_metrics([tree(node(scores))])
    assert metrics["reward_mean"] == pytest.approx((4.0 + 2.0 + 1.0 + 0.0) / 4)
    expected = {
        "reward/aux_defined": 0.3, "reward/main_defined": 0.45, "reward/syntax": 0.25,
        "reward/tests": 1.5 / 4, "reward/uses_aux": 0.25, "reward/not_wrapper": 0.25,
        "reward/aux_ignored": -0.125, "pass_rate": 0.25, "test_fraction": 1.5 / 4,
        "syntax_rate": 0.5, "main_defined_rate": 0.75, "aux_defined_rate": 0.75,
        "aux_called_rate": 0.5, "aux_ignored_rate": 0.25, "wrapper_rate": 0.25,
        "timeout_rate": 0.25, "reward_seconds_mean": 1.5,
        "unsolved_reward_mean": (0.0 + 2.0 + 1.0 + 0.0) / 4,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "task_reward_mean" not in metrics
    parts = sum(value for name, value in metrics.items() if name.startswith("reward/"))
    assert parts == pytest.approx(metrics["reward_mean"])


def test_helpers_are_counted_singly():
    team = RewardBreakdown(
        helpers=("aux", "aux2"), defined=("aux", "f"), called=("aux", "aux2"), ignored=("aux2",)
    )
    metrics = tree_metrics([tree(node([scored(team, 0.0)]))])
    assert metrics["aux_defined_rate"] == 0.5
    assert (metrics["aux_called_rate"], metrics["aux_ignored_rate"]) == (1.0, 0.5)


def test_need_is_of_solved_programs():
    team = {"helpers": ("aux", "aux2")}
    solved = team | {"outcomes": (_outcome(True),)}
    whole_team = RewardBreakdown(**solved, needed=("aux", "aux2", "f"))
    main_is_lazy = RewardBreakdown(**solved, needed=("aux2",))
    main_alone = RewardBreakdown(**solved, needed=("f",))
    unsolved = RewardBreakdown(**team, needed=())
    breakdowns = (whole_team, main_is_lazy, main_alone, unsolved)
    metrics = tree_metrics([tree(node([scored(b, 0.0) for b in breakdowns]))])
    assert metrics["agent_0/needed_rate"] == pytest.approx(1 / 3)
    assert metrics["agent_1/needed_rate"] == metrics["agent_2/needed_rate"] == pytest.approx(2 / 3)
    assert metrics["teamwork_rate"] == metrics["turn_1/teamwork_rate"] == pytest.approx(1 / 4)
    nobody = tree_metrics([tree(node([scored(unsolved, 0.0)]))])
    assert nobody["teamwork_rate"] == 0.0 and "agent_0/needed_rate" not in nobody


def test_a_lone_agent_has_no_aux_metrics():
    alone = RewardBreakdown(main_defined=0.6, defined=("f",))
    metrics = tree_metrics([tree(node([scored(alone)], agents=[agent_turn(["x"])]))])
    assert not [name for name in metrics if "aux_" in name and not name.startswith("reward/")
                and not name.startswith("turn_1/reward/")]  # fmt: skip


def test_model_scores_are_separate_from_task_rewards():
    breakdown = RewardBreakdown(main_defined=0.6)
    metrics = tree_metrics([tree(node([scored(breakdown, -1.5)]))])
    assert (metrics["reward_mean"], metrics["task_reward_mean"]) == (-1.5, 0.6)


def test_completions():
    aux = agent_turn(["ab", "ab", "abcd", "ab"], finished=False)  # 2, 2, 4, 2 tokens; two repeats
    main = agent_turn(["a", "b", "c", "d"])
    metrics = tree_metrics([tree(node([0.0] * 4, agents=[aux, main]))])
    assert metrics["agent_0/completion_length_mean"] == 2.5
    assert metrics["completion_length_mean"] == (2.5 + 1.0) / 2
    assert metrics["agent_0/duplicate_share"] == 0.5
    assert metrics["duplicate_share"] == 0.25
    assert (metrics["agent_0/truncation_share"], metrics["agent_1/truncation_share"]) == (1, 0)


def test_conventions():
    task = code_task("c", "", "", "f", stages="filter_map_reduce")
    aux = agent_turn([
        "def aux(xs):\n    return [x for x in xs if x > 3]\n",
        "def aux(x):\n    return x > 3\n",
        "no code",
    ])  # fmt: skip
    main = agent_turn(["def f(xs):\n    return sum([x * 2 for x in aux(xs)])\n"] * 3)
    metrics = tree_metrics([tree(node([0.0] * 3, agents=[aux, main]), task=task)])
    conventions = {name: value for name, value in metrics.items() if name.startswith("convention")}
    assert conventions == pytest.approx({
        "convention/aux/filter": 1 / 3, "convention/aux/test": 1 / 3, "convention/aux/none": 1 / 3,
        "convention/main/filter": 1.0, "convention_match_rate": 1 / 3,
    })  # fmt: skip


class Watched:
    """A trainer on a tiny model, with the trees of its steps and what it logged of them."""

    def __init__(self, folder: Path, value, **keys) -> None:
        self.trainer = build("magrpo", folder, value, agent_model__torch_dtype="float64", **keys)
        self.trees: list[list[Tree]] = []
        self.trainer.loop.logger.episodes = lambda record, trees: self.trees.append(list(trees))
        self.trainer.train()
        self.logged = self.trainer.loop.logger.metrics()


def plain_logprobs(trainer, tree: Tree, agent: int) -> list[float]:
    """log π of each completion of the root, one row without packing."""
    turn = tree.nodes[0].agents_N[agent]
    found = []
    with trainer.team.acting(agent) as own, torch.no_grad():
        for completion in turn.completions_G:
            ids = torch.tensor([[*turn.prompt_ids, *completion.token_ids]])
            logits = own.model(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
            chosen = torch.tensor(completion.token_ids)[:, None]
            found.append(float(logits.log_softmax(-1).gather(-1, chosen).sum()))
    return found


def test_ties_count_in_entropy_and_share(tmp_path):
    """Nothing is learned from equal rewards; the policy is as open as it was."""
    run = Watched(tmp_path, lambda texts: 1.0, max_steps=1)
    (metrics,), (trees,) = run.logged, run.trees
    assert (metrics["zero_advantage_share"], metrics["advantage_std"]) == (1.0, 0.0)
    assert metrics["gradient_norm"] == metrics["loss"] == 0.0
    entropies = []
    for agent in range(2):
        logprobs = [v for tree in trees for v in plain_logprobs(run.trainer, tree, agent)]
        completions = [c for tree in trees for c in tree.nodes[0].agents_N[agent].completions_G]
        entropies.append(-sum(logprobs) / sum(len(c.token_ids) for c in completions))
        assert metrics[f"agent_{agent}/entropy"] == pytest.approx(entropies[-1], rel=1e-4)
        assert entropies[-1] > 0.5
    assert metrics["entropy"] == pytest.approx(sum(entropies) / 2, rel=1e-4)


@pytest.mark.parametrize("size", [None, 1])
def test_the_loss_is_the_mean_over_nodes_and_agents(size, tmp_path):
    """L_i = −(1/2) Σ_nodes (1/3) Σ_g Â_g log π_i, with weights that stand still: the loss of one
    update of both nodes is that of two updates of one."""
    run = Watched(
        tmp_path, lambda texts: float(len(texts[0])), max_steps=1, train_batch_size=size,
        learning_rate=1e-30,
    )  # fmt: skip
    (metrics,), (trees,) = run.logged, run.trees
    losses, squares = [], []
    for agent in range(2):
        total = 0.0
        for grown in trees:
            rewards = grown.nodes[0].rewards_K
            advantages = [r - sum(rewards) / 3 for r in rewards]
            logprobs = plain_logprobs(run.trainer, grown, agent)
            total += sum(a * p for a, p in zip(advantages, logprobs, strict=True)) / 3
            squares += [a * a for a in advantages]
        losses.append(-total / 2)
        assert metrics[f"agent_{agent}/loss"] == pytest.approx(losses[-1], rel=1e-6)
    assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    # Siblings' advantages have the mean 0: the deviation is the root of the mean square.
    assert metrics["advantage_std"] == pytest.approx(math.sqrt(sum(squares) / len(squares)))
    norms = [metrics[f"agent_{agent}/gradient_norm"] for agent in range(2)]
    assert metrics["gradient_norm"] == pytest.approx(sum(norms) / 2) and min(norms) > 0


def test_greedy_rollouts_are_environment_steps(tmp_path):
    """2 tasks, G = 3, two turns: 4 nodes of 3; greedy, 2 from the root and 1 from each child."""
    run = Watched(
        tmp_path, lambda texts: float(len(texts[0])), max_steps=1, num_turns=2, advantage="greedy"
    )  # fmt: skip
    counters = run.trainer.loop.counters
    assert counters.env_steps == 2 * (4 * 3 + 2 + 3) == run.trainer.rollout.reward.scored
    assert counters.scored_joint_actions == counters.env_steps
    in_trees = sum(node.tokens for tree in run.trees[0] for node in tree.nodes)
    assert run.logged[0]["tokens"] == counters.sampled_tokens > in_trees


def test_no_trees_no_metrics():
    assert tree_metrics([]) == {}


def test_every_name_is_documented(tmp_path):
    patterns = [row.pattern() for row in documented()]
    assert len(patterns) > 50
    run = read_run(make_run(tmp_path / "run", updates=5, turns=2))
    names = {*run.names("train"), *run.names("eval")}
    assert not [name for name in names if not any(p.fullmatch(name) for p in patterns)]


def test_names_that_depend_on_the_clock_say_so():
    fixed = tree_metrics([_timed(1.0)])
    later = tree_metrics([_timed(9.0)])
    differing = [name for name in fixed if fixed[name] != later[name]]
    assert differing and all(re.search("time|second|memory", name) for name in differing)


def _timed(seconds: float) -> Tree:
    breakdown = RewardBreakdown(outcomes=(_outcome(True),), seconds=seconds)
    return tree(node([scored(breakdown, 0.0)]), task=TASK)


@pytest.fixture(scope="module")
def real_runs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two training steps of each algorithm, as a user starts them, with every term of the loss."""
    folder = tmp_path_factory.mktemp("real")
    keys = {"max_steps": 2, "save_steps": 0, "kl_coef": 0.1}
    more = {"ppo": {"num_agents": 2}, "madpo": {"kl_coef": 0.0}, "marlhf": {"num_generations": 6}}
    processes = {}
    for algorithm in ALGORITHMS:
        items = [f"{algorithm}.{k}={v}" for k, v in (keys | more.get(algorithm, {})).items()]
        processes[algorithm] = zygote.run(
            algorithm,
            [*small_of(algorithm, folder / algorithm), *items, "output.save_final_model=false"],
        )
    for process in processes.values():
        assert process.wait(300) == 0, process.output
    return {algorithm: read_run(folder / algorithm) for algorithm in ALGORITHMS}


def _names(run: Run) -> set[str]:
    return {*run.names("train"), *run.names("eval")}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_logged_is_documented(real_runs, algorithm):
    run = real_runs[algorithm]
    known = [row.pattern() for row in documented() if row.who is None or algorithm in row.who]
    assert sorted(n for n in _names(run) if not any(p.fullmatch(n) for p in known)) == []
    assert (run.path / "report.html").stat().st_size > 10_000
    assert next(r["update"] for r in run.records if r["phase"] == "eval") == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_documented_is_logged(real_runs, algorithm):
    """Of each algorithm; agents with separate policies have theirs too."""
    names, apart = _names(real_runs[algorithm]), algorithm not in ("grpo", "shppo")
    rows = [row for row in documented() if row.who is not None and algorithm in row.who]
    assert len(rows) > 10
    for row in rows:
        for prefix in ("", "agent_0/", "agent_1/")[: 3 if row.agent and apart else 1]:
            assert prefix + row.name in names, prefix + row.name


def test_what_trees_say_is_logged(real_runs):
    """By one run or another; ``expert_fallbacks`` needs an expert (tests/test_multi_turn.py),
    ``needed_rate`` a program that passes all tests and ``reward/team`` a bonus for it
    (tests/rewards/code/test_reward_need.py), and ``importance/…`` a server
    (tests/test_vllm_runs.py); ``agent_I/reward_mean`` a reward for each agent
    (tests/trainers/test_own_rewards.py), ``agent_I/api/…`` a service
    (tests/trainers/test_api_agents.py)."""
    rare = {"expert_fallbacks", "agent_I/needed_rate", "agent_I/reward_mean", *IMPORTANCE}
    rare |= {"reward/team"}
    names = set.union(*map(_names, real_runs.values()))
    of_trees = [row for row in documented() if row.who is None and "/api/" not in row.name]
    rows = [row for row in of_trees if row.name not in rare]
    for row in rows:
        for prefix in ("", *["turn_1/"] * row.turn, *["agent_1/"] * row.agent):
            pattern = row.pattern(prefix)
            assert any(pattern.fullmatch(name) for name in names), prefix + row.name


def test_two_runs_of_one_seed_agree_but_for_the_clock(zygote, real_runs, tmp_path):
    config = real_runs["magrpo"].path / "config.yaml"
    zygote.finish(
        "magrpo",
        ["--config", str(config), "--override", f"output.dir={tmp_path / 'again'}"],
        seconds=300,
    )
    one, two = real_runs["magrpo"].records, read_run(tmp_path / "again").records
    for first, second in zip(one, two, strict=True):
        differing = [
            name for name, value in first["metrics"].items() if second["metrics"][name] != value
        ]
        assert all(re.search("time|second|memory", name) for name in differing), differing
