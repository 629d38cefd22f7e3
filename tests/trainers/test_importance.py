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

from comlrl.models.pretrained import build_team
from comlrl.models.team import Team
from comlrl.rollout.grow import Rollout
from comlrl.rollout.overlap import OverlappedRollout
from comlrl.rollout.vllm.sampler import VLLMSampler
from comlrl.rollout.vllm.servers import Servers
from comlrl.trainers.magrpo import MAGRPOTrainer
from comlrl.trainers.ppo import PPOTrainer
from comlrl.types import Completion, Message, Request, Reward, Sampling, Score, Tree
from comlrl.update.importance import ImportanceWeightedSampler
from tests.support.fake_vllm import FakeVLLM
from tests.support.fakes import PROMPTS, FakeTransition, task
from tests.support.tiny_models import config, exact_norms
from tests.support.tiny_trainers import rolled

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
            for parameter in agent.named().values():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(scale * noise)


def logprob(
    agents: Team, index: int, ids: tuple[int, ...], prompt: tuple[int, ...] = PROMPT
) -> torch.Tensor:
    """log π of one completion, written out."""
    with agents.acting(index) as agent:
        logits = agent.model(torch.tensor([[*prompt, *ids]])).logits[0]
    chosen = (logits[len(prompt) - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
    return chosen.gather(-1, torch.tensor(ids)[:, None]).sum()


class Everything:
    """A sampler that gives each pair of completions once, as one that draws by ``drawn_N``."""

    def __init__(self, drawn_N: Sequence[dict[tuple[int, ...], float]]) -> None:
        self.drawn_N = drawn_N

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return PROMPT

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return True

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        return [str(token) for token in token_ids]

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


def gradients(algorithm: str, agents: Team, trees: Sequence[Tree], folder: Path, **given: object):
    """Each trained agent's, of the trainer's first update on these trees."""
    keys = {"advantage": "raw"} if algorithm == "magrpo" else {
        "normalize_advantages": False, "discount": 1.0, "gamma_token": 1.0, "gae_lambda": 1.0,
        "ppo_epochs": 1,
    }  # fmt: skip
    section = config(algorithm, agent_model__name=str(folder), **RAW | keys | given).section
    rollout = SimpleNamespace(seed=1, returns_by_agent=False)
    trainer_of = MAGRPOTrainer if algorithm == "magrpo" else PPOTrainer
    trainer = trainer_of(section, agents, rollout, None, SAMPLING)
    trainer.optimizers = [Optimizer(agents.agents[index]) for index in agents.trained]
    step = rolled(trees, section.discount)
    trainer.learn(step, trainer.credit(step))
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


@pytest.mark.parametrize("algorithm", ["magrpo", "ppo"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_the_expected_gradient_beside_a_frozen_agent_is_exact(algorithm, frozen, folder):
    """The trained agent follows −∇ of its expected reward beside the partner as it stands, over
    all 169 pairs; the partner has no gradient."""
    close = {"magrpo": 1e-9, "ppo": 1e-6}[algorithm]
    agents = built(folder, agents={("aux", "main")[frozen]: {"train": False}})
    noisy(agents, 0.4)
    drawn_N = chances(agents)
    (found,) = gradients(algorithm, agents, grown(Everything(drawn_N), agents, drawn_N), folder)
    wanted = expected(agents, drawn_N, 1 - frozen, 1e9)
    assert wanted.norm() > 0 and (found - wanted).norm() < close * wanted.norm()
    assert all(p.grad is None for p in agents.agents[frozen].named().values())


def token_terms(agents: Team, index: int, ids: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """k3 and the entropy of a completion, summed over its tokens, written out."""
    whole, chosen = torch.tensor([[*PROMPT, *ids]]), torch.tensor(ids)[:, None]
    with agents.acting(index) as agent:
        policy_LV = (agent.model(whole).logits[0, len(PROMPT) - 1 : -1] / 0.8).log_softmax(-1)
    with agents.reference(index) as agent, torch.no_grad():
        base_LV = (agent.model(whole).logits[0, len(PROMPT) - 1 : -1] / 0.8).log_softmax(-1)
    rho = (base_LV - policy_LV).gather(-1, chosen)
    return (rho.exp() - rho - 1).sum(), -(policy_LV.exp() * policy_LV).sum()


@pytest.mark.parametrize("algorithm", ["magrpo", "ppo"])
def test_the_kl_and_entropy_terms_are_the_trained_policy_s_too(algorithm, folder):
    """μ draws every completion alike: a mean over the pairs is an expectation under it."""
    agents = built(folder)
    noisy(agents, 0.4)
    uniform = [dict.fromkeys(WRITTEN, -math.log(len(WRITTEN)))] * 2
    keys = {"kl_coef": 3.0, "entropy_coef": 2.0} | ({"kl_in": "loss"} if algorithm == "ppo" else {})
    corrected = ImportanceWeightedSampler(agents, Everything(uniform), 1e9)
    found = gradients(algorithm, agents, grown(corrected, agents, uniform), folder, **keys)
    for index, own in enumerate(found):
        total = torch.zeros((), dtype=torch.float64)
        for ids in WRITTEN:
            kl, entropy = token_terms(agents, index, ids)
            total = total + logprob(agents, index, ids).detach().exp() * (3 * kl - 2 * entropy)
        terms = torch.autograd.grad(total, agents.agents[index].parameters())
        wanted = expected(agents, uniform, index, 1e9) + torch.cat([g.flatten() for g in terms])
        assert (own - wanted).norm() < 1e-6 * wanted.norm()


# Two turns of one token each, sampled by a server while weights move: 16 pairs at each of 17 nodes.

LATER = (2, 3, 1, 2)  # the second turn's prompt
SINGLE = list(itertools.product(range(SIZE), repeat=2))  # the pairs, as token ids
TEXTS = ("", "a", "b", "c")


class Enumerating(FakeVLLM):
    """Answers a request with each pair's own token, by the adapter that it names."""

    def _choices(self, model, ids, params):
        adapter = self.adapters[model]
        with self._lock, torch.no_grad():
            self.team.agents[0].load_tensors(load_file(adapter / "adapter_model.safetensors"))
            logprob_T = [float(logprob(self.team, 0, (t,), tuple(ids))) for t in range(SIZE)]
        for number, pair in enumerate(SINGLE):
            token = pair[int(adapter.name.split("-")[0].removeprefix("agent_"))]
            drawn = {"token_logprobs": [logprob_T[token]]}
            yield {"index": number, "token_ids": [token], "logprobs": drawn}


class Client(VLLMSampler):
    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return PROMPT if len(prompt) == 1 else LATER


def worth(*pairs: tuple[int, ...]) -> float:
    """Of a turn's pair, after those before it."""
    return 1 + sum((t + 2) * (3 * a + 5 * b + a * b) for t, (a, b) in enumerate(pairs)) % 7


class Weighted(Reward):
    """What a pair is worth, times 16 and its probability at each turn: means are expectations."""

    def __init__(self, chance_T: Sequence[dict[tuple[int, ...], float]]) -> None:
        self.chance_T = chance_T

    def score(self, actions):
        pairs = [
            [tuple(map(TEXTS.index, turn.completions_N)) for turn in action.as_past]
            for action in actions
        ]
        return [
            Score(
                worth(*own) * math.prod(16 * c[p] for c, p in zip(self.chance_T, own, strict=False))
            )
            for own in pairs
        ]


def expected_of_turns(agents: Team, chance_T, before_NT, index: int) -> torch.Tensor:
    """−∇ of MAGRPO's loss where μ acts at both turns: each completion has its own π / μ, states
    and futures are μ's."""
    first, later = chance_T
    own_T = [[logprob(agents, index, (t,), p) for t in range(SIZE)] for p in (PROMPT, LATER)]
    total = torch.zeros((), dtype=torch.float64)

    def term(turn: int, pair: tuple[int, ...]) -> torch.Tensor:
        own = own_T[turn][pair[index]]
        return (own.detach() - before_NT[index][turn][pair[index]]).exp() * own

    for pair in SINGLE:
        future = sum(later[after] * worth(pair, after) for after in SINGLE)
        total = total - first[pair] * (worth(pair) + future) * term(0, pair)
        for after in SINGLE:
            total = total - 16 * first[pair] * later[after] * worth(pair, after) * term(1, after)
    gradients = torch.autograd.grad(total / 17, agents.agents[index].parameters())
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_what_was_sampled_before_an_update_is_corrected_for_it(folder, tmp_path):
    """All turns are grown by a server in a thread, and its weights are those of then."""
    keys = {"num_turns": 2, "num_generations": 16, "max_new_tokens": 1, "discount": 1.0}
    agents, sampling = built(folder, **keys), Sampling(0.8, 1)
    noisy(agents, 0.4)
    server = Enumerating(built(folder, num_agents=1)).start()
    client = Client(agents, [Servers([server.url], 60)] * 2, tmp_path, 64, sampling)
    with torch.no_grad():
        before_NT = [
            [[float(logprob(agents, i, (t,), p)) for t in range(SIZE)] for p in (PROMPT, LATER)]
            for i in range(2)
        ]
    chance_T = [
        {(a, b): math.exp(before_NT[0][t][a] + before_NT[1][t][b]) for a, b in SINGLE}
        for t in range(2)
    ]
    corrected = ImportanceWeightedSampler(agents, client, 1e9)
    present = Rollout(corrected, Weighted(chance_T), FakeTransition(), PROMPTS, seed=1)
    rollout = OverlappedRollout(
        present,
        client,
        present.transition,
        corrected.weigh,
    )
    shape = config(**RAW | keys).section.shape
    rollout.grow([task()], shape, sampling, ("train", 1))
    assert corrected.metrics()["importance/ratio_max"] == pytest.approx(1, abs=1e-9)
    rollout.begin([task()], ("train", 2))
    noisy(agents, -0.2)
    trees = rollout.grow([task()], shape, sampling, ("train", 2))
    found = gradients("magrpo", agents, trees, folder, **keys)
    client.close()
    server.stop()
    for index, own in enumerate(found):
        wanted = expected_of_turns(agents, chance_T, before_NT, index)
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


def test_another_policy_than_the_trained_one_is_reported_once(drawn, capsys):
    """By |log ratio| a token, also where the mean ratio is 1, as it is in expectation."""
    agents, _ = drawn
    tokens = sum(len(p[i]) for p in PAIRS for i in range(2))
    for less, times in ((0.04, 0), (0.06, 1)):
        signs, drawn_N = itertools.cycle((1, -1)), []
        for logprob_of in chances(agents):
            drawn_N.append({x: own - next(signs) * less * len(x) for x, own in logprob_of.items()})
        corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), 2.0)
        for _ in range(2):
            corrected.sample([[Request(PROMPT, ((),) * len(PAIRS))]] * 2, SAMPLING)
            assert corrected.sums.totals["tokens"] == tokens
            assert corrected.sums.totals["distance"] / tokens == pytest.approx(less, rel=1e-9)
            assert corrected.metrics()["importance/ratio_mean"] == pytest.approx(1, abs=0.03)
        warnings = capsys.readouterr().err
        assert warnings.count(f"differ from the trained policy's by {less:.2g} a token") == times


def test_small_differences_of_long_completions_are_reported(drawn, capsys):
    """0.04 a token are no other policy by themselves; over 20 tokens they halve a weight."""
    agents, drawn_N = drawn
    corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), 2.0)
    for length, times in ((15, 0), (20, 1)):
        corrected.sums.add(completions=3, present=3, tokens=3 * length, distance=3 * length * 0.04)
        corrected.metrics()
        assert capsys.readouterr().err.count("0.04 a token and 0.8 a completion") == times


def test_older_weights_are_no_other_policy(drawn, capsys):
    agents, drawn_N = drawn
    trees = grown(Everything(drawn_N), agents, drawn_N)
    corrected = ImportanceWeightedSampler(agents, Everything(drawn_N), 2.0)
    corrected.weigh(trees, SAMPLING)
    assert corrected.metrics()["importance/ratio_max"] > 1.2
    assert not capsys.readouterr().err
    corrected.sample([[Request(PROMPT, ((),) * len(PAIRS))]] * 2, SAMPLING)
    corrected.metrics()
    assert "more than rounding does" in capsys.readouterr().err
