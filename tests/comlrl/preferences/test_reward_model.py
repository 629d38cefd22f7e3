"""The joint reward model: fit, measure, save, load, and the texts that it cannot hold."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from comlrl.preferences.candidates import (
    CandidateSet,
    JointCandidate,
    PreferenceError,
    joint_text,
)
from comlrl.preferences.pairs import Pair, Round, TaskPairs
from comlrl.preferences.reward_model import Facts, ModelReward, RewardModel, load
from comlrl.preferences.reward_training import Fit, RewardBase, TextPair, train
from comlrl.preferences.text_states import last_states, shared_rows
from comlrl.types import Completion, JointAction, Message, Reward, Score
from tests.support.fakes import PROMPTS, task
from tests.support.tiny_models import EOS, folder

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
GAP = 1.5
FIT = Fit(learning_rate=1e-2, epochs=3, batch_size=16, max_length=64, seed=5)


def words(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(count)]


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Winners end in 'o', losers in 'x'."""
    return [(word + "o", word + "x") for word in words(count, seed)]


def held_out(count: int) -> list[TaskPairs]:
    """The same rule as candidates: the joint text is "p", the response and a line's end."""
    return [
        TaskPairs(
            CandidateSet(
                task_id=str(n),
                prompts_N=((Message("user", "p"),),),
                candidates_K=tuple(JointCandidate((Completion(t, (), True),), 0.0) for t in texts),
            ),
            (Pair(0, 1, 1.0),),
            0,
        )
        for n, texts in enumerate(pairs(count, seed=99))
    ]


def fitted(tmp_path: Path, given=None, *, fit: Fit = FIT, lines=None, **base) -> RewardModel:
    keys = {"lora": LORA} | base
    return train(
        RewardBase(name=str(folder("qwen2")), **keys),
        fit,
        [TextPair(f"p\n{w}\n", f"p\n{r}\n", GAP) for w, r in given or pairs(128)],
        work_dir=tmp_path / "work",
        say=(lines if lines is not None else []).append,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> RewardModel:
    made = fitted(tmp_path_factory.mktemp("fit"))
    made.measure(labelled(held_out(24), held_out(24)))
    return made


def test_it_learns_and_holds_on_pairs_that_it_never_saw(model):
    assert model.facts.accuracy > 0.95 and model.fast is not None
    assert (model.facts.pairs, model.facts.held_out_pairs, model.facts.too_long) == (128, 24, 0)
    assert not any(p.requires_grad for p in model.model.parameters())


def plain_score(model: RewardModel, text: str) -> float:
    """One text alone, no padding."""
    ids = [*model.tokenizer(text)["input_ids"], EOS]
    with torch.no_grad():
        return float(model.model(torch.tensor([ids])).logits[0, 0])


def labelled(tasks, held_out) -> Round:
    return Round(0, tuple(tasks), (), tuple(held_out))


def test_statistics_are_of_all_candidates_accuracy_of_the_held_out_ones(model):
    """Those of a task whose candidates tie, and which therefore is in neither part, too."""
    whole, tasks = replace(model.facts), held_out(24)
    tied = replace(tasks[0], pairs=(), ties=1)
    model.measure(labelled([tied, *tasks[1:]], tasks[1:17]))
    assert model.facts.held_out_pairs == 16
    assert model.facts.mean == pytest.approx(whole.mean, abs=1e-5)
    assert model.facts.std == pytest.approx(whole.std, rel=1e-5)
    model.measure(labelled(tasks, []))
    assert (model.facts.accuracy, model.facts.loss, model.facts.held_out_pairs) == (None, None, 0)
    model.measure(labelled(tasks, tasks))
    assert model.facts == whole


def test_the_share_of_pairs_that_are_ordered_rightly(model):
    tasks = held_out(8)
    turned = [replace(item, pairs=(Pair(1, 0, -1.0),)) for item in tasks[:2]]
    assert model.order(tasks) == 1.0 and model.order([*turned, *tasks[2:]]) == 6 / 8
    assert model.order([replace(tasks[0], pairs=())]) is None


def test_statistics_and_accuracy_by_a_plain_pass(model):
    chosen, rejected = [], []
    for item in held_out(24):
        texts = [c.texts_N[0] for c in item.candidates.candidates_K]
        chosen.append(plain_score(model, f"p\n{texts[0]}\n"))
        rejected.append(plain_score(model, f"p\n{texts[1]}\n"))
    every = chosen + rejected
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in every) / len(every))
    facts = model.facts
    assert facts.mean == pytest.approx(mean, abs=1e-4)
    assert facts.std == pytest.approx(deviation, rel=1e-4)
    right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert facts.accuracy == pytest.approx(right / 24)
    loss = sum(math.log1p(math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)) / 24
    assert facts.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    text = "p\nabco\n"
    assert model.scores([text])[0] == pytest.approx(
        (plain_score(model, text) - mean) / deviation, abs=1e-4
    )


def test_batches_and_duplicates_change_nothing(model, monkeypatch):
    texts = [f"p\n{w}\n" for w, _ in pairs(12, seed=3)]
    texts += texts[:5]
    read = []
    monkeypatch.setattr(
        "comlrl.preferences.reward_model.last_states",
        lambda fast, rows, *rest: read.append(rows) or last_states(fast, rows, *rest),
    )
    monkeypatch.setattr(
        "comlrl.preferences.reward_model.BATCH_TOKENS", 40
    )  # several uneven batches
    found = model.raw(texts)
    assert len(read) > 1
    assert sum(len(row.completions) for rows in read for row in rows) == len(set(texts))
    assert found == pytest.approx([plain_score(model, t) for t in texts], abs=1e-5)


def test_texts_share_a_row_where_a_quarter_of_them_is_common():
    """5 6 6 6 stands before 7 and before 8 9. 5 1 1 1 1 has but one token with the five of
    5 6 6 6 7 in common: less than a quarter. A text keeps its last token to itself."""
    rows = shared_rows([[5, 6, 6, 6, 8, 9], [5, 1, 1, 1, 1], [5, 6, 6, 6, 7], [3, 4], [3, 4]])
    assert [(r.prompt_ids, r.completions, r.indices) for r in rows] == [
        ((3,), ((4,), (4,)), (3, 4)),
        ((5, 1, 1, 1), ((1,),), (1,)),
        ((5, 6, 6, 6), ((7,), (8, 9)), (2, 0)),
    ]


def by_modules(monkeypatch) -> None:
    """From here on transformers' modules read, in training and in scoring."""
    for place in ("reward_model", "reward_training"):
        monkeypatch.setattr(f"comlrl.preferences.{place}.fast_decoder", lambda *_, **__: None)


@pytest.mark.parametrize("base", [{}, {"lora": None}, {"freeze_backbone": True, "lora": None}])
def test_the_fast_way_fits_as_transformers_modules_do(tmp_path, monkeypatch, base):
    """Eight updates of four pairs; a common beginning of the texts, and one pair without."""
    given = [(f"{'ab' * 6}{w}", f"{'ab' * 6}{r}") for w, r in pairs(31)] + [("hg", "gh")]
    fit, texts = (
        Fit(learning_rate=1e-3, epochs=1, batch_size=4, max_length=64, seed=5),
        [f"{'ab' * 6}{w}" for w, _ in pairs(8, seed=4)],
    )
    fast = fitted(tmp_path / "fast", given, fit=fit, **base).raw(texts)
    by_modules(monkeypatch)
    plain = fitted(tmp_path / "plain", given, fit=fit, **base)
    assert plain.fast is None
    assert fast == pytest.approx(plain.raw(texts), abs=2e-4)
    untrained = fitted(
        tmp_path / "first",
        given,
        fit=Fit(learning_rate=1e-9, epochs=1, batch_size=4, max_length=64, seed=5),
        **base,
    ).raw(texts)
    assert fast != pytest.approx(untrained, abs=2e-2)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_any_seed_of_a_run_fits(tmp_path, seed):
    fit = Fit(learning_rate=1e-3, epochs=1, batch_size=8, max_length=64, seed=seed)
    assert fitted(tmp_path, pairs(8), fit=fit).raw(["abo"])


def test_a_text_of_several_pairs_is_read_once(tmp_path, monkeypatch):
    """All pairs of abo, abx and aby in one batch, in their order: three texts, not six; the same
    fit as by transformers' modules, which read six."""
    given = [("abo", "abx"), ("abo", "aby"), ("abx", "aby")] * 4
    fit, read = (
        Fit(learning_rate=1e-3, epochs=1, batch_size=3, max_length=64, seed=5, in_order=True),
        [],
    )

    def recorded(fast, rows, *rest):
        read.append(sum(len(row.completions) for row in rows))
        return last_states(fast, rows, *rest)

    monkeypatch.setattr("comlrl.preferences.reward_training.last_states", recorded)
    fast = fitted(tmp_path / "fast", given, fit=fit)
    assert read == [3] * 4
    by_modules(monkeypatch)
    plain = fitted(tmp_path / "plain", given, fit=fit)
    texts = ["abo", "abx", "aby"]
    assert fast.raw(texts) == pytest.approx(plain.raw(texts), abs=2e-4)


def test_the_margin_is_asked_of_the_winners_lead(tmp_path):
    """−log σ(r_w − r_l − 2 · 1.5) on average, of a model that has hardly moved."""
    lines: list[str] = []
    fit = Fit(learning_rate=1e-9, epochs=1, batch_size=8, max_length=64, seed=5, margin=2.0)
    made = fitted(tmp_path, pairs(8), fit=fit, lines=lines)
    raw = made.raw([f"p\n{text}\n" for pair in pairs(8) for text in pair])
    leads = [w - r for w, r in zip(raw[::2], raw[1::2], strict=True)]
    without, loss = (
        sum(math.log1p(math.exp(margin - lead)) for lead in leads) / 8 for margin in (0.0, 3.0)
    )
    assert f"loss {loss:.3f}" in lines[-1]
    assert loss > without + 0.5


def test_it_is_saved_and_loaded_as_it_was(model, tmp_path):
    model.save(tmp_path / "kept")
    again = load(tmp_path / "kept")
    assert again.facts == model.facts
    texts = [f"p\n{w}\n" for pair in pairs(8, seed=4) for w in pair]
    assert again.raw(texts) == pytest.approx(model.raw(texts), abs=1e-6)
    assert (tmp_path / "kept/adapter_model.safetensors").exists()  # an adapter, not a whole model
    assert not (tmp_path / "kept/model.safetensors").exists()


def test_a_base_in_bfloat16_is_scored_in_full_precision_at_the_end(tmp_path):
    """Its scores are the plain pass's up to the rounding within, and are not rounded to 8 bits."""
    made = fitted(tmp_path, dtype=torch.bfloat16)
    made.measure(labelled(held_out(24), held_out(24)))
    texts = [f"p\n{w}\n" for pair in pairs(16, seed=5) for w in pair]
    found = made.raw(texts)
    assert torch.tensor(found).bfloat16().tolist() != found
    fast, made.fast = made.fast, None
    assert fast is not None and found == pytest.approx(made.raw(texts), rel=0.05, abs=0.2)
    assert made.facts.accuracy > 0.95
    made.save(tmp_path / "kept")
    again = load(tmp_path / "kept", dtype=torch.bfloat16)
    made.fast = fast
    assert again.raw(texts) == found


def test_wholly_trained_weights_are_loaded_in_the_precision_they_were_trained_in(tmp_path):
    made = fitted(tmp_path, dtype=torch.bfloat16, lora=None)
    made.save(tmp_path / "saved")
    texts = [f"p\n{w}\n" for pair in pairs(8, seed=5) for w in pair]
    assert load(tmp_path / "saved", dtype=torch.bfloat16).raw(texts) == made.raw(texts)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(PreferenceError, match=r"reward_model: .*nothing"):
        load(tmp_path / "nothing")
    (tmp_path / "reward_model.json").write_text(
        json.dumps(asdict(Facts(base="no such base", max_length=8)))
    )
    with pytest.raises(PreferenceError, match="reward_model"):
        load(tmp_path)


@pytest.mark.parametrize("base", [{"freeze_backbone": True}, {"lora": None}])
def test_whole_models_and_lone_heads(tmp_path, base):
    made = fitted(
        tmp_path,
        pairs(16),
        fit=Fit(learning_rate=1e-2, epochs=1, batch_size=8, max_length=64, seed=5),
        **base,
    )
    untrained = folder("qwen2")
    from safetensors.torch import load_file

    before = load_file(str(untrained / "model.safetensors"))
    after = dict(made.model.named_parameters())
    changed = {n for n, w in before.items() if n in after and not torch.equal(after[n], w)}
    if base.get("freeze_backbone"):
        assert changed == set()
    else:
        assert "model.layers.0.self_attn.q_proj.weight" in changed
    made.save(tmp_path / "kept")
    again = load(tmp_path / "kept")
    assert again.raw(["p\nao\n"]) == pytest.approx(made.raw(["p\nao\n"]), abs=1e-6)


def test_pairs_that_are_too_long_are_reported_and_left_out(tmp_path):
    # "p\n" + 60 bytes + "o\n" and end-of-sequence are 65 tokens, one more than 64.
    lines: list[str] = []
    given = [*pairs(15), ("a" * 60 + "o", "b"), ("a" * 59 + "o", "b")]
    made = fitted(
        tmp_path,
        given,
        fit=Fit(learning_rate=1e-2, epochs=1, batch_size=8, max_length=64, seed=5),
        lines=lines,
    )
    assert (made.facts.pairs, made.facts.too_long) == (16, 1)
    assert "1 of 17 pairs are longer than reward_max_length=64 (the longest: 65 tokens)" in lines[0]
    # Scoring keeps the last tokens: what stands before them does not count.
    assert made.raw(["c" * 80 + "o\n"]) == made.raw(["d" * 5 + "c" * 70 + "o\n"])
    with pytest.raises(PreferenceError, match="reward_max_length"):
        fitted(
            tmp_path,
            [("a" * 70, "b")],
            fit=Fit(learning_rate=1e-2, epochs=1, batch_size=8, max_length=64, seed=5),
        )


def test_the_same_seed_gives_the_same_model(tmp_path):
    short = Fit(learning_rate=1e-2, epochs=1, batch_size=8, max_length=64, seed=7)
    one, two = (fitted(tmp_path, pairs(16), fit=short) for _ in range(2))
    assert one.raw(["p\nao\n"]) == two.raw(["p\nao\n"])
    other = fitted(
        tmp_path,
        pairs(16),
        fit=Fit(learning_rate=1e-2, epochs=1, batch_size=8, max_length=64, seed=8),
    )
    assert one.raw(["p\nao\n"]) != other.raw(["p\nao\n"])


def test_a_fit_goes_on_from_another(tmp_path):
    """Of 48 pairs in two fits, the second begins where the first ended; all prompts may stand
    first, and are then read so when candidates are measured."""
    first = fitted(tmp_path, pairs(16))
    before = {name: tensor.clone() for name, tensor in first.weights().items()}
    still = Fit(
        learning_rate=1e-12, epochs=1, batch_size=8, max_length=64, seed=7, prompts_first=True
    )
    base = RewardBase(name=str(folder("qwen2")), lora=LORA)
    given = [TextPair("p\nao\n", "p\nax\n", GAP)]
    again = train(base, still, given, work_dir=tmp_path / "work", say=print, before=before)
    assert again.raw(["p\nao\n"]) == pytest.approx(first.raw(["p\nao\n"]), abs=1e-6)
    assert again.facts.prompts_first and not first.facts.prompts_first


def test_prompts_may_stand_first():
    assert joint_text(("p", "q\n"), ("a", "b")) == "p\na\nq\nb\n"
    assert joint_text(("p", "q\n"), ("a", "b"), prompts_first=True) == "p\nq\na\nb\n"


class TaskReward(Reward):
    closed = False

    def score(self, actions):
        return [Score(1.0, facts=str(n)) for n, _ in enumerate(actions)]

    def close(self):
        self.closed = True


class Lengths:
    """A reward model whose score is a text's length."""

    facts = Facts(base="none", max_length=8)

    def scores(self, texts):
        self.texts = texts
        return [float(len(text)) for text in texts]


def test_the_score_is_the_models_and_the_facts_the_tasks():
    checked = TaskReward()
    reward = ModelReward(checked, PROMPTS)
    reward.model = Lengths()  # type: ignore[assignment]
    found = reward.score([JointAction(task(), ("x", "yy")), JointAction(task(), ("", "zzz"))])
    aux, main = PROMPTS.first(task(), 2)
    texts = [joint_text((aux, main), ("x", "yy")), joint_text((aux, main), ("", "zzz"))]
    assert reward.model.texts == texts
    assert [score.value for score in found] == [float(len(text)) for text in texts]
    assert [score.facts for score in found] == ["0", "1"]
    reward.close()
    assert checked.closed


def test_an_evaluation_does_not_ask_the_task_reward_again(monkeypatch):
    reward = ModelReward(TaskReward(), PROMPTS)
    reward.model = Lengths()  # type: ignore[assignment]
    actions = [JointAction(task(), ("x", "yy")), JointAction(task(), ("", "zzzz"))]
    values = [score.value for score in reward.score(actions)]
    monkeypatch.setattr(TaskReward, "score", lambda *_: pytest.fail("asked again"))
    found = reward.of_evaluation([SimpleNamespace(scored_actions=lambda: actions)])  # type: ignore
    assert found == {"model_score_mean": sum(values) / 2}
