"""What is grown beforehand: for which steps, when, by which policy, and with which weights."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comlrl.errors import UserError
from comlrl.loop.checkpoint import load_part, tensors_of
from comlrl.loop.interrupts import Interrupted
from comlrl.loop.progress import Progress
from comlrl.loop.steps import Step
from comlrl.models.team import Team
from comlrl.rollout.generation import Generator
from comlrl.rollout.overlap import OverlappedRollout
from comlrl.trainers.launch.wiring import vllm
from comlrl.trainers.launch.wiring.assembly import build_evaluations
from comlrl.types import Completion, Tree
from comlrl.update.importance import ImportanceWeightedSampler
from tests.support.tiny_models import config
from tests.support.tiny_trainers import build, share_of_letters


class Overlapped:
    """A trainer whose next trees are grown beforehand, by the generator with copies of the weights
    of then; notes after how many updates, with which weights and for which step that begins."""

    def __init__(self, algorithm: str, folder: Path, **keys: Any) -> None:
        self.begun: list[tuple[int, tuple]] = []
        self.held: list[int] = []  # updates before each ``hold``
        made = partial(build, algorithm, value=share_of_letters, count=5, batch_size=2, **keys)
        self.trainer, self.other = made(folder), lambda: made(folder).team
        rollout, self.team = self.trainer.rollout, self.trainer.team
        weigh = ImportanceWeightedSampler(self.team, rollout.sampler, 1e9).weigh
        self.ahead = OverlappedRollout(rollout, self, rollout.transition, weigh)
        self.trainer.rollout, self.trainer.loop.prefetch = self.ahead, self._begin
        self._prefetch = vllm.prefetch(self.ahead)

    def _begin(self, step: Step | None) -> None:
        if step is not None:
            self.begun.append((self.trainer.loop.counters.updates, step.key))
        self._prefetch(step)

    def hold(self) -> Generator:
        self.held.append(self.trainer.loop.counters.updates)
        return self.generator(self.copy())

    def generator(self, team: Team) -> Generator:
        return Generator(team, max_length=self.ahead.sampler.max_length)

    def copy(self) -> Team:
        """The agents as they are."""
        team = self.other()
        for name, part in team.parts().items():
            tensors = tensors_of(self.team.parts()[name])
            load_part(part, {key: tensor.clone() for key, tensor in tensors.items()})
        return team

    def release(self) -> None:
        return

    def leave(self) -> None:
        return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("magrpo", {"turn_order": "sequential", "num_turns": 2, "num_generations": 2}),
        ("magrpo", {"advantage": "greedy", "num_agents": 3}),
        ("magrpo", {"num_turns": 3, "handoff": "best"}),
        ("ppo", {"num_agents": 2, "num_turns": 2, "shared_policy": True}),
    ],
)
def test_a_step_s_trees_are_those_of_the_policy_before_the_update_before_it(
    algorithm, keys, tmp_path
):
    """Of all turns, and greedy baselines; weighed by the policy after it, written out: as if each
    step had been grown at once and weighed one update later."""
    run, grown = Overlapped(algorithm, tmp_path / "a", max_steps=3, **keys), []
    gather = run.trainer.loop.gather

    def note(step: Step, trees: Sequence[Tree]) -> Any:
        grown.append((run.copy(), trees))
        return gather(step, trees)

    run.trainer.loop.gather = note
    run.trainer.train()
    a_step = run.trainer.loop.counters.updates // 3
    assert run.begun == [(n * a_step, ("train", n + 2)) for n in range(2)]
    assert run.held == [0, a_step]
    section, sampling = run.trainer.section, run.trainer.sampling
    for n, (team, trees) in enumerate(grown):
        policy = grown[max(0, n - 1)][0]  # of the step before
        rollout = run.ahead.present.by(run.generator(policy))
        asked = [tree.task for tree in trees], section.shape, sampling, ("train", n + 1)
        wanted = rollout.grow(*asked, section.discount if section.samples_greedily else None)
        assert [tree.greedy_SN for tree in trees] == [tree.greedy_SN for tree in wanted]
        assert list(map(written, trees)) == list(map(written, wanted))
        ratios = [
            (c.importance, ratio(team, i, turn.prompt_ids, c, sampling.for_agent(i).temperature))
            for tree in trees
            for node in tree.nodes
            for i, turn in zip(node.acting, node.agents_N, strict=True)
            for c in turn.completions_G
        ]
        for found, own in ratios:
            assert found == pytest.approx(own if n else 1, rel=1e-3)
        assert (max(abs(found - 1) for found, _ in ratios) > 1e-3) == (n > 0)


def written(tree: Tree) -> list[Any]:
    """All but the log-probabilities, which are rounded differently in another batch."""
    return [
        (node.turn, node.parent, node.parent_action, node.joint_actions_K, node.rewards_K,
         [(t.prompt_ids, [c.token_ids for c in t.completions_G]) for t in node.agents_N])
        for node in tree.nodes
    ]  # fmt: skip


def ratio(
    team: Team, index: int, prompt_ids: Any, completion: Completion, temperature: float
) -> float:
    """π(completion) / what it was drawn with, written out."""
    ids = completion.token_ids
    with team.acting(index) as agent, torch.no_grad():
        logits = agent.model(torch.tensor([[*prompt_ids, *ids]])).logits[0]
    chosen = (logits[-len(ids) - 1 : -1] / temperature).log_softmax(-1)
    return math.exp(chosen.gather(-1, torch.tensor(ids)[:, None]).sum() - completion.logprob)


def test_a_step_after_a_checkpoint_is_not_grown_beforehand(tmp_path):
    """So that a run that was killed and one that was not grow it alike."""
    run = Overlapped("magrpo", tmp_path, max_steps=7, save_steps=3)
    run.trainer.train()
    assert [key[1] for _, key in run.begun] == [2, 3, 5, 6]


def test_an_error_in_the_thread_is_raised_by_whoever_needs_the_trees(tmp_path):
    """By the next step, or by an evaluation, which waits for the growth."""
    run = Overlapped("magrpo", tmp_path, max_steps=4)
    score, calls = run.ahead.present.reward.score, itertools.count()

    def failing(actions: Any) -> Any:
        if next(calls) == 1:
            raise UserError("no such luck")
        return score(actions)

    run.ahead.present.reward.score = failing
    with pytest.raises(UserError, match="no such luck"):
        run.trainer.train()
    assert run.trainer.loop.counters.steps == 1
    run.ahead.begin(run.trainer.loop.tasks[:1], ("train", 2))
    run.ahead.wait()


@pytest.mark.parametrize("other", ["temperature", "shape", "tasks"])
def test_what_is_asked_for_otherwise_than_it_was_begun_is_grown_anew(other, tmp_path):
    run = Overlapped("magrpo", tmp_path)
    tasks, section = run.trainer.loop.tasks, run.trainer.section
    given = {"tasks": tasks[:2], "shape": section.shape, "sampling": run.trainer.sampling}
    run.ahead.grow(**given, key=("train", 1))
    changed = {
        "temperature": {"sampling": replace(given["sampling"], temperature=0.5)},
        "shape": {"shape": replace(section.shape, num_generations=2)},
        "tasks": {"tasks": tasks[2:4]},
    }[other]
    weighed, weigh = [], run.ahead.weigh
    run.ahead.weigh = lambda *asked: weighed.append(None) or weigh(*asked)
    for asked, times in ((given, 1), (given | changed, 1)):
        run.ahead.begin(given["tasks"], ("train", 2))
        trees = run.ahead.grow(**asked, key=("train", 2))
        alone = run.ahead.present.by(run.ahead.sampler).grow(**asked, key=("train", 2))
        assert [t.task for t in trees] == [t.task for t in alone]
        assert list(map(written, trees)) == list(map(written, alone))
        assert len(weighed) == times


def test_an_evaluation_waits_for_the_growth(tmp_path):
    trainer, order = build("magrpo", tmp_path, share_of_letters), []
    sample = trainer.rollout.sampler.sample
    trainer.rollout.sampler.sample = lambda *asked: order.append("sample") or sample(*asked)
    evaluations = build_evaluations(
        config().section, trainer.rollout, trainer.loop.tasks, trainer.sampling,
        trainer.rollout.sampler, Progress(), None,
        SimpleNamespace(wait=lambda: order.append("wait")),
    )  # fmt: skip
    evaluations.evaluate()
    assert order[:2] == ["wait", "sample"] and "wait" not in order[1:]


def test_nothing_is_asked_ahead_where_environment_steps_end_the_run(tmp_path):
    """6 joint actions a step, 3 each of two tasks; 12 end the run."""
    run = Overlapped("magrpo", tmp_path, max_steps=9, max_env_steps=12)
    run.trainer.train()
    assert run.trainer.loop.counters.steps == 2 and len(run.begun) == 1


def test_nothing_is_asked_ahead_where_a_signal_will_end_the_run(tmp_path):
    run = Overlapped("magrpo", tmp_path, max_steps=9)
    run.trainer.loop.signals.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        run.trainer.train()
    assert run.trainer.loop.counters.steps == 1 and not run.begun


def test_checkpoints_after_each_step_leave_nothing_to_overlap():
    given = {"generation__backend": "vllm", "generation__vllm_url": "http://localhost:8000"}
    with pytest.raises(UserError, match=r"overlap: 1 with magrpo\.save_steps=1: .*; set save_ste"):
        vllm.refuse(config(**given, generation__overlap=1, save_steps=1))


def test_a_command_s_placeholders_are_filled_in():
    """Braces of other kinds are the command's."""
    values = {"model": "a b", "port": "80", "device": ""}
    command = "X={device} serve {model} --port {port} --c '{\"a\": 1}' ${HOME} {}"
    filled = "X='' serve 'a b' --port 80 --c '{\"a\": 1}' ${HOME} {}"
    assert vllm._filled(command, values) == filled


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"vllm_command": "vllm serve {model}"}, "vllm_command"),
        ({"vllm_command": "vllm serve --port {prot}"}, "vllm_command"),
        ({"vllm_command": "v {port}", "vllm_url": "http://localhost"}, "vllm_url"),
        ({"vllm_url": None}, "vllm_url"),
        *(({"vllm_url": f"http://{host}"}, "vllm_url") for host in ("a:abc", "a:80000", "[::1")),
    ],
)
def test_what_cannot_be_started_is_refused(keys, key):
    given = {f"generation__{name}": value for name, value in keys.items()}
    with pytest.raises(UserError, match=rf"^generation\.{key}: "):
        made = config(generation__backend="vllm", **given)
        vllm.check_addresses(made.generation, made.model_names, ("aux", "main"))
