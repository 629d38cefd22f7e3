"""Keyed sampling against a plain loop: one row, one token and one whole forward pass at a time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from comlrl.errors import NonFiniteError
from comlrl.keyed import uniforms
from comlrl.models.pretrained import build_team
from comlrl.rollout import decoding, draw, generation, truncation
from comlrl.rollout.generation import Generator
from comlrl.rollout.grow import Rollout
from comlrl.rollout.stops import StopTexts
from comlrl.types import Completion, Message, Request, Sampling, Shape
from tests.support.fakes import PROMPTS, FakeReward, FakeTransition, task
from tests.support.plain import truncated
from tests.support.tiny_models import EOS, STOPS, config, folder, prompt, team

KINDS = ["qwen2", "llama", "qwen3", "gpt2", "mistral", "qwen3 with a window", "gemma2"]
FAST = ["qwen2", "llama", "qwen3"]  # the others go through transformers' modules
TEXTS = [
    "a",
    "def f(x):\n    return",
    "a much longer prompt than the others, of sixty letters",
    "b",
]
SAMPLINGS = [
    Sampling(0.0, 12), Sampling(1.0, 12), Sampling(0.7, 12, top_p=0.9), Sampling(1.3, 12, top_k=5),
    Sampling(1.0, 12, top_p=0.6, top_k=20),
]  # fmt: skip


def requests(texts=TEXTS, siblings: int = 5, agent: int = 0) -> list[Request]:
    return [
        Request(prompt(text), tuple((7, text, agent, g) for g in range(siblings))) for text in texts
    ]


@torch.no_grad()
def plainly(agent, prompt_ids, key, sampling: Sampling) -> tuple[int, ...]:
    """One completion, without cache, batch or padding."""
    draws = uniforms(key, sampling.max_new_tokens)
    sampled_ids: list[int] = []
    for step in range(sampling.max_new_tokens):
        logits = (
            agent.model(torch.tensor([[*prompt_ids, *sampled_ids]])).logits[0, -1].double().numpy()
        )
        if sampling.temperature == 0:
            sampled_ids.append(int(logits.argmax()))
        else:
            p = np.exp((logits - logits.max()) / sampling.temperature)
            cdf = np.cumsum(truncated(p / p.sum(), sampling))
            sampled_ids.append(int(np.searchsorted(cdf, draws[step] * cdf[-1], side="right")))
        if sampled_ids[-1] in agent.stop_ids:
            break
    return tuple(sampled_ids)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_batch_says_what_the_plain_loop_says(kind, sampling):
    agents = team(kind, dtype="float32" if kind == "gemma2" else "float64")
    assert (agents.agents[0].fast is not None) == (kind in FAST)
    asked = requests(siblings=3)
    done = Generator(agents).sample([asked, requests(siblings=2, agent=1)], sampling)
    for index, of_agent in enumerate(done):
        with agents.acting(index) as agent:
            for request, completions in zip(
                [asked, requests(siblings=2, agent=1)][index], of_agent, strict=True
            ):
                for key, completion in zip(request.keys_G, completions, strict=True):
                    expected = plainly(agent, request.prompt_ids, key, sampling)
                    assert completion.token_ids == expected


def often_written(completions) -> str:
    """Two letters that stand side by side before the end of these texts."""
    pairs = Counter(
        pair for c in completions for pair in {a + b for a, b in itertools.pairwise(c.text[:-1])}
    )
    return max((pair for pair in pairs if "\ufffd" not in pair), key=lambda pair: pairs[pair])


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[3]], ids=str)
def test_a_text_that_stops_ends_the_same_completion_earlier(kind, sampling):
    """A byte a token: no single token holds the stop."""
    agents, sampling = team(kind), replace(sampling, max_new_tokens=24)
    whole = Generator(agents).sample([requests(), requests(agent=1)], sampling)
    stop = often_written(itertools.chain(*whole[0]))
    stopped = replace(sampling, stop=(stop, "never written"))
    cut = Generator(agents).sample([requests(), requests(agent=1)], stopped)
    decode, ended = agents.agents[0].decode, 0
    for short, longer in zip(
        itertools.chain(*itertools.chain(*cut)), itertools.chain(*itertools.chain(*whole)),
        strict=True,
    ):  # fmt: skip
        ids = longer.token_ids
        end = next((i for i in range(len(ids) + 1) if stop in decode(ids[:i])), None)
        assert short.token_ids == ids[:end]
        assert short.finished == (end is not None or longer.finished)
        assert short.text == longer.text.partition(stop)[0]
        ended += end is not None and end < len(ids)
    assert ended
    apart = Generator(agents, max_batch_tokens=1)  # a request at a time
    assert apart.sample([requests(), requests(agent=1)], stopped) == cut


def test_the_log_probability_is_of_the_tokens_up_to_the_stop():
    agents, sampling = team(), Sampling(0.7, 24, top_p=0.9, max_support=4)
    whole = Generator(agents).sample([requests(), []], sampling)[0]
    stopped = replace(sampling, stop=(often_written(itertools.chain(*whole)),))
    cut = Generator(agents).sample([requests(), []], stopped)[0]
    for request, group, longer in zip(requests(), cut, whole, strict=True):
        for completion, other in zip(group, longer, strict=True):
            shorter = replace(sampling, max_new_tokens=len(completion.token_ids))
            key = request.keys_G[group.index(completion)]
            ((same,),) = Generator(agents).sample([[replace(request, keys_G=(key,))], []], shorter)[
                0
            ]
            assert completion.token_ids == same.token_ids == other.token_ids[: len(same.token_ids)]
            assert completion.logprob == pytest.approx(same.logprob, rel=1e-6)
            assert torch.equal(completion.support.ids_I, same.support.ids_I)
            assert torch.equal(completion.support.counts_L, same.support.counts_L)


def test_agents_of_one_batch_stop_at_their_own_texts():
    agents, plain = team(), Sampling(1.0, 24)
    asked = [requests(), requests(agent=1)]
    whole = Generator(agents).sample(asked, plain)
    stops = [often_written(itertools.chain(*groups)) for groups in whole]
    ways = tuple(replace(plain, stop=(stop,)) for stop in stops)
    generator = Generator(agents)
    cut = generator.sample(asked, replace(plain, by_agent=(ways[0], ways[1])))
    half = generator.sample(asked, replace(plain, by_agent=(ways[0], plain)))
    assert generator.calls == 2
    for index, way in enumerate(ways):
        assert cut[index] == Generator(agents).sample(asked, way)[index]
    assert half == [cut[0], whole[1]]


@pytest.mark.parametrize("stop", [(), ("ab",)])
def test_stops_cost_nothing_where_there_are_none(stop, monkeypatch):
    built = []

    def noted(tokenizer, texts):
        built.append(texts)
        return StopTexts(tokenizer, texts)

    monkeypatch.setattr(draw, "stop_texts", noted)
    Generator(team()).sample([requests(), []], Sampling(1.0, 4, stop=stop))
    assert built == ([stop] if stop else [])


APART = (
    Sampling(0.7, 5, top_p=0.9, max_support=4),
    Sampling(1.3, 12),
    Sampling(1.0, 9, top_k=5, max_support=4),
)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
def test_agents_sample_by_their_own_limits_in_one_batch(kind):
    agents = team(kind, num_agents=3)
    asked = [requests(siblings=3, agent=agent) for agent in range(3)]
    generator = Generator(agents)
    found = generator.sample(asked, replace(Sampling(1.0, 7), by_agent=APART))
    assert generator.calls == (3 if kind == "gpt2" else 1)  # whose adapters cannot share a batch
    lengths = [{len(c.token_ids) for group in own for c in group} for own in found]
    assert [max(own) for own in lengths] == [5, 12, 9]
    for index, own in enumerate(APART):
        alone = Generator(agents).sample([asked[i] if i == index else [] for i in range(3)], own)
        for group, expected in zip(found[index], alone[index], strict=True):
            assert group == expected
            for completion, other in zip(group, expected, strict=True):
                assert completion.logprob == pytest.approx(other.logprob, rel=1e-6)
                assert (
                    (completion.support is None) == (other.support is None) == (not own.truncates)
                )
                if completion.support is not None:
                    assert torch.equal(completion.support.ids_I, other.support.ids_I)
                    assert torch.equal(completion.support.counts_L, other.support.counts_L)


@pytest.mark.parametrize("kind", [*FAST, "gpt2"])
def test_sharing_prompts_changes_nothing(kind, monkeypatch):
    agents = team(kind)
    for sampling in SAMPLINGS:
        shared = Generator(agents).sample([requests(), []], sampling)
        with monkeypatch.context() as patch:
            patch.setattr(generation.prefix_cache, "supported", lambda model: False)
            assert Generator(agents).sample([requests(), []], sampling) == shared


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
def test_a_prompt_of_several_requests_is_read_once(kind, monkeypatch):
    """As a task's is that an evaluation answers several times; other prompts stand between."""
    agents, read, prefill = team(kind), [], decoding.ByFastDecoder.prefill

    def noted(self, prompts):
        read.append(len(prompts))
        return prefill(self, prompts)

    monkeypatch.setattr(decoding.ByFastDecoder, "prefill", noted)
    whole = [requests(siblings=4, agent=agent) for agent in range(2)]
    apart = [[replace(r, keys_G=(r.keys_G[g],)) for g in range(4) for r in own] for own in whole]
    found = Generator(agents).sample(apart, Sampling(1.0, 12))
    assert read == ([len(TEXTS) * 2] if kind in FAST else [])  # the others share no prompts
    expected = Generator(agents).sample(whole, Sampling(1.0, 12))
    for agent in range(2):
        again = [group[g].token_ids for g in range(4) for group in expected[agent]]
        assert [group[0].token_ids for group in found[agent]] == again


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_a_completion_brings_its_log_probability_along(kind):
    """Under what drew it: at the temperature, over the tokens that were left."""
    agents = team(kind)
    for sampling in SAMPLINGS[1:]:
        request = requests(["def f(x):"], siblings=3)[0]
        (completions,), _ = Generator(agents).sample([[request], []], sampling)
        with agents.acting(0) as agent, torch.no_grad():
            for completion in completions:
                ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
                logits = agent.model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
                p_LV = (logits / sampling.temperature).softmax(-1).double().numpy()
                left = [truncated(p, sampling) for p in p_LV]
                drawn = [p[t] / p.sum() for p, t in zip(left, completion.token_ids, strict=True)]
                assert completion.logprob == pytest.approx(np.log(drawn).sum(), rel=1e-4)
    (greedy,), _ = Generator(agents).sample([[request], []], SAMPLINGS[0])
    assert all(np.isnan(completion.logprob) for completion in greedy)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_completion_brings_along_what_truncation_left(kind):
    """At each position its set, or of a larger one what all of its tokens are likelier than."""
    agents = team(kind)
    request = requests(["def f(x):"], siblings=3)[0]
    larger = []
    for sampling in SAMPLINGS[2:]:
        sampling = replace(sampling, max_support=4)
        (completions,), _ = Generator(agents).sample([[request], []], sampling)
        with agents.acting(0) as agent, torch.no_grad():
            for completion in completions:
                ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
                logits = agent.model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
                p_LV = (logits / sampling.temperature).softmax(-1).double().numpy()
                support = completion.support
                assert (
                    len(support.counts_L) == len(support.threshold_L) == len(completion.token_ids)
                )
                parts = support.ids_I.split(support.counts_L.tolist())
                for p, own, threshold in zip(p_LV, parts, support.threshold_L, strict=True):
                    left = set(truncated(p, sampling).nonzero()[0].tolist())
                    larger.append(len(left) > 4)
                    if larger[-1]:
                        assert len(own) == 0
                        assert left == set((np.log(p) >= threshold.item()).nonzero()[0].tolist())
                    else:
                        assert left == set(own.tolist()) and threshold == torch.inf
    assert any(larger) and not all(larger)
    for sampling in (SAMPLINGS[2], replace(SAMPLINGS[1], max_support=12)):  # not asked for; nothing
        (completions,), _ = Generator(agents).sample([[request], []], sampling)
        assert [completion.support for completion in completions] == [None] * 3


def test_what_is_sampled_does_not_depend_on_the_company():
    agents, sampling = team(), Sampling(1.0, 12)
    asked = requests([f"{text}{i}" for text in TEXTS for i in range(4)])
    together = Generator(agents).sample([asked, []], sampling)[0]
    alone = [Generator(agents).sample([[each], []], sampling)[0][0] for each in asked]
    assert alone == together
    shuffled = random.Random(0).sample(range(len(asked)), len(asked))
    mixed = Generator(agents).sample([[asked[i] for i in shuffled], []], sampling)[0]
    assert [mixed[shuffled.index(i)] for i in range(len(asked))] == together
    for slots in (1, 200, 800):  # one request a chunk, a few, many
        generator = Generator(agents, max_batch_tokens=slots)
        assert generator.sample([asked, []], sampling)[0] == together
        assert generator.calls > 1
    # Fewer siblings, or siblings in another order, are the same ones.
    turned = [Request(each.prompt_ids, each.keys_G[::-1][:3]) for each in asked]
    some = Generator(agents).sample([turned, []], sampling)[0]
    assert some == [group[::-1][:3] for group in together]


def test_agents_and_keys_say_different_things():
    done = Generator(team()).sample([requests(), requests(agent=1)], Sampling(1.0, 12))
    texts = [c.token_ids for of_agent in done for group in of_agent for c in group]
    assert len(set(texts)) == len(texts)


def test_greedy_siblings_are_alike():
    for group in Generator(team()).sample([requests(), []], Sampling(0.0, 12))[0]:
        assert len({completion.token_ids for completion in group}) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_rows_whose_tokens_are_the_same_so_far_are_computed_once(temperature, monkeypatch):
    monkeypatch.setattr(decoding, "ROWS_STEP", 1)
    rows_of_steps, step = [], decoding.ByFastDecoder.step

    def counted(by: decoding.ByFastDecoder, tokens_R: torch.Tensor) -> torch.Tensor:
        rows_of_steps.append(len(tokens_R))
        return step(by, tokens_R)

    monkeypatch.setattr(decoding.ByFastDecoder, "step", counted)
    asked = requests(siblings=40)
    done = Generator(team()).sample([asked, []], Sampling(temperature, 16))[0]
    texts = [(number, c.token_ids) for number, group in enumerate(done) for c in group]
    beginnings = [
        len({(number, ids[:length]) for number, ids in texts if length < len(ids)})
        for length in range(1, 16)
    ]
    # Those that have ended stay while they are few: below 15 %.
    for rows, going in zip(rows_of_steps, beginnings, strict=False):
        assert going <= rows < going / 0.85 + 1
    if temperature == 0:
        assert max(rows_of_steps) <= len(asked)
    else:
        assert len(asked) < rows_of_steps[0] < 40 * len(asked)


def each(done: list[list[tuple[Completion, ...]]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Agent, request and tokens of every completion."""
    for agent, of_agent in enumerate(done):
        for at, group in enumerate(of_agent):
            yield from ((agent, at, completion.token_ids) for completion in group)


@pytest.mark.parametrize("agents_have", ["merged adapters", "adapters", "models"])
def test_each_way_through_adapters_samples_what_the_modules_do(agents_have, monkeypatch):
    """Where siblings part, each continues by itself, whoever of them has ended before."""
    monkeypatch.setattr(decoding, "ROWS_STEP", 1)
    agents = team("qwen2", lora__enabled=agents_have != "models")
    for agent in agents.agents:
        agent.fast.merging = agents_have != "adapters"
    asked = [requests(siblings=40), requests(siblings=30, agent=1)]
    sampling = Sampling(1.0, 24, top_k=3)
    written = list(each(Generator(agents).sample(asked, sampling)))
    for agent in agents.agents:
        monkeypatch.setattr(agent, "fast", None)
    monkeypatch.setattr(generation.prefix_cache, "supported", lambda model: False)
    assert written == list(each(Generator(agents).sample(asked, sampling)))
    lengths = {len(ids) for _, _, ids in written}
    assert 24 in lengths and len(lengths) > 8  # some end, at many steps, and some do not


def test_completions_end_with_their_stop_token_and_say_so():
    agents = team()
    done = Generator(agents).sample([requests(siblings=40), []], Sampling(1.0, 16))[0]
    everything = [completion for group in done for completion in group]
    ended = [c for c in everything if c.finished]
    assert 20 < len(ended) < len(everything)  # ends of all kinds are in the sample
    assert len({len(c.token_ids) for c in ended}) > 8  # so that rows leave at many steps
    for completion in everything:
        *before, last = completion.token_ids
        assert not set(before) & set(STOPS)
        assert completion.finished == (last in STOPS)
        assert completion.finished or len(completion.token_ids) == 16
        support = [t for t in completion.token_ids if t < 256]  # specials are no text
        assert completion.text == agents.agents[0].tokenizer.decode(support)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logits_that_are_no_numbers_stop_the_sampling(sampling):
    agents = team()
    with torch.no_grad():
        agents.agents[0].model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        Generator(agents).sample([requests(["a"]), []], sampling)


def test_one_token_is_enough():
    for group in Generator(team()).sample([requests(), []], Sampling(1.0, 1))[0]:
        assert all(len(completion.token_ids) == 1 for completion in group)


def test_a_model_without_pad_token_says_the_same():
    settings = {"agent_model__torch_dtype": "float64", "lora__enabled": False, "num_agents": 1}
    bare = config("grpo", agent_model__name=str(folder("llama", pad=False)), **settings)
    whole = config("grpo", agent_model__name=str(folder("llama")), **settings)
    without, with_pad = (build_team(each, device="cpu") for each in (bare, whole))
    assert without.agents[0].tokenizer.pad_token_id == EOS
    for sampling in SAMPLINGS[:2]:
        a, b = (Generator(t).sample([requests()], sampling) for t in (without, with_pad))
        assert a == b


def test_first_tokens_are_as_frequent_as_the_policy_says():
    agents = team()
    count = 4000
    asked = Request(prompt("x = "), tuple((3, g) for g in range(count)))
    (group,) = Generator(agents).sample([[asked], []], Sampling(1.0, 1))[0]
    with torch.no_grad(), agents.acting(0) as agent:
        p = agent.model(torch.tensor([asked.prompt_ids])).logits[0, -1].softmax(-1).numpy()
    seen = np.bincount([c.token_ids[0] for c in group], minlength=len(p)) / count
    # The expected distance of n draws is at most Σ √(p (1 − p) / n) / 2; twice that is luck's end.
    assert np.abs(seen - p).sum() / 2 < np.sqrt(p * (1 - p) / count).sum()


# ------------------------------------------------------------------------------ keyed numbers


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1, 1), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1, 1, top_k=2), [0, 0.4, 0, 0.3]),
        (Sampling(1, 1, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1, 1, top_p=0.4), [0, 0.4, 0, 0]),  # 0.4 holds 0.4 already
        (Sampling(1, 1, top_p=0.5), [0, 0.4, 0, 0.3]),  # the fewest of at least 0.5
        (Sampling(1, 1, top_p=0.95), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1, 1, top_p=1e-9), [0, 0.4, 0, 0]),  # never nothing
        # Of the two largest, 0.7 in all, 0.4 holds 0.4 / 0.7 = 0.571.
        (Sampling(1, 1, top_k=2, top_p=0.57), [0, 0.4, 0, 0]),
        (Sampling(1, 1, top_k=2, top_p=0.58), [0, 0.4, 0, 0.3]),
    ],
    ids=str,
)
def test_truncation_by_hand(sampling, expected):
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    assert truncation.truncated(p, sampling)[0].tolist() == pytest.approx(expected)


# ------------------------------------------------------------------------ with the real rollout


def rollout(generator: Generator) -> Rollout:
    class Reward(FakeReward):
        def one(self, action):
            return sum(map(len, action.completions_N)) % 5

    return Rollout(generator, Reward(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=3)


@pytest.mark.parametrize(
    ("agents", "turns", "mode", "handoff"),
    [(1, 2, "align", None), (2, 2, "align", None), (2, 2, "cross", "random"),
     (3, 3, "align", "best")],
)  # fmt: skip
@pytest.mark.parametrize("shared", [True, False], ids=["one base", "separate models"])
def test_a_training_step_makes_at_most_n_times_t_generation_calls(
    agents, turns, mode, handoff, shared
):
    names = {} if shared else {"agents": [str(folder("qwen2"))] * agents}
    built = team(num_agents=agents, algorithm="grpo" if agents == 1 else "magrpo", **names)
    generator = Generator(built)
    shape, written = Shape(agents, turns, 2, joint_mode=mode, handoff=handoff), []
    generator.on_written = written.append
    trees = rollout(generator).grow(
        [task(n) for n in "ABCD"], shape, Sampling(1.0, 8), ("train", 1)
    )
    # Agents of one base decode together.
    assert generator.calls == (turns if shared else agents * turns)
    assert generator.tokens == sum(
        len(c.token_ids)
        for tree in trees for node in tree.nodes for t in node.agents_N for c in t.completions_G
    )  # fmt: skip
    nodes = sum(len(tree.nodes) for tree in trees)
    assert sum(written) == pytest.approx(nodes * agents * 2)  # whole completions, as they grew
    assert len(written) > generator.calls and min(written) >= -1e-9


def test_a_tasks_tree_is_the_same_alone_in_company_and_in_another_order():
    generator = Generator(team())

    def grow(names: str):
        shape, sampling = Shape(2, 2, 2), Sampling(1.0, 8)
        trees = rollout(generator).grow([task(n) for n in names], shape, sampling, ("train", 1))
        return {tree.task.task_id: tree for tree in trees}

    together = grow("ABCDE")
    assert grow("EBADC") == together
    assert grow("C")["C"] == together["C"]


def test_prompts_are_encoded_as_the_model_reads_them():
    agents = team()
    generator = Generator(agents, max_length=40)
    messages = (Message("user", "abc"), Message("assistant", "d"), Message("user", "e"))
    assert generator.encode(0, messages) == prompt("abc\n\nd\n\ne\n")
    assert generator.fits(0, (1,) * 28, Sampling(1.0, 12))
    assert not generator.fits(0, (1,) * 29, Sampling(1.0, 12))
    assert Completion("", (), False).text == ""


def test_only_the_sampler_leaves_deterministic_mode():
    """Indices are unique there, and writes would sort them."""
    seen = []
    generator = Generator(team())
    generator.on_written = lambda _: seen.append(torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    try:
        generator.sample([requests(), []], SAMPLINGS[1])
        assert torch.are_deterministic_algorithms_enabled() and not any(seen)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
