"""The compiled decoding step against torch's operations, in the places where rows differ."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from comlrl.models.fast import native_step, prepacked
from comlrl.models.fast.native_step import NativeCache, library
from comlrl.models.fast.prefix_cache import SharedPrefixCache
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.rollout.decoding import ByFastDecoder
from comlrl.rollout.generation import Generator
from comlrl.types import Request, Row, Sampling
from tests.support import tiny_models
from tests.support.tiny_models import team

KINDS = {"wide llama": LlamaConfig, "wide qwen2": Qwen2Config, "wide qwen3": Qwen3Config}
PROMPTS = [[5, 6, 7], list(range(1, 20)), [9] * 16, [30]]
PROMPT_OF_ROW = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
STEPS = 40  # more than a block


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch):
    for kind, made in KINDS.items():
        settings = (
            tiny_models._SHARED | tiny_models._LLAMA | {"head_dim": 32, "intermediate_size": 64}
        )
        monkeypatch.setitem(tiny_models.CONFIGS, kind, functools.partial(made, **settings))
    monkeypatch.setattr(native_step, "LARGE_BYTES", 0)
    monkeypatch.setattr(prepacked, "LARGE_BYTES", 0)


@pytest.fixture
def compiled(wide_heads):
    if library(32, 2) is None:
        pytest.skip("no C compiler, or another processor")


def states(agents, cache_of, dtype=torch.bfloat16) -> torch.Tensor:
    """Of each row's every token but the first, of which some end halfway; (steps, rows, width)."""
    fast = agents.agents[0].fast
    names = [agents.agents[p % len(agents.agents)].adapter for p in (0, 0, 1, 1)]
    cache = cache_of(torch.tensor([len(p) for p in PROMPTS]), STEPS)
    with torch.inference_mode(), fast.sampling(STEPS):
        by = ByFastDecoder(fast, cache, names)
        by.prefill(PROMPTS)
        by.begin(PROMPT_OF_ROW)
        going, found = torch.arange(len(PROMPT_OF_ROW)), []
        for step in range(STEPS):
            if step == STEPS // 2:
                going = torch.tensor([0, 2, 4, 5, 8])  # the second prompt has none left
                by.keep(going)
            out = torch.full((len(PROMPT_OF_ROW), 32), torch.nan, dtype=dtype)
            out[going] = by.step((going * 7 + step * 11) % 250)
            cache.step += 1
            found.append(out)
    return torch.stack(found).double()


def pair(kind: str, **keys):
    """A team in bfloat16 and one of the same weights in float64."""
    narrow, exact = team(kind, dtype="bfloat16", **keys), team(kind, dtype="float64", **keys)
    with torch.no_grad():
        for given, taken in zip(narrow.agents, exact.agents, strict=True):
            taken.model.load_state_dict(given.model.state_dict())
    return narrow, exact


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_the_hidden_states_of_the_exact_model(kind, lora, compiled):
    """No further from float64 than torch's operations in bfloat16."""
    narrow, exact = pair(kind, lora__enabled=lora)
    assert native_step.serves(narrow.agents[0].fast)
    truth = states(exact, SharedPrefixCache, torch.float64)
    errors = []
    for cache_of in (SharedPrefixCache, NativeCache):
        found = states(narrow, cache_of)
        assert torch.equal(found.isnan(), truth.isnan())
        errors.append((found - truth).nan_to_num().norm() / truth.nan_to_num().norm())
    assert errors[1] < 1.1 * errors[0] < 0.11, errors


def test_what_is_sampled_has_the_log_probability_of_the_exact_model(compiled, monkeypatch):
    """Two agents in one batch; as near to it as by torch's operations."""
    narrow, exact = pair("wide qwen2")
    asked = [
        [Request(tuple(p), tuple((i, agent, g) for g in range(3))) for i, p in enumerate(PROMPTS)]
        for agent in range(2)
    ]
    errors, caches = {}, []
    attend = native_step.NativeStep._attend
    monkeypatch.setattr(
        native_step.NativeStep, "_attend", lambda *a: (caches.append(1), attend(*a))[1]
    )
    for least in (0, 1 << 40):
        monkeypatch.setattr(native_step, "LARGE_BYTES", least)
        off = []
        for agent, of_agent in zip(
            exact.agents, Generator(narrow).sample(asked, Sampling(1.0, 24)), strict=True
        ):
            for request, group in zip(asked[agent.index], of_agent, strict=True):
                rows = [Row.of(request.prompt_ids, group, [1.0] * 3, range(3))]
                with exact.acting(agent.index), torch.no_grad():
                    found = action_logprobs(agent, pack(rows, 0), 1.0).logprob_A.sum()
                off.append(abs(float(found) - sum(c.logprob for c in group)))
        errors[least] = sum(off) / len(off)
        assert bool(caches) == (least == 0)
        caches.clear()
    by_library, by_torch = errors.values()
    assert by_library < 1.5 * by_torch < 2.0, errors


def test_prepacked_weights_are_the_same_bits():
    if not prepacked.available():
        pytest.skip("no bfloat16 products here")
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16()
    x, y = torch.randn(5, 64).bfloat16(), torch.randn(5, 96).bfloat16()
    plain, packed = (prepacked.Linear(weight, bias, way) for way in (False, True))
    assert torch.equal(plain(x), packed(x)) and len(plain(x).unique()) > 100
    plain, packed = (prepacked.Linear(weight, None, way) for way in (False, True))
    assert torch.equal(plain.added(x, y.clone()), packed.added(x, y.clone()))


def test_without_a_compiler_torch_serves(monkeypatch):
    monkeypatch.setattr(native_step.shutil, "which", lambda name: None)
    library.cache_clear()
    assert library(32, 2) is None
    assert not native_step.serves(team("wide llama", dtype="bfloat16").agents[0].fast)
    library.cache_clear()


def test_weights_are_laid_out_where_it_pays(monkeypatch):
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert prepacked.worth_it(100, 64, like) == prepacked.available()
    assert not prepacked.worth_it(100, 1, like)
    assert not prepacked.worth_it(2 << 30, 64, like)
    assert not prepacked.worth_it(100, 64, like.float())
    monkeypatch.setattr(prepacked, "LARGE_BYTES", 101)
    assert not prepacked.worth_it(100, 64, like)
