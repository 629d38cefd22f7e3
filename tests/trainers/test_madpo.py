"""MADPO: each agent's gradient against autograd through the written formula, and learning."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from comlrl.loop.checkpoint import load_part
from comlrl.loop.steps import Step
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.preferences.candidates import (
    CandidateSet,
    JointCandidate,
    Pair,
    joint_text,
    joint_texts,
)
from comlrl.preferences.pair_batches import (
    PairBatch,
    TokenizedCompletion,
    Weighted,
    completion_ids,
    distinct_completions,
)
from comlrl.preferences.pairs import Round, TaskPairs
from comlrl.processes.statistics import Sums
from comlrl.trainers.madpo import MADPOTrainer
from comlrl.types import Completion, Message, Sampling
from tests.support import loops
from tests.support.fakes import task
from tests.support.gradients import kept
from tests.support.runs import state
from tests.support.tiny_models import EOS, VOCABULARY, config, prompt, team
from tests.support.tiny_trainers import Recorder

SAMPLING = Sampling(0.7, 16)
AGENTS = 3


def completion(text: str, finished: bool = True) -> Completion:
    return Completion(text, (*prompt(text), *([EOS] if finished else [])), finished)


def in_order(item: TaskPairs) -> TaskPairs:
    """The same where each agent has read what those before it wrote."""
    prompts_N = item.candidates.prompts_N
    made = tuple(
        replace(
            candidate,
            prompts_N=tuple(
                (*prompts_N[i], Message("user", "|".join(candidate.texts_N[:i])))
                for i in range(AGENTS)
            ),
        )
        for candidate in item.candidates.candidates_K
    )
    return replace(item, candidates=replace(item.candidates, candidates_K=made))


def task_pairs(name: str, texts: list[str], pairs: list[tuple[int, int]]) -> TaskPairs:
    """Candidates whose agents write the text backwards, doubled, …: all different."""
    made = tuple(
        JointCandidate(
            (completion(t), completion(t[::-1] + "!"), completion(t * 2, finished=False)), 0.0
        )
        for t in texts
    )
    prompts = tuple((Message("user", f"{name} for {i}"),) for i in range(AGENTS))
    found = tuple(Pair(w, r, 1.0) for w, r in pairs)
    return TaskPairs(CandidateSet(task_id=name, prompts_N=prompts, candidates_K=made), found, 0)


# The first task's winner is in two pairs; the second has one; the third takes several rows.
TASKS = [
    task_pairs("first", ["abc", "de", "fghi"], [(0, 1), (0, 2)]),
    task_pairs("second", ["xyz", "uv"], [(1, 0)]),
    task_pairs("third", [chr(97 + k) * (k + 1) for k in range(10)], [(9, k) for k in range(9)]),
]
PAIRS = [Weighted(item, pair) for item in TASKS for pair in item.pairs]


class SamplingSupport:
    """A collector that has its pairs, of one round."""

    labelled = 0

    def __init__(self, train, held_out=()):
        self.found = Round(0, (*train, *held_out), tuple(train), tuple(held_out))

    def round(self, index):
        return self.found

    def replayed(self, index):
        return []


def trainer(folder: Path, agents, *, train=TASKS, held_out=(), evaluate=None, **keys):
    section = config("madpo", num_agents=AGENTS, max_steps=None, **keys).section
    section = replace(section, num_train_epochs=keys.get("num_train_epochs", 1))
    tasks = [task(t.task_id) for t in train]
    loop = loops.loop(section, tasks, folder, Recorder(), evaluate=evaluate)
    made = MADPOTrainer(section, agents, loop, SAMPLING, SamplingSupport(train, held_out))
    made.begin_round(0)
    return made


def plain_logprob(agent, item: TaskPairs, candidate: int) -> torch.Tensor:
    """log π of one completion, one row without packing, with its graph."""
    ids = item.candidates.candidates_K[candidate].completions_N[agent.index].token_ids
    start = agent.encode(item.candidates.read_by(agent.index, candidate))
    logits = agent.model(torch.tensor([[*start, *ids]])).logits[0] / SAMPLING.temperature
    logprob = logits.log_softmax(-1)[len(start) - 1 : -1]
    return logprob.gather(1, torch.tensor(ids)[:, None]).sum()


def plain_delta(agents, index: int, item: TaskPairs, pair: Pair, reference: bool) -> torch.Tensor:
    with agents.acting(index) as agent:
        delta = plain_logprob(agent, item, pair.winner) - plain_logprob(agent, item, pair.loser)
    if not reference:
        return delta
    with torch.no_grad(), agents.reference(index) as frozen:
        first = plain_logprob(frozen, item, pair.winner) - plain_logprob(frozen, item, pair.loser)
    return delta - first


def written_gradient(agents, index: int, pairs, beta, smoothing, reference) -> list[torch.Tensor]:
    """∇ of L_i = −(1/P) Σ [(1 − s) log σ(z) + s log σ(−z)], z = β (Δ_i + Σ sg(Δ_j))."""
    others = [
        sum(
            plain_delta(agents, j, each.task, each.pair, reference).detach()
            for j in range(AGENTS)
            if j != index
        )
        for each in pairs
    ]
    loss = torch.zeros((), dtype=torch.float64)
    for each, rest in zip(pairs, others, strict=True):
        z = beta * (plain_delta(agents, index, each.task, each.pair, reference) + rest)
        smoothed = (1 - smoothing) * F.logsigmoid(z) + smoothing * F.logsigmoid(-z)
        loss = loss - each.weight * smoothed
    whole = sum(each.weight for each in pairs)
    return list(torch.autograd.grad(loss / whole, agents.agents[index].parameters()))


def update_gradients(made: MADPOTrainer, pairs=PAIRS) -> dict[int, list[torch.Tensor | None]]:
    """What each agent's optimizer is given; no step is made."""
    found = kept(made.optimizers.values())
    made._update(pairs, Sums(), 0.0)
    return {index: own for index, (own,) in found.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen2", {}),
        ("qwen2", {"dpo_reference": "start", "label_smoothing": 0.1, "dpo_beta": 0.7}),
        ("mistral", {"dpo_reference": "start"}),  # rows of one completion each
        ("gpt2", {"lora__enabled": False, "dpo_reference": "start"}),
        ("qwen2", {"turn_order": "sequential", "dpo_reference": "start"}),
    ],
)
def test_gradients_are_those_of_the_written_formula(tmp_path, monkeypatch, kind, keys):
    monkeypatch.setattr("comlrl.preferences.pair_batches.ROW_TOKENS", 40)
    full = not keys.get("lora__enabled", True)
    own = {k: v for k, v in keys.items() if "__" in k}
    agents = team(kind, num_agents=AGENTS, reference=full, **own)
    if full:  # as after some training: policies that differ from their frozen copies
        generator = torch.Generator().manual_seed(2)
        for agent in agents.agents:
            for p in agent.parameters():
                p.data += 0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    tasks = [in_order(item) for item in TASKS] if "turn_order" in keys else TASKS
    pairs = [Weighted(item, pair) for item in tasks for pair in item.pairs]
    made = trainer(
        tmp_path, agents, train=tasks, **{k: v for k, v in keys.items() if "__" not in k}
    )
    found = update_gradients(made, pairs)
    section = made.section
    for index in range(AGENTS):
        expected = written_gradient(
            agents,
            index,
            pairs,
            section.dpo_beta,
            section.label_smoothing,
            section.dpo_reference == "start",
        )
        assert max(float(g.abs().max()) for g in expected) > 1e-4
        for one, other in zip(found[index], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_another_agent_counts_by_its_value_and_not_by_its_graph(tmp_path):
    """With one pair, ∇L_i = −β σ(−z) ∇Δ_i: agent j's weights change the factor alone."""
    agents = team("qwen2", num_agents=AGENTS)
    pair = [PAIRS[0]]
    for other in (1, 2):
        agents.agents[other].trained = False
    made = trainer(tmp_path, agents, dpo_beta=0.5)
    deltas = [
        float(plain_delta(agents, i, PAIRS[0].task, PAIRS[0].pair, False).detach())
        for i in range(AGENTS)
    ]
    first = update_gradients(made, pair)
    assert list(first) == [0]
    for other in (1, 2):  # nothing flows to the others
        assert all(p.grad is None for p in agents.agents[other].named().values())
    generator = torch.Generator().manual_seed(3)
    for p in agents.agents[1].named().values():
        p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    moved = float(plain_delta(agents, 1, PAIRS[0].task, PAIRS[0].pair, False).detach())
    assert abs(moved - deltas[1]) > 0.1
    second = update_gradients(made, pair)

    def factor(total: float) -> float:  # σ(−z)
        return 1 / (1 + math.exp(0.5 * total))

    ratio = factor(deltas[0] + moved + deltas[2]) / factor(sum(deltas))
    for one, other in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(other, one * ratio, rtol=1e-5, atol=1e-10)


def test_a_candidate_is_read_once_however_many_pairs_it_is_in():
    batch = PairBatch.from_pairs(PAIRS)
    assert len(batch.candidates_C) == 3 + 2 + 10
    assert (batch.winner_P[:2], batch.loser_P[:2]) == ([0, 0], [1, 2])
    # ∂(2 (v0 − v1) + 3 (v0 − v2)) / ∂v = 5, −2, −3.
    weights = torch.tensor([2.0, 3.0, *[0.0] * 10])
    assert batch.coefficients(weights)[:3].tolist() == [5.0, -2.0, -3.0]


def test_steps_count_pairs_updates_and_margins(tmp_path):
    """Two tasks a step and two pairs an update: 3 pairs in 2 updates (2 + 1), then 9 in 5."""
    agents = team("qwen2", num_agents=AGENTS)
    made = trainer(tmp_path, agents, batch_size=2, train_batch_size=2, logging_steps=1)
    expected = [
        [
            float(plain_delta(agents, i, PAIRS[p].task, PAIRS[p].pair, False).detach())
            for i in range(AGENTS)
        ]
        for p in (0, 2)  # interleaved: the first update has the first pair of each task
    ]
    for optimizer in made.optimizers.values():
        optimizer.peak = 0.0
    made.train()
    lines, counters = made.loop.logger.records, made.loop.counters
    assert [line.step for line in lines] == [2 * 3, 2 * 12]
    assert [line.update for line in lines] == [2, 2 + 5]
    assert counters.scored_joint_actions == 0  # the collection counts them
    third = [
        float(plain_delta(agents, i, PAIRS[1].task, PAIRS[1].pair, False).detach())
        for i in range(AGENTS)
    ]
    joint = [sum(each) for each in (*expected, third)]
    metrics = lines[0].metrics
    assert metrics["dpo/margin"] == pytest.approx(0.1 * sum(joint) / 3, rel=1e-6)
    assert metrics["dpo/accuracy"] == pytest.approx(sum(d > 0 for d in joint) / 3)
    loss = sum(math.log1p(math.exp(-0.1 * d)) for d in joint) / 3
    assert metrics["dpo/loss"] == metrics["loss"] == pytest.approx(loss, rel=1e-6)
    first = [each[0] for each in (*expected, third)]
    assert metrics["agent_0/dpo/margin"] == pytest.approx(0.1 * sum(first) / 3, rel=1e-6)
    assert metrics["preferences/pairs"] == 3


def test_parts_are_of_like_size_and_the_schedule_comes_to_its_end(tmp_path):
    """Steps of 3 and of 9 pairs at 8: one update of 3, then 5 and 4 rather than 8 and 1."""
    agents = team("qwen2", num_agents=AGENTS)
    made = trainer(tmp_path, agents, batch_size=2, train_batch_size=8, lr_scheduler="linear")
    sizes, rates, update = [], [], made._update

    def watched(pairs, sums, progress):
        norms = update(pairs, sums, progress)
        sizes.append(len(pairs))
        rates.append([o.learning_rate / o.peak for o in made.optimizers.values()])
        return norms

    made._update = watched
    made.train()
    assert sizes == [3, 5, 4]
    assert rates == [[1.0] * AGENTS, [0.5] * AGENTS, [0.25] * AGENTS]


def test_the_other_x_axis_counts_candidates(tmp_path):
    """All 15 of the round in its first step: they were scored before it."""
    made = trainer(
        tmp_path, team("qwen2", num_agents=AGENTS), batch_size=2, use_environment_step=False
    )
    made.train()
    assert [line.step for line in made.loop.logger.records] == [15, 15]


class Rounds(SamplingSupport):
    """Rounds of the same candidates."""

    def round(self, index):
        return replace(self.found, index=index)


def test_candidates_that_were_read_from_a_file_are_not_scored_by_the_run(tmp_path):
    keys = {"use_environment_step": False, "preferences": "another run"}
    made = trainer(tmp_path, team("qwen2", num_agents=AGENTS), batch_size=2, **keys)
    made.train()
    assert {line.step for line in made.loop.logger.records} == {0}


@pytest.mark.parametrize(
    ("max_env_steps", "steps"), [(None, [15, 15, 15, 30, 30, 30]), (20, [15, 15, 15, 30])]
)
def test_every_round_s_candidates_count(tmp_path, max_env_steps, steps):
    """Two rounds of three steps, which are a pass and a half; they can end the run."""
    agents = team("qwen2", num_agents=AGENTS)
    keys = {"use_environment_step": False, "batch_size": 2, "num_iterations": 2, "round_tasks": 3}
    section = config("madpo", num_agents=AGENTS, **keys).section
    section = replace(section, num_train_epochs=None, max_steps=6, max_env_steps=max_env_steps)
    tasks = [task(item.task_id) for item in TASKS]
    schedule = TaskSchedule(tasks, 2, None, 0, rounds=2, round_tasks=3, max_steps=6)
    loop = loops.loop(section, tasks, tmp_path, Recorder(), schedule=schedule)
    MADPOTrainer(section, agents, loop, SAMPLING, Rounds(TASKS)).train()
    assert [line.step for line in loop.logger.records] == steps


def test_tasks_without_pairs_teach_nothing(tmp_path):
    made = trainer(tmp_path, team("qwen2", num_agents=AGENTS), train=TASKS[:1], batch_size=1)
    before = state(made.team)["agent_0"]
    made.step(Step(1, 0, [task("held out")]))
    assert made.loop.counters.env_steps == made.loop.counters.updates == 0
    metrics = made.loop.logger.metrics()[-1]
    assert metrics["preferences/pairs"] == 0 and "gradient_norm" not in metrics
    after = state(made.team)["agent_0"]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_completions_of_another_tokenizer_are_written_in_ones_own():
    agent = team("qwen2").agents[0]
    own = completion("ab")
    assert completion_ids(agent, own) == own.token_ids
    for ids in ((), (1, 2), (5000,)):
        given = Completion("ab", ids, True)
        assert completion_ids(agent, given) == (*prompt("ab"), agent.stop_ids[0])
    assert completion_ids(agent, Completion("ab", (), False)) == prompt("ab")
    begun = replace(own, text="def f(" + own.text)
    assert completion_ids(agent, begun, "def f(") == own.token_ids
    stopped = replace(completion("ab```"), text="ab")  # by a text, which its tokens hold
    assert completion_ids(agent, stopped) == stopped.token_ids
    padding = (*own.token_ids[:1], VOCABULARY - 1, *own.token_ids[1:])  # of no token's text
    assert completion_ids(agent, replace(own, token_ids=padding)) == padding


@pytest.mark.parametrize("token_ids", [(VOCABULARY - 1, 300), (), (EOS,)])
def test_what_this_run_sampled_is_trained_as_it_was_sampled(token_ids):
    agent, asked = team("qwen2").agents[0], (Message("user", "abc"),)
    candidates = (JointCandidate((Completion("text", token_ids, True),), 0.0),)
    made = CandidateSet(task_id="t", prompts_N=(asked,), candidates_K=candidates)
    found, _ = distinct_completions(agent, [(made, 0)], sampled_here=True)
    assert found[0].ids == token_ids


def test_completions_follow_the_prefill_that_they_were_given():
    """Of two candidates, the second was written without one: it answers the prompt before it."""
    agent, asked = team("qwen2").agents[0], Message("user", "abc")
    begun = (asked, Message("assistant", "f("))
    with_it = replace(completion("ab"), text="f(ab")
    candidates = tuple(JointCandidate((each,), 0.0) for each in (with_it, completion("cd")))
    made = CandidateSet(task_id="t", prompts_N=(begun,), candidates_K=candidates)
    found, owner = distinct_completions(agent, [(made, 0), (made, 1)])
    assert owner == [0, 1]
    assert found[0].prompt_ids == tuple(agent.encode(begun))
    assert found[0].ids == completion("ab").token_ids
    assert found[1] == TokenizedCompletion(
        tuple(agent.encode((asked,))), completion("cd").token_ids
    )
    assert joint_texts(made) == [joint_text(["abc"], ["f(ab"]), joint_text(["abc"], ["cd"])]


def test_agents_learn_the_preference_and_it_holds_on_held_out_pairs(tmp_path):
    """Winners end in 'o', losers in 'x', and only together: held-out words follow suit."""

    def item(word: str) -> TaskPairs:
        texts = [word + "o", word + "x"]
        made = tuple(
            JointCandidate(tuple(completion(t) for _ in range(AGENTS)), float(t[-1] == "o"))
            for t in texts
        )
        prompts = tuple((Message("user", "say"),) for _ in range(AGENTS))
        return TaskPairs(
            CandidateSet(task_id=word, prompts_N=prompts, candidates_K=made), (Pair(0, 1, 1.0),), 0
        )

    words = [a + b for a in "abcd" for b in "efgh"]
    made = trainer(
        tmp_path,
        team("qwen2", dtype="float32", num_agents=AGENTS),
        train=[item(w) for w in words[:12]],
        held_out=[item(w) for w in words[12:]],
        evaluate=lambda: ([], {}),
        batch_size=12,
        learning_rate=1e-2,
        num_train_epochs=30,
        eval_interval=30,
        dpo_reference="start",
    )
    made.train()
    lines = made.loop.logger.records
    first, last = [line.metrics for line in lines if line.phase == "eval"]
    assert last["dpo/accuracy"] == 1.0
    assert last["dpo/loss"] < first["dpo/loss"] - 0.2
    assert all(last[f"agent_{i}/dpo/margin"] > 0 for i in range(AGENTS))
    train = [line.metrics["dpo/loss"] for line in lines if line.phase == "train"]
    assert train[-1] < train[0] - 0.2


@pytest.mark.parametrize("before", [0, 2])
def test_a_checkpoint_holds_all_that_goes_on(tmp_path, before):
    """Some steps, saved and loaded into a fresh trainer, then one more: as all in one."""
    whole = trainer(tmp_path / "a", team("qwen2", num_agents=AGENTS), batch_size=1)
    steps = [Step(n + 1, 0, [task(item.task_id)]) for n, item in enumerate(TASKS)]
    for step in steps[:before]:
        whole.step(step)
    saved = state(whole)
    whole.step(steps[before])
    losses = [line["dpo/loss"] for line in whole.loop.logger.metrics()]
    again = trainer(tmp_path / "b", team("qwen2", num_agents=AGENTS), batch_size=1)
    for name, part in again.parts().items():
        load_part(part, saved[name])
    again.begin_round(0)
    again.step(steps[before])
    assert again.loop.logger.metrics()[-1]["dpo/loss"] == losses[-1]
    expected, found = state(whole), state(again)
    assert expected.keys() == found.keys()
    for name, part in expected.items():
        for key, value in part.items():
            assert torch.equal(value, found[name][key]), (name, key)
