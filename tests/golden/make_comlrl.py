"""Golden numbers of comlrl 1.4.3 (OpenMLRL, BSD-3-Clause), which is called as ours is: run it in a
separate environment, from this folder, where the repository is not on the path.

    python3 -m venv env
    env/bin/pip install comlrl==1.4.3 torch transformers
    env/bin/python make_comlrl.py > comlrl.json

Its trainers are made without their ``__init__``, which loads models and starts loggers; the methods
that are asked for numbers are its own.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import toy
import transformers
from comlrl.models.actor_critic import CausalLMWithValueHead
from comlrl.trainers.actor_critic.iac import IACTrainer
from comlrl.trainers.preference.collaboration import joint_policy_gradient_loss
from comlrl.trainers.preference.madpo import MADPOTrainer
from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer


class Keep:
    """An optimizer that keeps each step's gradient and moves nothing."""

    def __init__(self, module: Any) -> None:
        self.module, self.found = module, []

    def zero_grad(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def step(self) -> None:
        self.found.append(toy.gradient(self.module))


def magrpo(agents: list[Any], **settings: Any) -> Any:
    made = MAGRPOTrainer.__new__(MAGRPOTrainer)
    given = {
        "num_turns": 2, "num_generations": 2, "max_new_tokens": 8, "joint_mode": "align",
        "early_termination_threshold": None, "discount": 0.5, "rollout_buffer_size": 99,
        "advantage_normalization": False,
    }  # fmt: skip
    made.args = SimpleNamespace(**(given | settings))
    made.agents, made.num_agents = agents, len(agents)
    made.env_step, made.advantage_mode = 0, made.args.__dict__.get("advantage_mode", "mean")
    made.rollout_buffers = [[] for _ in agents]
    made.optimizers = [Keep(agent) for agent in agents]
    made.tokenizers = [
        SimpleNamespace(pad_token="<pad>", pad_token_id=257, eos_token_id=256, bos_token_id=None)
        for _ in agents
    ]
    return made


def tree(mode: str, more: int = 0, **settings: Any) -> dict[str, Any]:
    """Returns and gradients of each turn's update. ``more``: tokens after each completion."""
    trainer = magrpo([toy.model(0), toy.model(1)], joint_mode=mode, **settings)
    nodes = iter(range(99))

    def generate(agent: Any, batch: Any, agent_idx: int, external_prompts: Any, **_: Any) -> dict:
        node = int(external_prompts or 0)
        completions = [toy.completion(node, agent_idx, g) + [9] * more for g in range(2)]
        return {
            "prompts": ["p"],
            "completions": [[f"{node} {g}" for g in range(2)]],
            "prompt_input_ids": torch.tensor([toy.prompt(node)]),
            "completion_input_ids": [[torch.tensor(ids) for ids in completions]],
        }

    def scored(*texts_N: list[str]) -> list[float]:
        rewards = []
        for texts in zip(*texts_N, strict=True):
            node, *action = int(texts[0].split()[0]), *(int(t.split()[1]) for t in texts)
            rewards.append(toy.reward(node, tuple(action)))
        return rewards

    trainer._run_agent_tasks = lambda run, **_: [run(0), run(1)]
    trainer._generate_completions_with_external_prompts = generate
    trainer._compute_rewards = lambda prompts, texts_N, batch_items: scored(*texts_N)
    trainer.reward_func, trainer.reward_processor = scored, lambda r: r
    next(nodes)
    trainer.external_transition = lambda **_: [str(node := next(nodes)), str(node)]
    trainer._train_step_returns({"prompt": "p"})
    returns = [
        [{"turn": s.turn_idx + 1, "returns": s.returns} for s in buffer]
        for buffer in trainer.rollout_buffers
    ]
    for i, buffer in enumerate(trainer.rollout_buffers):
        trainer._process_buffer(i, buffer)
    return {"returns": returns, "gradients": [o.found for o in trainer.optimizers]}


def joint_policy(normalize: bool) -> dict[str, Any]:
    """One policy that writes all that the team writes; one turn."""
    trainer = magrpo([toy.model(2)], advantage_normalization=normalize)
    (agent,) = trainer.agents
    batch = {
        "prompt_input_ids": torch.tensor([toy.prompt(0)]),
        "completion_input_ids": [[torch.tensor(toy.completion(0, 0, g)) for g in range(3)]],
    }
    loss = joint_policy_gradient_loss(trainer, agent, batch, toy.REWARDS[0])
    loss.backward()
    return {"loss": loss.item(), "gradient": toy.gradient(agent)}


def advantages() -> dict[str, Any]:
    trainer = magrpo([])
    found = {}
    for mode in ("mean", "max", "rloo", "raw"):
        trainer.advantage_mode = mode
        found[mode] = [trainer._compute_advantages(torch.tensor(r)).tolist() for r in toy.REWARDS]
    return found


def with_head(number: int) -> Any:
    """The toy with a value head whose weights are a formula too."""
    made = CausalLMWithValueHead(toy.model(number)).double()
    projection = made.value_head.value_projection
    with torch.no_grad():
        projection.weight.copy_(0.5 * torch.cos(torch.arange(8.0, dtype=torch.float64))[None])
        projection.bias.fill_(0.1)
    return made


def actor_critic(separate: bool) -> dict[str, Any]:
    """Targets of a chain of three turns, and the gradients of one step on it."""
    trainer = IACTrainer.__new__(IACTrainer)
    trainer.args = SimpleNamespace(
        num_agents=1, num_generations=1, discount=toy.CHAIN["discount"], value_clip_range=0.2,
        value_loss_coef=0.6, use_separate_critic=separate, advantage_normalization=False,
        early_termination_threshold=None, reference_kl_enabled=False, reference_kl_coef=0.0,
    )  # fmt: skip
    actor, critic = with_head(3), with_head(4)
    trainer.agents, trainer.critics, trainer.critic_type = [actor], [critic], "v"
    trainer.agent_optimizers, trainer.critic_optimizers = [Keep(actor.model)], [Keep(critic)]
    trainer.agent_devices = [torch.device("cpu")]
    trainer._critic_device = lambda agent: torch.device("cpu")
    turns = iter(range(3))
    rewards = iter(toy.CHAIN["rewards"])

    def generate(agent: Any, prompt: str, agent_idx: int, num_ret: int) -> dict[str, Any]:
        turn = next(turns)
        ids = torch.tensor([toy.prompt(turn) + toy.completion(turn, 0, 0)])
        return {
            "prompt": prompt, "completions": ["said"], "sequences": ids,
            "attention_mask": torch.ones_like(ids), "prompt_len": len(toy.prompt(turn)),
            "response_lens": [len(toy.completion(turn, 0, 0))], "logprobs": [torch.zeros(1)],
            "values": [torch.tensor([toy.CHAIN["values"][turn]])],
        }  # fmt: skip

    trainer._generate_rollout = generate
    trainer._run_agent_tasks = lambda run, **_: [run(0)]
    trainer._resolve_turn_prompt = lambda *_, **__: "p"
    trainer.external_transition = lambda **_: ["again"]
    trainer.reward_func = lambda prompts, completions: [next(rewards)]
    trainer.reward_processor, trainer._reward_signature = (lambda r: r), None
    samples = trainer._collect_rollouts_multi_turn({"prompt": "p"}, 3)
    trainer._prepare_advantages(samples)
    bias = (critic if separate else actor).value_head.value_projection.bias
    kept: list[float] = []
    bias.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.item()))
    trainer._ac_step(0, samples)
    golden = {
        "advantages": [s.normalized_advantage.item() for s in samples],
        "targets": [s.metadata["value_target"].item() for s in samples],
        "bias": kept[-1],  # the gradient at the value head's bias, of the critic's loss alone
        "now": [
            trainer._value_for_critic_type(
                critic if separate else actor, s.full_input_ids[None], s.attention_mask[None],
                s.prompt_len, [s.response_len],
            ).item()
            for s in samples
        ],
    }  # fmt: skip
    if separate:  # else the critic's loss changes the actor too
        (golden["actor"],) = trainer.agent_optimizers[0].found
    return golden


def pairs(mode: str, limit: int | None) -> list[Any]:
    trainer = MADPOTrainer.__new__(MADPOTrainer)
    trainer.args = SimpleNamespace(pair_selection=mode, preference_pairs_per_sample=limit)
    return [trainer._select_preference_pair_indices(rewards) for rewards in toy.CANDIDATES]


def preference_losses(beta: float) -> list[float]:
    """Each agent's loss on the pairs, from what they say of them."""
    trainer = MADPOTrainer.__new__(MADPOTrainer)
    trainer.args = SimpleNamespace(dpo_beta=beta)
    trainer.num_agents, trainer.agents = 2, [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    trainer._agent_logprob_delta = lambda i, pair: torch.tensor(toy.DELTAS[pair][i])
    batch = list(range(len(toy.DELTAS)))
    deltas = trainer._detached_agent_deltas(batch)
    return [trainer._agent_preference_loss(i, batch, deltas).item() for i in range(2)]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "versions": {"comlrl": "1.4.3", "transformers": transformers.__version__},
                "align": tree("align"),
                "align, a token more": tree("align", 1),
                "cross": tree("cross"),
                "cross, a token more": tree("cross", 1),
                "crossed": tree("crossed"),
                "joint policy": joint_policy(normalize=False),
                "joint policy, normalized": joint_policy(normalize=True),
                "advantages": advantages(),
                "actor-critic": actor_critic(separate=True),
                "actor-critic, shared": actor_critic(separate=False),
                "pairs": {"all": pairs("all", None), "gap": pairs("reward_gap", 2)},
                "preference losses": preference_losses(0.7),
            },
            indent=1,
        )
    )
