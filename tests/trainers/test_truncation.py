"""Truncated sampling: the gradient is that of the policy that acted, by enumeration.

A vocabulary of 7 and sequences of at most 3 tokens: every sequence that can be sampled is, and
weighted by how likely it is their gradients must sum up to that of the expected reward.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, Qwen2Config

from comlrl.models.agent import Agent
from comlrl.models.latent_networks import HeterogeneousLayer
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums
from comlrl.rollout.generation import Generator
from comlrl.types import (
    AgentTurn,
    Completion,
    Request,
    Row,
    Sampling,
    Task,
    TokenBatch,
    Tree,
)
from comlrl.update.importance import ImportanceWeightedSampler
from comlrl.update.policy_update import PolicyUpdate
from tests.support.fake_vllm import FakeVLLM, client
from tests.support.fakes import task
from tests.support.gradients import fast
from tests.support.plain import relative
from tests.support.tiny_models import config
from tests.support.tiny_models import team as team_of
from tests.support.trees import node

EOS, VOCABULARY, LENGTH = 0, 7, 3
PROMPT, DRAWS = (3, 5, 1), 3000
LATENT = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
Sequence_ = tuple[int, ...]


@functools.cache
def seven(kind: str) -> str:
    """A model folder with a vocabulary of 7."""
    path = Path(tempfile.mkdtemp(prefix=f"seven_{kind}_"))
    torch.manual_seed(3)
    tokens = {
        "vocab_size": VOCABULARY,
        "eos_token_id": EOS,
        "pad_token_id": 6,
        "bos_token_id": None,
    }
    qwen = Qwen2Config(
        **tokens, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, initializer_range=0.5,
        tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    gpt2 = GPT2Config(
        **tokens, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5
    )
    AutoModelForCausalLM.from_config({"qwen2": qwen, "gpt2": gpt2}[kind]).save_pretrained(path)
    words = {"<eos>": EOS, **{f"w{i}": i for i in range(1, 6)}, "<pad>": 6}
    core = Tokenizer(models.WordLevel(words, unk_token="w1"))
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(path)
    return str(path)


def layer_of(kind: str) -> HeterogeneousLayer:
    """SHPPO's, that does something."""
    torch.manual_seed(5)
    layer = HeterogeneousLayer(16, len(LATENT), 4).double()
    torch.nn.init.normal_(layer.B.weight)
    return layer


class Way:
    """A team of one on the model of 7 tokens, and how it is read."""

    def __init__(self, name: str) -> None:
        kind = "gpt2" if name == "gpt2" else "qwen2"
        self.team: Team = team_of(agent_model__name=seven(kind), num_agents=1, algorithm="grpo")
        self.agent: Agent = self.team.agents[0]
        self.layer = layer_of(kind) if name == "shppo" else None
        if name == "modules":
            self.agent.fast = None
        else:
            assert (self.agent.fast is not None) == (kind == "qwen2")

    def logits(self, ids_so_far: Sequence_) -> torch.Tensor:
        """Of the next token after the prompt and this, float64."""
        ids = torch.tensor([[*PROMPT, *ids_so_far]])
        hidden = self.agent.model.get_decoder()(input_ids=ids).last_hidden_state[0, -1:]
        if self.layer is not None:
            hidden = self.layer(hidden, LATENT[None])
        return self.agent.model.get_output_embeddings()(hidden)[0]

    def parameters(self) -> list[torch.nn.Parameter]:
        more = [] if self.layer is None else list(self.layer.parameters())
        return [*self.agent.parameters(), *more]

    def sample(self, sampling: Sampling) -> dict[Sequence_, Completion]:
        """All different completions of many."""
        head = self.layer
        generator = Generator(self.team, head=head)
        keys = tuple((9, g) for g in range(DRAWS))
        asked = Request(PROMPT, keys, latent_K=None if head is None else LATENT)
        with torch.no_grad():
            ((completions,),) = generator.sample([[asked]], sampling)
        return {completion.token_ids: completion for completion in completions}


def allowed(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The ``top_k`` likeliest tokens, of these the fewest with ``top_p`` of the mass."""
    p = (logits / sampling.temperature).softmax(-1)
    ranked = p.argsort(descending=True)[: sampling.top_k].tolist()
    total, mass, left = sum(p[t] for t in ranked), 0.0, []
    for token in ranked:
        if sampling.top_p is not None and mass >= sampling.top_p * total:
            break
        left.append(token)
        mass += p[token]
    return left


def expected_reward(
    way: Way,
    sampling: Sampling,
    reward: Callable[[Sequence_], float],
    sampled_by: Way | None = None,
):
    """J = Σ_y π(y) r(y) with π over what truncation leaves, with its gradient; π(y) of each y.
    ``sampled_by``: whose probabilities decide what is left."""
    chances: dict[Sequence_, torch.Tensor] = {}

    def go_on(sequence: Sequence_, chance: torch.Tensor) -> None:
        logits = way.logits(sequence)
        left = allowed((sampled_by or way).logits(sequence).detach(), sampling)
        step = (logits[left] / sampling.temperature).softmax(-1)
        for token, p in zip(left, step, strict=True):
            longer = (*sequence, token)
            if token == EOS or len(longer) == LENGTH:
                chances[longer] = chance * p
            else:
                go_on(longer, chance * p)

    go_on((), torch.ones((), dtype=torch.float64))
    value = sum(p * reward(sequence) for sequence, p in chances.items())
    return value, {sequence: p.item() for sequence, p in chances.items()}


def reward(sequence: Sequence_) -> float:
    """Any number that two sequences do not share."""
    return sum((at + 1.7) * token for at, token in enumerate(sequence, 1)) % 5


def gradient_of(way: Way) -> torch.Tensor:
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in way.parameters()]
    found = torch.cat([part.flatten() for part in zeros])
    for parameter in way.parameters():
        parameter.grad = None
    return found


def by_magrpo(
    way: Way,
    completions: Sequence[Completion],
    weights: Sequence[float],
    sampling: Sampling,
    entropy_coef: float = 0.0,
):
    """∇L of the trainer's own update on a node with these completions, Â_g = G · weight."""
    count = len(completions)
    turn = AgentTurn((), PROMPT, tuple(completions))
    root = node([turn], [count * w for w in weights])
    tree = Tree(task("A"), (root,), "align", None)
    keys = {"num_generations": count, "advantage": "raw", "entropy_coef": entropy_coef}
    section = config("grpo", num_agents=1, **keys).section
    ((gradient,),) = fast(way.team, section, [tree], sampling=sampling)
    return gradient


def by_ratios(
    way: Way, completions: Sequence[Completion], weights: Sequence[float], sampling: Sampling
):
    """∇L of PPO's and SHPPO's policy, whose first ratios must be 1; Â of a token = A · weight."""
    section = config("shppo", entropy_coef=0.0).section
    row = Row.from_completions(
        PROMPT, completions, [1.0] * len(completions), range(len(completions))
    )
    head = way.layer

    def says(batch: TokenBatch):
        latents = None if head is None else LATENT.expand(int(batch.action_mask_RL.sum()), -1)
        return action_logprobs(
            way.agent, batch, sampling.temperature, head=head, head_input_A=latents
        )

    policy = PolicyUpdate(section, way.team, way.agent, says, lambda agent, batch: says(batch))
    tokens = sum(len(completion.token_ids) for completion in completions)
    for number, weight in enumerate(weights):
        own = torch.tensor([tokens * weight], dtype=torch.float64)
        policy.advantage.of_completion[number] = own.expand(len(completions[number].token_ids))
    found = []

    class Recorder:
        parameters = way.parameters()

        def zero(self) -> None:
            for parameter in self.parameters:
                parameter.grad = None

        def step(self, progress: float) -> float:
            found.append(gradient_of(way))
            return 0.0

    sums = Sums()
    with way.team.acting(0):
        policy.update([row], [Recorder()], sums, 0.0)  # type: ignore[list-item]
    assert sums.maxima["ratio_max"] == 1.0
    return found[0]


SAMPLINGS = [
    Sampling(1.0, LENGTH, top_p=0.7, max_support=VOCABULARY),
    Sampling(0.8, LENGTH, top_k=3, max_support=VOCABULARY),
    Sampling(1.2, LENGTH, top_p=0.8, top_k=4, max_support=2),  # most sets are thresholds
    Sampling(1.2, LENGTH, top_p=0.8, max_support=1),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["decoder", "modules", "gpt2", "shppo"])
def test_the_gradient_is_that_of_the_policy_that_acted(name, sampling):
    way = Way(name)
    value, chances = expected_reward(way, sampling, reward)
    value.backward()
    exact = gradient_of(way)
    found = way.sample(sampling)
    assert found.keys() == chances.keys() and 3 < len(found) < VOCABULARY**LENGTH
    assert sum(chances.values()) == pytest.approx(1, abs=1e-12)
    completions = list(found.values())
    weights = [chances[c.token_ids] * reward(c.token_ids) for c in completions]
    of_all = [replace(completion, support=None) for completion in completions]
    for by in [by_ratios] if name == "shppo" else [by_magrpo, by_ratios]:
        assert relative(by(way, completions, weights, sampling), -exact) < 1e-9
        assert relative(by(way, of_all, weights, sampling), -exact) > 0.05


@pytest.mark.sample(4)
@pytest.mark.parametrize("sampling", [Sampling(0.8, 1), *SAMPLINGS[:3]], ids=str)
@pytest.mark.parametrize("name", ["decoder", "modules", "gpt2"])
def test_the_entropy_bonus_is_the_gradient_of_the_entropy(name, sampling):
    """Of completions of one token: −∇(J + c H), J and H summed up over all tokens."""
    way, coef = Way(name), 0.7
    sampling = replace(sampling, max_new_tokens=1)
    logits = way.logits(())
    left = allowed(logits.detach(), sampling)
    chance = (logits[left] / sampling.temperature).softmax(-1)
    entropy = -(chance * chance.log()).sum()
    expected = sum(p * reward((token,)) for token, p in zip(left, chance, strict=True))
    (expected + coef * entropy).backward()
    exact = gradient_of(way)
    found = way.sample(sampling)
    completions = [found[(token,)] for token in left]
    weights = [p * reward(c.token_ids) for p, c in zip(chance.tolist(), completions, strict=True)]
    assert relative(by_magrpo(way, completions, weights, sampling, coef), -exact) < 1e-9
    assert relative(by_magrpo(way, completions, weights, sampling), -exact) > 0.01


# By a server that returns what truncation leaves


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = FakeVLLM(Way("decoder").team)
    fake.replays = True
    yield fake.start()
    fake.stop()


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_the_gradient_over_what_a_server_left(server, tmp_path, sampling):
    """The server's weights are those from before an update: −∇ Σ_y π(y) r(y), π the trained policy
    over the sets that the server chose from, while μ is what drew."""
    way, before = Way("decoder"), Way("decoder")
    sampler = client(way.team, server, tmp_path, sampling=sampling)
    corrected = ImportanceWeightedSampler(way.team, sampler, cap=1e9)
    asked = [[Request(PROMPT, tuple((9, g) for g in range(DRAWS)))]]
    held = sampler.hold()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in way.agent.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(0.2 * noise)
    ((drawn_G,),) = held.sample(asked, sampling)
    sampler.close()
    root = node([AgentTurn((), PROMPT, drawn_G)])
    (tree,) = corrected.weigh([Tree(Task("t"), (root,), "align", None)], sampling)
    completions = tree.nodes[0].agents_N[0].completions_G
    found = {completion.token_ids: completion for completion in completions}
    _, drawn = expected_reward(before, sampling, reward)
    value, chances = expected_reward(way, sampling, reward, sampled_by=before)
    value.backward()
    exact = gradient_of(way)
    assert found.keys() == drawn.keys() == chances.keys() and len(found) > 3
    for ids, completion in found.items():
        assert completion.support.counts_L.tolist() == [
            len(allowed(before.logits(ids[:at]).detach(), sampling)) for at in range(len(ids))
        ]
        assert completion.importance == pytest.approx(chances[ids] / drawn[ids], rel=1e-5)
    weights = [drawn[ids] * reward(ids) for ids in found]
    assert relative(by_magrpo(way, list(found.values()), weights, sampling), -exact) < 1e-5
    of_all = [replace(completion, support=None) for completion in found.values()]
    assert relative(by_magrpo(way, of_all, weights, sampling), -exact) > 0.05
