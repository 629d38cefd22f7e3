"""Static steps against the decoder whose batches shrink, and what lets a GPU capture them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from comlrl.errors import NonFiniteError
from comlrl.models.fast import compiled_update
from comlrl.models.fast.static_step import ROW_BUCKETS, bucket, grid_of, layer_step
from comlrl.rollout import static_decoding
from comlrl.rollout.generation import Generator
from comlrl.rollout.static_decoding import StaticBatch, StaticDraw, blockwise_inverse_cdf
from comlrl.types import Request, Sampling
from tests.support.tiny_models import VOCABULARY, prompt, team
from tests.support.tiny_trainers import build, share_of_letters

TEXTS = [
    "a",
    "def f(x):\n    return",
    "a much longer prompt than the others, of sixty letters",
    "b",
]
WAYS = {
    "greedy": Sampling(0.0, 12),
    "plain": Sampling(1.0, 12),
    "top_p": Sampling(0.7, 12, top_p=0.9),
    "top_k": Sampling(1.3, 12, top_k=5),
    "both": Sampling(1.0, 12, top_p=0.6, top_k=20),
    "all of top_k": Sampling(1.0, 12, top_k=VOCABULARY + 1),
    "sets": Sampling(1.5, 12, top_p=0.9, max_support=1000),
    "small sets": Sampling(1.5, 12, top_p=0.9, max_support=8),
}


def requests(agent: int, siblings: list[int]) -> list[Request]:
    return [
        Request(prompt(text), tuple((7, text, agent, g) for g in range(count)))
        for text, count in zip(TEXTS, siblings, strict=False)
    ]


def both(agents, asked, sampling, repeat: int = 1):
    """What the shrinking batch and the static one write; steps may start before their draw is
    read."""
    wanted = Generator(agents).sample(asked, sampling)
    written = []
    for decoding in ("static", "graphs"):
        generator = Generator(agents, decoding=decoding)
        assert generator.static is not None
        for _ in range(repeat):  # a state is used anew
            written.append(generator.sample(asked, sampling))
        assert generator.static.states, "another way was taken"
    same(written[0], written[-1])
    return wanted, written[-1]


def same(wanted, found) -> None:
    pairs = zip(itertools.chain(*wanted), itertools.chain(*found), strict=True)
    count = 0
    for one, other in itertools.chain.from_iterable(zip(*pair, strict=True) for pair in pairs):
        assert one == other  # text, tokens, end
        assert other.logprob_L == pytest.approx(one.logprob_L, abs=1e-4)
        assert (one.support is None) == (other.support is None)
        if one.support is not None:
            assert torch.equal(one.support.counts_L, other.support.counts_L)
            assert torch.equal(one.support.ids_I, other.support.ids_I)
            torch.testing.assert_close(one.support.threshold_L, other.support.threshold_L)
        count += 1
    assert count


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_the_shrinking_batch(kind, dtype, way):
    """Two adapters; prompts of unequal numbers of siblings, which are no bucket: dead rows."""
    agents = team(kind, dtype=dtype)
    same(*both(agents, [requests(0, [3, 3, 2, 3]), requests(1, [3, 1, 2])], WAYS[way], repeat=2))


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_each_kind_of_rope_turns_as_in_transformers(rope):
    agents = team(f"llama with {rope} ropes")
    asked = [requests(0, [3, 3, 2, 3]), requests(1, [3, 1, 2])]
    wanted, found = both(agents, asked, WAYS["top_p"])
    same(wanted, found)
    for agent in agents.agents:
        agent.fast = None  # through transformers' modules
    same(Generator(agents).sample(asked, WAYS["top_p"]), found)
    assert Generator(team("llama")).sample(asked, WAYS["top_p"]) != wanted


def test_a_run_with_static_steps_learns_the_same(tmp_path):
    trainers = [
        build(
            "magrpo", tmp_path / way, share_of_letters, agent_model__torch_dtype="float64",
            generation__decoding=way, max_steps=2, max_new_tokens=8, learning_rate=1e-2,
        )
        for way in ("growing", "static")
    ]  # fmt: skip
    for trainer in trainers:
        trainer.train()
    assert trainers[1].rollout.sampler.static.states
    weights, static = (trainer.team.agents[0].named() for trainer in trainers)
    for name, weight in weights.items():
        torch.testing.assert_close(static[name], weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("adapters", [True, False])
def test_any_number_of_adapters_and_none(count, adapters):
    agents = team(num_agents=count, lora__enabled=adapters)
    asked = [requests(index, [3, 2, 3]) for index in range(count)]
    same(*both(agents, asked, WAYS["top_p"]))


def test_each_agents_own_sampling():
    agents = team(num_agents=3)
    ways = (Sampling(0.0, 5), Sampling(1.2, 20, top_p=0.8), Sampling(0.9, 9))
    sampling = replace(ways[1], by_agent=ways)
    same(*both(agents, [requests(index, [2, 2, 2]) for index in range(3)], sampling))


def test_stops_by_text_are_seen_between_the_steps():
    agents = team()
    asked = [requests(0, [4, 4, 4]), requests(1, [4])]
    sampling = Sampling(1.0, 24)
    texts = [
        c.text
        for c in itertools.chain(*itertools.chain(*Generator(agents).sample(asked, sampling)))
    ]
    pairs = [a + b for text in texts for a, b in itertools.pairwise(text[:-1])]
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    wanted, found = both(agents, asked, replace(sampling, stop=(stop, "never")))
    same(wanted, found)
    assert any(c.finished and stop not in c.text for c in itertools.chain(*itertools.chain(*found)))


@pytest.mark.parametrize("way", ["top_p", "top_k", "both", "sets", "small sets"])
def test_a_nucleus_wider_than_what_is_looked_at_is_drawn_from_the_whole(way, monkeypatch):
    monkeypatch.setattr(static_decoding, "TOP", 4)
    wide = []
    plain = StaticDraw.draw_wide

    def counted(self, *arguments):
        wide.append(int(self.wide_R.sum()))
        plain(self, *arguments)

    monkeypatch.setattr(StaticDraw, "draw_wide", counted)
    same(*both(team(), [requests(0, [3, 3, 2, 3]), requests(1, [3, 1, 2])], WAYS[way]))
    assert wide


@pytest.mark.parametrize("tokens", [1, 64, 65, 130])
def test_more_tokens_than_the_first_bucket(tokens):
    agents = team()
    for agent in agents.agents:
        agent.__dict__["stop_ids"] = (256,)
    same(*both(agents, [requests(0, [2, 2]), []], Sampling(1.0, tokens)))


def test_a_grid_that_would_be_mostly_empty_is_decoded_as_before():
    generator = Generator(team(), decoding="static")
    asked = [requests(0, [20, 1, 1, 1]), []]
    assert generator.sample(asked, WAYS["plain"]) == Generator(team()).sample(asked, WAYS["plain"])
    assert generator.static is not None and not generator.static.states


def test_logits_that_are_no_numbers_end_the_sampling_and_spoil_nothing_after():
    agents = team()
    generator = Generator(agents, decoding="static")
    asked = [requests(0, [2, 2]), []]
    wanted = generator.sample(asked, WAYS["top_p"])
    weight = next(p for name, p in agents.agents[0].named().items() if "lora_B" in name)
    with torch.no_grad():
        before = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(NonFiniteError):
            generator.sample(asked, WAYS["top_p"])
        weight.copy_(before)
    assert generator.sample(asked, WAYS["top_p"]) == wanted


def test_weights_that_an_update_moves_are_read_anew():
    agents = team()
    generator, asked = Generator(agents, decoding="static"), [requests(0, [3, 3]), []]
    first = generator.sample(asked, WAYS["plain"])
    with torch.no_grad():
        for parameter in agents.agents[0].parameters():
            parameter.add_(0.2)
    second = generator.sample(asked, WAYS["plain"])
    assert first != second == Generator(agents).sample(asked, WAYS["plain"])


def test_the_two_level_sum_draws_what_the_plain_sum_draws():
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(64, 5000, generator=generator, dtype=torch.float64) ** 8
    weight[:, 4000:] = 0
    uniform = torch.rand(64, 1, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1.0 - 2**-53
    cdf = weight.cumsum(-1)
    token, share = blockwise_inverse_cdf(weight, uniform)
    assert torch.equal(token, torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0])
    torch.testing.assert_close(share, weight.gather(1, token[:, None])[:, 0] / cdf[:, -1])


@pytest.mark.parametrize(("most", "count"), [(1, 1), (3100, 2), (4352, 3)])
def test_states_of_earlier_batches_stay_while_their_slots_allow(most, count):
    generator = Generator(team(), decoding="graphs")
    assert generator.static is not None
    generator.static.max_slots = most
    for tokens in (12, 65, 129, 12):  # 2 · (128 + 4 · bucket) slots: 768, 1280, 2304
        generator.sample([requests(0, [4, 4]), []], Sampling(1.0, tokens))
    assert len(generator.static.states) == count


def test_buckets():
    assert [bucket(n, ROW_BUCKETS) for n in (1, 8, 9, 65, 512, 513, 1025)] == [
        8, 8, 16, 96, 512, 1024, 1536,
    ]  # fmt: skip
    # Prompts × siblings: 3 × 4 of 16 rows, 5 × 3 of 16, 1 × 7 of 8.
    assert [grid_of(3, 4), grid_of(5, 3), grid_of(1, 7)] == [4, 5, 1]


class Record(TorchDispatchMode):
    """Every operation with the shapes of its tensors, and the addresses of those of a state."""

    # What a graph cannot hold though it passes without a read by the host.
    REFUSED = ("isin", "nonzero", "unique", "bincount", "_local_scalar_dense", "masked_select")

    def __init__(self, held: set[int]) -> None:
        super().__init__()
        self.held, self.lines = held, list[tuple]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(word in name for word in self.REFUSED), name
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        if "index" in name and isinstance(
            args[1], list | tuple
        ):  # by a Boolean: its length is read
            assert not any(x is not None and x.dtype == torch.bool for x in args[1]), name
        places = [x.data_ptr() if x.data_ptr() in self.held else None for x in tensors]
        self.lines.append((name, [tuple(x.shape) for x in tensors], places))
        return function(*args, **(kwargs or {}))


def state_of(sampling: Sampling, dtype: str = "float64") -> tuple[StaticBatch, StaticDraw]:
    """A state in the middle of a batch of two adapters."""
    generator = Generator(team(dtype=dtype), decoding="static")
    generator.sample([requests(0, [3, 3, 2, 3]), requests(1, [3, 3])], sampling)
    assert generator.static is not None
    ((batch, draw, _),) = generator.static.states.values()
    batch.t.fill_(3)
    draw.going_R.fill_(True)
    return batch, draw


def tensors_of(batch: StaticBatch, draw: StaticDraw) -> list[torch.Tensor]:
    leaves = tree_leaves([list(vars(batch).values()), list(vars(draw).values())])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


STEPS = ["greedy", "plain", "top_p", "both", "sets"]


@torch.no_grad()
@pytest.mark.parametrize("way", STEPS)
def test_a_step_does_the_same_to_the_same_memory_as_the_step_before(way):
    batch, draw = state_of(replace(WAYS[way], stop=("zz",)))
    held = {tensor.data_ptr() for tensor in tensors_of(batch, draw)}
    records = []
    for _ in range(2):
        with Record(held) as record:
            draw.draw()
            batch.step(64)
        records.append(record.lines)
    assert records[0] == records[1] and len(records[0]) > 50
    assert int(batch.t) == 5


@torch.no_grad()
@pytest.mark.parametrize("way", STEPS)
def test_nothing_in_a_step_waits_for_the_device(way):
    """A fake tensor has no values: whatever reads one raises."""
    batch, draw = state_of(replace(WAYS[way], stop=("zz",)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for state in (batch, draw):
            for name, value in vars(state).items():
                if isinstance(value, torch.Tensor) or name == "caches":
                    fake = tree_map(lambda x: mode.from_tensor(x.clone()), value)
                    setattr(state, name, fake)
        draw.draw()
        batch.step(64)
        with pytest.raises(DataDependentOutputException):
            batch.token_R.tolist()


VIEWS = (
    "view", "split", "transpose", "expand", "slice", "select.int", "unsqueeze", "aten.t.", "alias",
    "empty", "permute", "unbind",
)  # fmt: skip


@torch.no_grad()
def test_a_layer_starts_few_operations():
    """Each is a kernel on a GPU; views and memory are none."""
    batch, _ = state_of(WAYS["plain"], "float32")
    weights, caches, counts = batch.weights, batch.caches, []
    for number in (1, 2):
        batch.weights, batch.caches = weights[:number], caches[:number]
        with Record(set()) as record:
            batch.step(64)
        counts.append(sum(not any(view in name for view in VIEWS) for name, *_ in record.lines))
    assert counts[1] - counts[0] <= 42


def test_layers_are_compiled_once_and_without_a_break(monkeypatch):
    """``fullgraph`` raises at what dynamo cannot take into one graph."""
    backend = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(layer_step, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(compiled_update, "compiled", lambda _: layer)
    agents, asked = team(dtype="float32"), [requests(0, [3, 3, 2, 3]), requests(1, [3, 1, 2])]
    wanted = Generator(agents).sample(asked, WAYS["top_p"])
    same(wanted, Generator(agents, decoding="compiled").sample(asked, WAYS["top_p"]))
    assert backend.frame_count == 1  # for all layers and steps


@torch.no_grad()
def test_the_record_refuses_what_the_host_would_wait_for():
    x = torch.arange(3.0)
    for wait in (
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: float(x[0]),
        lambda: torch.isin(x, x),
    ):
        with pytest.raises(AssertionError), Record(set()):
            wait()
