"""MAGRPO's several passes over a step's samples: ratios, updates, what is logged."""

from __future__ import annotations

import math

import pytest
import torch

from comlrl.errors import NonFiniteError
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.rows import pack
from comlrl.processes.statistics import Sums
from comlrl.types import Row
from comlrl.update.policy_update import PolicyUpdate
from tests.support.gradients import kept
from tests.support.runs import ROOT, metrics
from tests.support.tiny_trainers import build, share_of_letters


def metrics_of(trainer):
    return trainer.loop.logger.metrics()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("size", [None, 3])
def test_as_long_as_nothing_moves_every_ratio_is_exactly_one(kind, size, tmp_path):
    """The first pass, those after it and what is measured before them compute the same bits."""
    trainer = build(
        "magrpo", tmp_path, share_of_letters, kind=kind, num_agents=3, num_turns=2, max_steps=1,
        update_epochs=3, train_batch_size=size, learning_rate=1e-30,
    )  # fmt: skip
    trainer.train()
    (metrics,) = metrics_of(trainer)
    assert metrics["ratio_max"] == metrics["agent_2/ratio_max"] == 1.0
    assert metrics["approx_kl"] == metrics["clip_fraction"] == 0.0


def test_the_first_update_is_that_of_a_single_pass(tmp_path):
    weights = {}
    for passes in (1, 2):
        trainer = build(
            "magrpo", tmp_path / str(passes), share_of_letters, kl_coef=0.1, max_steps=1,
            update_epochs=passes, agent_model__torch_dtype="float64",
        )  # fmt: skip
        found = kept(trainer.optimizers[:1], steps=True)
        trainer.train()
        assert len(found[0]) == trainer.loop.counters.updates == passes
        weights[passes] = found[0][0]
    for one, other in zip(weights[1], weights[2], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-15)


def test_passes_share_a_steps_progress_and_leave_ratio_one(tmp_path):
    trainer = build(
        "magrpo", tmp_path, share_of_letters, count=4, max_steps=2, update_epochs=3,
        train_batch_size=2, learning_rate=1e-2, lr_scheduler="linear",
    )  # fmt: skip
    trainer.train()
    first, second = metrics_of(trainer)
    assert first["ratio_max"] > 1 and first["approx_kl"] > 0
    assert trainer.loop.counters.updates == 12  # 2 steps · 3 passes · 2 parts
    # The last update of a step is its sixth: 1 − 5/12, and 1 − 11/12.
    assert first["learning_rate"] == pytest.approx(1e-2 * 7 / 12)
    assert second["learning_rate"] == pytest.approx(1e-2 * 1 / 12)


def test_a_single_pass_has_no_ratio(tmp_path):
    trainer = build("magrpo", tmp_path, share_of_letters, max_steps=1, train_batch_size=1)
    trainer.train()
    assert not {"ratio_max", "clip_fraction", "approx_kl"} & metrics_of(trainer)[0].keys()


@pytest.mark.parametrize(
    ("clip_range", "loss", "gradient"), [(0.2, -0.1, [0.0, 0.0]), (0.4, -0.15, [-0.325, 0.175])]
)
def test_a_clipped_update_by_hand(clip_range, loss, gradient, tmp_path):
    """Two completions of a token, Â = ±1, G = 2, w = 1, in an update of 2 nodes; π_old = ½.

    π = 0.65 and 0.35: ρ = 1.3 and 0.7. ε = 0.2: min(1.3, 1.2) and min(−0.7, −0.8), the sum is
    0.4, and no token has a gradient. ε = 0.4: 1.3 − 0.7 = 0.6. Each over G · |nodes| = 4, negated.
    """
    trainer = build(
        "magrpo", tmp_path, share_of_letters, update_epochs=2, clip_range=clip_range,
        agent_model__torch_dtype="float64",
    )  # fmt: skip
    batch = pack([Row((1,), ((2,), (3,)), (1.0, 1.0), (7, 8))], 0)
    old = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.65, 0.35], dtype=torch.float64).log().requires_grad_()
    read = iter([ActionLogprobs(values, None, torch.empty(2, 0)) for values in (old, new)])
    agent = trainer.team.agents[0]
    policy = PolicyUpdate(trainer.section, trainer.team, agent, None, None)  # type: ignore[arg-type]
    for number, advantage in ((7, 1.0), (8, -1.0)):
        credit = torch.tensor([advantage], dtype=torch.float64)
        policy.advantage.of_completion[number] = credit
    first = trainer.loss(policy, batch, next(read), Sums())
    assert float(first.sum()) == 0.0  # −(1 − 1)
    sums = Sums()
    value = trainer.loss(policy, batch, next(read), sums).sum() / (2 * 2)
    value.backward()
    assert float(value.detach()) == pytest.approx(loss)
    assert new.grad.tolist() == pytest.approx(gradient)
    assert sums.totals["clip_fraction"] == (2 if clip_range == 0.2 else 0)
    assert sums.maxima["ratio_max"] == pytest.approx(1.3)


def test_steps_of_ties_have_no_ratio(tmp_path):
    trainer = build("magrpo", tmp_path, lambda texts: 1.0, max_steps=1, update_epochs=2)
    trainer.train()
    (metrics,) = metrics_of(trainer)
    assert math.isnan(metrics["ratio_max"]) and math.isnan(metrics["approx_kl"])
    assert metrics["zero_advantage_share"] == 1.0


def test_a_second_pass_that_is_no_number_stops_with_its_batch(tmp_path, monkeypatch):
    """And with the weights of the first: nothing is stepped on."""
    trainer = build("magrpo", tmp_path, share_of_letters, max_steps=1, update_epochs=2)
    optimizer = trainer.optimizers[1]
    made = optimizer.step

    def poison(progress):
        norm = made(progress)
        with torch.no_grad():
            optimizer.parameters[0].fill_(math.nan)
        return norm

    monkeypatch.setattr(optimizer, "step", poison)
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    assert raised.value.agent == 1 and raised.value.batch is not None
    assert [o.schedule.updates for o in trainer.optimizers] == [1, 1]


def test_a_published_configuration_with_a_team_of_three(zygote, tmp_path):
    folder = tmp_path / "run"
    run = zygote.finish("magrpo", [
        "--config", str(ROOT / "configs" / "magrpo_he_config.yaml"), "--override",
        "agent_model.name=builtin:tiny-coder", "agent_model.max_length=1024",
        "dataset.name=builtin:coopmini", "dataset.train_split=train[:1]",
        "dataset.eval_split=eval[:1]", "magrpo.num_agents=3", "magrpo.num_generations=2",
        "magrpo.max_new_tokens=16", "magrpo.max_steps=1", "magrpo.advantage=raw",
        "magrpo.update_epochs=2", "magrpo.train_batch_size=2", "magrpo.learning_rate=1e-2",
        "magrpo.eval_interval=0", "wandb.mode=disabled", f"output.dir={folder}",
    ])  # fmt: skip
    assert "on-policy" not in run.output  # the ratio sees to it
    (line,) = metrics(folder)
    # A tree of 1 + 2 nodes at 2 is 2 parts, gone over twice.
    assert line["update"] == 4 and line["step"] == 6
    assert line["metrics"]["agent_2/ratio_max"] > 1


@pytest.mark.parametrize(("warmup", "noticed"), [(0, False), (4, False), (5, True)])
def test_a_warmup_longer_than_the_run_gives_a_notice(warmup, noticed, tmp_path, capsys):
    trainer = build(
        "magrpo", tmp_path, share_of_letters, count=2, max_steps=2, update_epochs=2,
        warmup_steps=warmup,
    )  # fmt: skip
    trainer.train()
    assert trainer.loop.counters.updates == 4
    assert ("warmup_steps" in capsys.readouterr().err) == noticed
