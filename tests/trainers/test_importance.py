"""Samples of another policy than the trained one, by enumeration: of at most two tokens out of a
vocabulary of four there are 13 completions, and 169 pairs of them.

Each pair is sampled once and earns its reward times the probability that the sampling policies μ
give it, times 169: what the trainer takes for a mean over siblings is then the expectation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from comlrl.loop.steps import Step
from comlrl.models.loading import build_team
from comlrl.models.team import Team
from comlrl.rollout.grow import Rollout
from comlrl.rollout.vllm_sampler import VLLMSampler
from comlrl.rollout.vllm_servers import Servers
from comlrl.types import Completion, Message, Request, Reward, Sampling, Score, Tree
from comlrl.update.importance import ImportanceWeightedSampler
from tests.support.fake_vllm import FakeVLLM
from tests.support.fakes import PROMPTS, FakeTransition, task
from tests.support.tiny_models import config, exact_norms
from trainers.magrpo import MAGRPOTrainer
from trainers.ppo import PPOTrainer

EOS, SIZE, LONGEST, PROMPT = 0, 4, 2, (1, 2, 3)
SAMPLING = Sampling(0.8, LONGEST)
WRITTEN = [(EOS,), *((a, b) for a in range(1, SIZE) for b in range(SIZE))]
PAIRS = list(itertools.product(WRITTEN, repeat=2))
RAW = {
    "num_agents": 2, "num_generations": len(PAIRS), "max_new_tokens": LONGEST, "lora__r": 2,
    "agent_model__torch_dtype": "float64",
}  # fmt: skip


def reward(pair: tuple[tuple[int, ...], ...]) -> float:
    """Any number that depends on both."""
    first, second = (sum((i + 2) * t for i, t in enumerate(ids)) for ids in pair)
    return 1 + (3 * first + 5 * second + first * second) % 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("four_tokens")
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=SIZE, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=8, eos_token_id=EOS, pad_token_id=EOS,
        bos_token_id=None, initializer_range=0.6, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"e": 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="e", pad_token="e").save_pretrained(
        path
    )
    return path


def noisy(agents: Team, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for agent in agents.agents:
            for parameter in agent.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(scale * noise)


def logprob(agents: Team, index: int, ids: tuple[int, ...]) -> torch.Tensor:
    """log π of one completion, written out."""
    with agents.acting(index) as agent:
        logits = agent.model(torch.tensor([[*PROMPT, *ids]])).logits[0]
    chosen = (logits[len(PROMPT) - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
    return chosen.gather(-1, torch.tensor(ids)[:, None]).sum()


class Everything:
    """A sampler that gives each pair of completions once, as one that draws by ``drawn_N``."""

    def __init__(self, drawn_N: Sequence[dict[tuple[int, ...], float]]) -> None:
        self.drawn_N = drawn_N

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return PROMPT

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return True

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        return [
            [tuple(Completion("", p[i], p[i][-1] == EOS, self.drawn_N[i][p[i]]) for p in PAIRS)]
            for i in range(2)
        ]


class Expectation(Reward):
    def __init__(self, drawn_N: Sequence[dict[tuple[int, ...], float]]) -> None:
        self.drawn_N = drawn_N

    def score(self, actions):
        first, second = self.drawn_N
        return [
            Score(len(PAIRS) * math.exp(first[pair[0]] + second[pair[1]]) * reward(pair))
            for pair in PAIRS
        ]


def built(folder: Path, **keys: object) -> Team:
    agents = build_team(config(**RAW | {"agent_model__name": str(folder)} | keys), device="cpu")
    exact_norms(agents.agents[0].model)
    return agents


@torch.no_grad()
def chances(agents: Team) -> list[dict[tuple[int, ...], float]]:
    """log π of each agent's completions."""
    return [{ids: float(logprob(agents, i, ids)) for ids in WRITTEN} for i in range(2)]


@pytest.fixture
def drawn(folder: Path):
    """The trained team, and log μ of each agent's completions under moved weights."""
    agents = built(folder)
    noisy(agents, 0.4)
    drawn_N = chances(agents)
    noisy(agents, -0.2)
    return agents, drawn_N


def expected(agents: Team, drawn_N, index: int, cap: float) -> torch.Tensor:
    """−∇ of the trained agent's expected reward beside a team-mate that acts by its μ; with a cap,
    of the same with ratios cut there."""
    logprob_of = {ids: logprob(agents, index, ids) for ids in WRITTEN}
    total = torch.zeros((), dtype=torch.float64)
    for pair in PAIRS:
        own = logprob_of[pair[index]]
        ratio = (own.detach() - drawn_N[index][pair[index]]).exp().clamp(max=cap)
        chance = math.exp(drawn_N[0][pair[0]] + drawn_N[1][pair[1]])
        total = total - chance * ratio * reward(pair) * own
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(total, agents.agents[index].parameters())]
    )


class Optimizer:
    """Keeps the first gradient that it is to follow, and follows none."""

    learning_rate = 0.0

    def __init__(self, agent) -> None:
        self.parameters, self.found = agent.parameters(), None

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, progress: float) -> float:
        if self.found is None:
            self.found = torch.cat([p.grad.flatten() for p in self.parameters])
        return 0.0


def gradients(algorithm: str, agents: Team, trees: Sequence[Tree], folder: Path):
    """Each agent's, of the trainer's first update on these trees."""
    keys = {"advantage": "raw"} if algorithm == "magrpo" else {
        "normalize_advantages": False, "discount": 1.0, "gamma_token": 1.0, "gae_lambda": 1.0,
        "ppo_epochs": 1,
    }  # fmt: skip
    section = config(algorithm, agent_model__name=str(folder), **RAW, **keys).section
    rollout = SimpleNamespace(seed=1, grow=lambda *_: trees)
    loop = SimpleNamespace(
        gather=lambda *_: SimpleNamespace(
            trees=trees, scored=len(PAIRS), span=SimpleNamespace(at=lambda *_: 0.0)
        ),
        record=lambda *_, **__: None,
    )
    trainer_of = MAGRPOTrainer if algorithm == "magrpo" else PPOTrainer
    trainer = trainer_of(section, agents, rollout, loop, SAMPLING)
    trainer.optimizers = [Optimizer(agent) for agent in agents.agents]
    trainer.step(Step(1, 0, [tree.task for tree in trees]))
    tokens = sum(len(first) for first, _ in PAIRS)  # PPO's mean is over tokens, of each agent alike
    scale = 1 if algorithm == "magrpo" else tokens / len(PAIRS)
    return [scale * optimizer.found for optimizer in trainer.optimizers]


def grown(sampler, agents: Team, drawn_N) -> list[Tree]:
    rollout = Rollout(sampler, Expectation(drawn_N), FakeTransition(), PROMPTS, seed=1)
    shape = config(**RAW).section.shape
    return rollout.grow([task()], shape, SAMPLING, ("train", 1))


@pytest.mark.parametrize("algorithm", ["magrpo", "ppo"])
@pytest.mark.parametrize("cap", [1e9, 1.5])
def test_the_expected_gradient_is_the_trained_policy_s(algorithm, cap, drawn, folder):
    """With 1e9, which cuts nothing, exactly; uncorrected it is another one."""
    close = {"magrpo": 1e-9, "ppo": 1e-6}[algorithm]  # PPO's advantages are float32
    agents, drawn_N = drawn
    corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), cap)
    found = gradients(algorithm, agents, grown(corrected, agents, drawn_N), folder)
    wanted = [expected(agents, drawn_N, index, cap) for index in range(2)]
    plain = gradients(algorithm, agents, grown(Everything(drawn_N), agents, drawn_N), folder)
    for own, right, wrong in zip(found, wanted, plain, strict=True):
        assert (own - right).norm() < close * right.norm()
        assert (wrong - right).norm() > 0.01 * right.norm()


class Enumerating(FakeVLLM):
    """Answers a request with each pair's own completion, as the adapter that it names says them."""

    def _choices(self, model, ids, params):
        adapter = self.adapters[model]
        with self._lock, torch.no_grad():
            self.team.agents[0].load_tensors(load_file(adapter / "adapter_model.safetensors"))
            logprob_of = {ids: float(logprob(self.team, 0, ids)) for ids in WRITTEN}
        for number, pair in enumerate(PAIRS):
            ids = pair[int(adapter.name.removeprefix("agent_"))]
            drawn = [logprob_of[ids], *[0.0] * (len(ids) - 1)]
            yield {"index": number, "token_ids": ids, "logprobs": {"token_logprobs": drawn}}


class Client(VLLMSampler):
    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return PROMPT


def test_what_was_sampled_before_an_update_is_corrected_for_it(folder, tmp_path):
    """Asked ahead of a server; the adapters move; then it is learned from."""
    agents = built(folder)
    noisy(agents, 0.4)
    server = Enumerating(built(folder, num_agents=1)).start()
    client = Client(agents, [Servers([server.url], 60)] * 2, tmp_path, 64, SAMPLING)
    drawn_N = chances(agents)
    corrected, shape = ImportanceWeightedSampler(agents, client, 1e9), config(**RAW).section.shape
    rollout = Rollout(corrected, Expectation(drawn_N), FakeTransition(), PROMPTS, seed=1)
    asked = [task()], shape, SAMPLING, ("train", 2)
    client.ask_ahead(rollout.first_requests(*asked), SAMPLING)
    noisy(agents, -0.2)
    found = gradients("magrpo", agents, rollout.grow(*asked), folder)
    client.close()
    server.stop()
    for index, own in enumerate(found):
        wanted = expected(agents, drawn_N, index, 1e9)
        assert (own - wanted).norm() < 1e-9 * wanted.norm()
    assert corrected.metrics()["importance/ratio_max"] > 1.1


def test_the_metrics_of_the_ratios(drawn):
    agents, drawn_N = drawn
    corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), 1.5)
    corrected.sample([[Request(PROMPT, ((),) * len(PAIRS))]] * 2, SAMPLING)
    with torch.no_grad():
        ratios = torch.stack([
            (logprob(agents, i, pair[i]) - drawn_N[i][pair[i]]).exp()
            for pair in PAIRS for i in range(2)
        ])  # fmt: skip
    metrics = corrected.metrics()
    assert metrics["importance/ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-9)
    assert metrics["importance/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-9)
    share = float((ratios > 1.5).double().mean())
    assert metrics["importance/truncated_share"] == share and 0 < share < 1


def test_a_mean_ratio_far_from_1_is_reported_once(drawn, capsys):
    agents, _ = drawn
    for less, times in ((0.1, 0), (-0.3, 1)):  # ratios 1.105, and 0.741
        drawn_N = [
            {ids: own - less for ids, own in logprob_of.items()} for logprob_of in chances(agents)
        ]
        corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), 2.0)
        for _ in range(2):
            corrected.sample([[Request(PROMPT, ((),) * len(PAIRS))]] * 2, SAMPLING)
            mean = corrected.metrics()["importance/ratio_mean"]
            assert mean == pytest.approx(math.exp(less), rel=1e-9)
        output = capsys.readouterr().err
        assert output.count("warning: the mean importance ratio is 0.741, outside") == times
