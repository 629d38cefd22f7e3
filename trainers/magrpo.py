"""MAGRPO: multi-agent group relative policy optimization (arXiv 2508.04652); GRPO with N = 1.

Objective of agent i over the nodes of an update; y_ig are its G completions at a node:

    L_i = −(1/|nodes|) Σ_nodes w_t (1/G) Σ_g Â_ig Σ_tokens log π_i(token | …)
    Â_ig = R_ig − mean_g R_ig,   R_ig = mean of R_k over the joint actions k that contain y_ig
    R_k(t) = r_k + γ · mean over the joint returns of k's child

If agents have individual rewards (``Score.by_agent``), r_k and R_k are those of agent i.

The nodes of an agent are those at which it acts. With ``turn_order: simultaneous`` these are all
nodes. With ``sequential`` (the grouping of AT-GRPO, arXiv 2510.11062), siblings share the agent,
the turn and the text before them; r_k is 0 and γ is 1 up to the turn's last agent. R_k of an
earlier agent is then the mean reward below its completion, so its expected gradient is that of the
team's reward.

With ``partner_credit: optimistic``, R_ig is the maximum of R_k instead of the mean, over the k that
contain y_ig or a sibling with the same tokens (Lauer & Riedmiller, ICML 2000). It is biased if
rewards are random. ``lenient`` is (1 − λ) mean + λ maximum, where λ falls from 1 to 0 over the run
(Panait, Sullivan & Luke, AAMAS 2006).

With ``update_epochs`` above 1, each step makes that many passes over its nodes, and Â log π becomes
PPO's min(ρ Â, clip(ρ, 1 ± ε) Â), ρ = π_i / π_i,old per token (arXiv 1707.06347, eq. 7). π_old is
the sampling policy, evaluated during the first pass, so the first update's ratios are exactly 1 and
its gradient is that of L_i.

``entropy_coef`` c_H > 0 adds a bonus for the entropy H of the distribution (after temperature and
truncation) from which each token was drawn, summed over a completion's tokens like log π:

    L_i −= c_H (1/|nodes|) Σ_nodes (1/G) Σ_g Σ_tokens H(π_i(· | …))

H is differentiated only at the sampled states; the advantage does not credit an action for leading
to states of higher entropy. For completions of one token the gradient of c_H · H is exact.

With ``refill`` > 0, tasks whose returns are equal among all siblings are left out of an update, and
the same number of further tasks is sampled instead, at most ``refill`` times (dynamic sampling,
DAPO, arXiv 2503.14476). Tasks that the policy always or never solves then weigh less than in the
data.

Departures from the paper: no division by the siblings' standard deviation by default; no importance
ratio and no clipping if each sample is used once (strictly on-policy); with ``handoff``, joint
actions without a child are credited with the mean future return of those that have one, weighted
by their number (``comlrl/credit/returns.py``); a ``train_batch_size`` below the number of nodes in
a step splits a pass into several updates of similar size, each averaged over its own nodes, without
splitting a sequential turn. The logged entropy is the sample estimate −log π, or H itself with
``entropy_coef``.
"""

from __future__ import annotations

from comlrl.credit.advantages import sibling_advantages
from comlrl.loop.policy_learner import PolicyLearner
from comlrl.loop.steps import Rolled


class MAGRPOTrainer(PolicyLearner):
    """Policy learner whose baseline is the mean return of a decision's siblings."""

    def credit(self, rolled: Rolled) -> list[float]:
        """Compute the advantage Â of each decision."""
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
