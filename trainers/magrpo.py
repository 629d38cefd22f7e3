"""MAGRPO: multi-agent group relative policy optimization (arXiv 2508.04652); GRPO with N = 1.

Objective of agent i, over the nodes of an update, with its G completions y_ig at a node:

    L_i = −(1/|nodes|) Σ_nodes w_t (1/G) Σ_g Â_ig Σ_tokens log π_i(token | …)
    Â_ig = R_ig − mean_g R_ig,   R_ig = mean of R_k over the joint actions k that contain y_ig
    R_k(t) = r_k + γ · mean over the joint returns of k's child

Where each agent has its own reward (``Score.by_agent``), r_k and R_k are agent i's.

Its nodes are those at which it acts: with ``turn_order: simultaneous`` all of them. With
``sequential`` (the grouping of AT-GRPO, arXiv 2510.11062) siblings share agent, turn and what
was written before them; r_k is 0 and γ is 1 up to the turn's last agent, so that R_k of an earlier
agent is the mean reward below its completion: its expected gradient is that of the team's reward.

With ``partner_credit: optimistic`` R_ig is the maximum of R_k in the place of the mean, over the k
that contain y_ig or a sibling of the same tokens (Lauer & Riedmiller, ICML 2000). It is biased
where rewards are random. ``lenient`` is (1 − λ) mean + λ maximum, where λ falls from 1 to 0 over
the run (Panait, Sullivan & Luke, AAMAS 2006).

With ``update_epochs`` above 1 a step's nodes are gone over as often, and Â log π becomes PPO's
min(ρ Â, clip(ρ, 1 ± ε) Â), ρ = π_i / π_i,old token by token (arXiv 1707.06347, eq. 7). π_old is the
policy that sampled, read by the first pass itself, so that the first update's ratios are exactly
1 and its gradient is L_i's.

``entropy_coef`` c_H > 0 adds a bonus for the entropy H of the distribution (after temperature and
truncation) from which each token was drawn, summed over a completion's tokens as log π is:

    L_i −= c_H (1/|nodes|) Σ_nodes (1/G) Σ_g Σ_tokens H(π_i(· | …))

H is differentiated where it was reached; its advantage does not count that an action leads to
states of more entropy. For completions of one token this is the gradient of c_H · H exactly.

With ``refill`` > 0, tasks whose returns are equal among all siblings are left out of an update, and
as many further tasks are sampled in their place, at most ``refill`` times (dynamic sampling, DAPO,
arXiv 2503.14476). Tasks that the policy always or never solves then weigh less than in the data.

Departures from the paper: no division by the siblings' standard deviation unless asked for; no
importance ratio and no clip where each sample is used once (strictly on-policy); with ``handoff``
joint actions without a child are credited with the mean future of those that have one, which are
weighted by how many they are (``comlrl/credit/returns.py``);
``train_batch_size`` below the step's nodes makes several updates of a pass, of like size and each
over its own |nodes|; a sequential turn is never divided. The entropy that is logged is the
estimate −log π of the samples, with ``entropy_coef`` H itself.
"""

from __future__ import annotations

from comlrl.credit.advantages import sibling_advantages
from comlrl.loop.policy_learner import PolicyLearner
from comlrl.loop.steps import Rolled


class MAGRPOTrainer(PolicyLearner):
    """Each decision is compared with its siblings; nothing else."""

    def credit(self, rolled: Rolled) -> list[float]:
        """Compute Â of each decision."""
        section = self.section
        return [
            sibling_advantages(
                decision.returns_G,
                section.advantage,
                normalize=section.advantage_normalization,
                greedy_return=decision.greedy_return,
            )[decision.place]
            for decision in rolled.decisions.numbered
        ]
