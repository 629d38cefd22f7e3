"""Decoding by static steps, with the same tokens as ``generation`` and no waits within a step.

A step is two functions of tensors at fixed addresses, each a CUDA graph on a GPU: the draw, and the
pass of its tokens through the model (``models/fast/static_step.py``). After a draw the host reads
three numbers: rows that continue, rows whose draw needs more than the likeliest tokens, and rows
whose text may contain a stop. With graphs, the pass starts before they are read, so that the GPU
does not wait for the host. If a draw must be repeated, the pass is undone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.agent import Agent
from comlrl.models.fast import prefix_cache
from comlrl.models.fast.decoder import FastDecoder
from comlrl.models.fast.graphs import Graphs
from comlrl.models.fast.static_step import (
    LENGTH_STEP,
    TOKEN_BUCKETS,
    StaticBatch,
    bucket,
    grid_of,
)
from comlrl.rollout.decoding import ByFastDecoder
from comlrl.rollout.draw import Draw, inverse_cdf
from comlrl.rollout.truncation import Survivors
from comlrl.types import SamplingSupport

TOP = 256  # likeliest tokens that truncation considers first
BLOCK = 512  # tokens per block of the two-level sum
WASTE = 2  # greatest ratio of a grid's size to its rows


class StaticDraw:
    """The state of a batch's draws: R rows, T tokens."""

    def __init__(self, agent: Agent, batch: StaticBatch, draw: Draw) -> None:
        self.agent, self.batch = agent, batch
        rows, device = len(batch.token_R), batch.device
        steps, vocabulary = batch.capacity, agent.vocabulary

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.temperature_R = new(rows, dtype=torch.float32)
        self.top_p_R = new(rows, dtype=torch.float32)
        self.top_k_R = new(rows, dtype=torch.long)
        self.greedy_R, self.truncated_R = (new(rows, dtype=torch.bool) for _ in range(2))
        self.limit_R, self.way_R = (new(rows, dtype=torch.long) for _ in range(2))
        self.uniforms_RT = new(rows, steps, dtype=torch.float32)
        self.tokens_RT = new(rows, steps, dtype=torch.long)
        self.logprobs_RT = new(rows, steps, dtype=torch.float32)
        # Rows that continue, before and after this draw.
        self.before_R, self.going_R = (new(rows, dtype=torch.bool) for _ in range(2))
        self.wide_R, self.may_R = (new(rows, dtype=torch.bool) for _ in range(2))
        self.broken = new(dtype=torch.bool)
        self.status = new(3, dtype=torch.long)
        self.status_on_host = torch.zeros(3, dtype=torch.long, pin_memory=device.type == "cuda")
        self.stop_V = new(vocabulary, dtype=torch.bool)
        self.completing_WV = None if draw.completing is None else draw.completing.clone()
        self.greedy = any(way.temperature == 0 for way in draw.ways)
        self.truncates = any(way.truncates and way.temperature > 0 for way in draw.ways)
        self.plain = any(not way.truncates and way.temperature > 0 for way in draw.ways)
        self.top = min(TOP, vocabulary)
        self.max_support = None if draw.survivors is None else draw.survivors.limit
        if self.max_support is not None:
            width = max(self.top, self.max_support)
            self.support_RTS = new(rows, steps, width, dtype=torch.int32)
            self.threshold_RT = new(rows, steps, dtype=torch.float32)

    @staticmethod
    def kinds(draw: Draw) -> Hashable:
        """Return a key that batches must share, beside their shapes, to use the same state."""
        ways = {(way.temperature == 0, way.truncates) for way in draw.ways}
        limit = None if draw.survivors is None else draw.survivors.limit
        return frozenset(ways), limit, None if draw.completing is None else len(draw.completing)

    def begin(self, draw: Draw, slot_of_row: Tensor) -> None:
        """Start drawing for these slots, in the order of the draw's rows."""
        device, vocabulary = self.batch.device, self.agent.vocabulary

        def of_ways(values: Sequence[float], target: Tensor, fill: float) -> None:
            way = torch.tensor(values, dtype=target.dtype, device=device)
            target.fill_(fill).index_copy_(0, slot_of_row, way[draw.way])

        ways, inf = draw.ways, torch.inf
        top_p = [inf if way.top_p is None or way.top_p == 1 else way.top_p for way in ways]
        top_k = [min(way.top_k or vocabulary, vocabulary) for way in ways]
        of_ways([way.temperature or 1.0 for way in ways], self.temperature_R, 1.0)
        of_ways(top_p, self.top_p_R, inf)
        of_ways(top_k, self.top_k_R, vocabulary)
        of_ways([way.temperature == 0 for way in ways], self.greedy_R, False)
        of_ways([way.truncates for way in ways], self.truncated_R, False)
        of_ways([way.max_new_tokens for way in ways], self.limit_R, 0)
        of_ways(list(range(len(ways))), self.way_R, 0)
        if self.truncates or self.plain:
            self.uniforms_RT[:, : draw.steps].index_copy_(0, slot_of_row, draw.uniforms)
        self.tokens_RT.fill_(-1)
        self.logprobs_RT.fill_(torch.nan)
        self.going_R.zero_().index_fill_(0, slot_of_row, True)
        self.wide_R.zero_()
        self.broken.zero_()
        self.stop_V.copy_(draw.stop_V)
        if self.completing_WV is not None and draw.completing is not None:
            self.completing_WV.copy_(draw.completing)
        if self.max_support is not None:
            self.support_RTS.fill_(-1)
            self.threshold_RT.fill_(torch.inf)

    def draw(self) -> None:
        """Choose each row's next token from its hidden state."""
        logits_RV = self.agent.logits(self.batch.hidden_RD).float()
        self.before_R.copy_(self.going_R)
        token_R, broken_R = torch.zeros_like(self.batch.token_R), torch.zeros_like(self.going_R)
        drawn_R = torch.full_like(self.temperature_R, torch.nan)
        if self.truncates or self.plain:
            uniform_R1 = self.uniforms_RT.index_select(1, self.batch.t)
            probability_RV = torch.softmax(logits_RV / self.temperature_R[:, None], -1)
            broken_R = ~probability_RV[:, 0].isfinite()  # one that is NaN makes all NaN
            if self.plain:
                token_R, drawn_R = blockwise_inverse_cdf(probability_RV, uniform_R1)
            if self.truncates:
                token, drawn = self._truncated(probability_RV, uniform_R1)
                token_R = torch.where(self.truncated_R, token, token_R)
                drawn_R = torch.where(self.truncated_R, drawn, drawn_R)
        if self.greedy:
            best, place_R = logits_RV.max(-1)
            token_R = torch.where(self.greedy_R, place_R, token_R)
            drawn_R = drawn_R.masked_fill(self.greedy_R, torch.nan)
            broken_R = torch.where(self.greedy_R, ~best.isfinite(), broken_R)
        self.broken.logical_or_((broken_R & self.before_R).any())
        self.batch.token_R.copy_(token_R)
        self.logprobs_RT.index_copy_(1, self.batch.t, drawn_R.log()[:, None])
        self.commit()

    def commit(self) -> None:
        """Record the newest tokens, and which rows continue."""
        token_R, t = self.batch.token_R, self.batch.t
        self.tokens_RT.index_copy_(1, t, token_R.where(self.before_R, -1)[:, None])
        ended_R = self.stop_V.index_select(0, token_R) | (self.limit_R <= t + 1)
        self.going_R.copy_(self.before_R & ~ended_R)
        if self.completing_WV is not None:
            self.may_R.copy_(self.completing_WV[self.way_R, token_R] & self.going_R)
        wide = (self.wide_R & self.before_R).sum()
        self.status.copy_(torch.stack([self.going_R.sum(), wide, self.may_R.sum()]))

    def reading(self) -> Callable[[], list[int]]:
        """Start copying ``status`` to the host; the returned function waits for the copy."""
        self.status_on_host.copy_(self.status, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if self.status.is_cuda else None

        def status() -> list[int]:
            if event is not None:
                event.synchronize()
            return self.status_on_host.tolist()

        return status

    def _truncated(self, probability_RV: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Draw from what top-k and then top-p leave, if that is less than ``top`` tokens."""
        top, vocabulary = self.top, probability_RV.shape[-1]
        likely_RK, ids_RK = probability_RV.topk(top, -1)
        least_R1 = likely_RK.gather(-1, (self.top_k_R.clamp(max=top) - 1)[:, None])
        by_count_R1 = (self.top_k_R < vocabulary)[:, None]
        allowed_RK = likely_RK.where((likely_RK >= least_R1) | ~by_count_R1, 0.0)
        mass_R1 = allowed_RK.sum(-1, keepdim=True)
        total_R1 = torch.where(by_count_R1, mass_R1, probability_RV.sum(-1, keepdim=True))
        before_RK = allowed_RK.cumsum(-1) - allowed_RK
        left_RK = allowed_RK.where(before_RK < self.top_p_R[:, None] * total_R1, 0.0)
        survives_RK = left_RK > 0
        count_R = survives_RK.sum(-1)
        if top < vocabulary:
            enough_R = (mass_R1 >= self.top_p_R[:, None] * total_R1)[:, 0] | by_count_R1[:, 0]
            more_R = by_count_R1[:, 0] & (self.top_k_R > top)
            settled_R = enough_R & ~more_R & (count_R < top)
            self.wide_R.copy_(self.truncated_R & ~settled_R & ~self.greedy_R)
        ids_RK, order_RK = ids_RK.sort(-1)  # the vocabulary's order
        left_RK = left_RK.gather(-1, order_RK)
        place_R1, drawn_R = inverse_cdf(left_RK, uniform_R1)
        if self.max_support is not None:
            small_R = count_R <= self.max_support
            sets = ids_RK.where((left_RK > 0) & small_R[:, None], -1).int()
            self.support_RTS[:, :, :top].index_copy_(1, self.batch.t, sets[:, None])
            last_R = likely_RK.where(survives_RK, torch.inf).amin(-1).log()
            next_R = likely_RK.where(~survives_RK, 0.0).amax(-1).log()
            threshold_R = ((last_R + next_R) / 2).where(~small_R, torch.inf)
            self.threshold_RT.index_copy_(1, self.batch.t, threshold_R[:, None])
        return ids_RK.gather(-1, place_R1)[:, 0], drawn_R

    def draw_wide(self, draw: Draw, row_of_slot: Tensor, step: int) -> None:
        """Redraw from the whole vocabulary for the rows that need it."""
        slots = (self.wide_R & self.before_R).nonzero()[:, 0]
        rows, held = row_of_slot[slots], draw.survivors
        if self.max_support is not None:
            count = len(draw.logprobs)
            draw.survivors = Survivors(count, draw.steps, self.max_support, rows.device)
        self.batch.token_R[slots] = draw.tokens(self.batch.hidden_RD[slots], rows, step)
        self.logprobs_RT[slots, step] = draw.logprobs[rows, step]
        if self.max_support is not None and draw.survivors is not None:
            survivors, width = draw.survivors, self.support_RTS.shape[-1]
            self.threshold_RT[slots, step] = survivors.threshold[rows, step]
            by_row = torch.cat(survivors.rows).argsort(stable=True)  # in the order of slots
            counts = survivors.counts[rows, step]
            taken = torch.arange(width, device=rows.device) < counts[:, None]
            support = self.support_RTS.new_full(taken.shape, -1)
            support[taken] = torch.cat(survivors.ids)[by_row].to(support.dtype)
            self.support_RTS[slots, step] = support
        draw.survivors = held
        self.wide_R.zero_()
        self.commit()

    def stop_by_text(self, draw: Draw, step: int) -> int:
        """End the rows whose text now contains a stop; return their number."""
        ended = 0
        for slot in self.may_R.nonzero()[:, 0].tolist():
            stops = draw.stops[int(self.way_R[slot])]
            assert stops is not None
            if stops.completed_by(self.tokens_RT[slot, : step + 1].tolist()):
                self.going_R[slot] = False
                ended += 1
        return ended


class StaticSupports:
    """The support of truncation, in the form of ``truncation.Survivors``."""

    def __init__(self, support_RTS: Tensor, threshold_RT: Tensor) -> None:
        self.support_RTS, self.threshold_RT = support_RTS.cpu(), threshold_RT.cpu()

    def of_rows(self, lengths: Sequence[int]) -> list[SamplingSupport]:
        """Return the support of each row's first ``lengths`` tokens."""
        supports = []
        for row, length in enumerate(lengths):
            ids = self.support_RTS[row, :length]
            counts = (ids >= 0).sum(-1).int()
            threshold = self.threshold_RT[row, :length].clone()
            supports.append(SamplingSupport(counts, ids[ids >= 0], threshold))
        return supports


def blockwise_inverse_cdf(probability_RV: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a block, then a token in it; return tokens and their probabilities, (R,) each."""
    rows, vocabulary = probability_RV.shape
    padded = F.pad(probability_RV, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    mass_RB = padded.sum(-1)
    cdf_RB = mass_RB.cumsum(-1)
    total_R1 = cdf_RB[:, -1:].contiguous()
    threshold_R1 = uniform_R1 * total_R1
    block_R1 = torch.searchsorted(cdf_RB, threshold_R1, right=True)
    block_R1 = torch.minimum(block_R1, torch.searchsorted(cdf_RB, total_R1))
    block_R1 = block_R1.clamp(max=mass_RB.shape[1] - 1)  # NaN has no index
    inside = padded.gather(1, block_R1[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    before_R1 = cdf_RB.gather(-1, block_R1) - mass_RB.gather(-1, block_R1)
    cdf = inside.cumsum(-1) + before_R1
    place_R1 = torch.searchsorted(cdf, threshold_R1, right=True)
    place_R1 = torch.minimum(place_R1, torch.searchsorted(cdf, cdf[:, -1:].contiguous()))
    place_R1 = place_R1.clamp(max=BLOCK - 1)
    drawn_R1 = inside.gather(-1, place_R1) / total_R1
    return (block_R1 * BLOCK + place_R1)[:, 0].clamp(max=vocabulary - 1), drawn_R1[:, 0]


class StaticDecoding:
    """Static states of batches, by shape and settings, and their graphs."""

    def __init__(self, max_slots: int, capture: bool, compiled: bool = False) -> None:
        """Initialize without states.

        ``max_slots``: limit on the keys and values of all states; ``capture``: keep states of
        earlier batches and, on a GPU, capture graphs; ``compiled``: compile each layer.
        """
        self.max_slots, self.capture, self.compiled = max_slots, capture, compiled
        self.states: OrderedDict[Hashable, tuple[StaticBatch, StaticDraw, Graphs]] = OrderedDict()

    def decode(
        self,
        fast: FastDecoder,
        adapters: Sequence[str | None],
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Tensor,
        draw: Draw,
    ) -> Tensor | None:
        """Return sampled tokens, (rows, steps), −1 after a row's end.

        Returns None if the grid would be mostly empty, or if the base is quantized and cannot be
        extended. ``adapters``: of each prompt. Rows of one prompt are adjacent, in prompt order.
        """
        counts = torch.bincount(prompt_of_row, minlength=len(prompts))
        siblings = int(counts.max())
        if fast.quantized or len(prompts) * siblings > WASTE * len(prompt_of_row):
            return None
        batch, state, graphs = self._state(fast, prompts, siblings, draw)
        device = batch.device
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        cache = prefix_cache.SharedPrefixCache(lengths_P, draw.steps)
        hidden_PD = ByFastDecoder(fast, cache, adapters).prefill(prompts)
        place: dict[str | None, int] = {name: n for n, name in enumerate(fast.names)}
        agent_P = torch.tensor([place.get(name, -1) for name in adapters], device=device)
        batch.begin(cache.prefix, lengths_P, hidden_PD, agent_P)
        row = torch.arange(len(prompt_of_row), device=device)
        first_P = counts.cumsum(0) - counts
        slot_of_row = prompt_of_row * siblings + row - first_P[prompt_of_row]
        row_of_slot = torch.zeros_like(batch.token_R).index_copy_(0, slot_of_row, row)
        state.begin(draw, slot_of_row)
        alive, wide = len(prompt_of_row), 0
        for step in range(draw.steps):
            draw.note_written(alive)
            graphs.run("draw", state.draw, [state.going_R])
            status = state.reading()
            reach = min(bucket(step + 1, TOKEN_BUCKETS), batch.capacity)
            advance = partial(
                graphs.run, ("step", reach), partial(batch.step, reach), [batch.t, batch.hidden_RD]
            )
            last = step == draw.steps - 1
            ahead = self.capture and not last and not wide  # wide draws tend to repeat
            if ahead:
                advance()
            alive, wide, may = status()  # the host waits only here
            if wide:
                if ahead:
                    batch.undo()
                    ahead = False
                state.draw_wide(draw, row_of_slot, step)
                alive, _, may = state.status.tolist()
            if may:
                alive -= state.stop_by_text(draw, step)
            if alive == 0 or last:
                break
            if not ahead:
                advance()
        draw.broken |= state.broken
        draw.logprobs = state.logprobs_RT[slot_of_row, : draw.steps]
        if state.max_support is not None:
            sets = state.support_RTS[slot_of_row, : draw.steps]
            thresholds = state.threshold_RT[slot_of_row, : draw.steps]
            draw.survivors = StaticSupports(sets, thresholds)  # type: ignore[assignment]
        return state.tokens_RT[slot_of_row, : draw.steps]

    def _state(
        self,
        fast: FastDecoder,
        prompts: Sequence[Sequence[int]],
        siblings: int,
        draw: Draw,
    ) -> tuple[StaticBatch, StaticDraw, Graphs]:
        """Return the state for such batches; with ``capture``, earlier states are reused."""
        grid = grid_of(len(prompts), siblings)
        length = bucket(max(map(len, prompts)), (LENGTH_STEP,))
        tokens = bucket(draw.steps, TOKEN_BUCKETS)
        key = (fast, grid, siblings, length, tokens, StaticDraw.kinds(draw))
        if key in self.states:
            self.states.move_to_end(key)
            return self.states[key]
        capturing = self.capture and draw.agent.device.type == "cuda"
        slots = grid * (length + siblings * tokens)
        most = self.max_slots if self.capture else 0
        while self.states and slots + sum(b.slots for b, _, _ in self.states.values()) > most:
            self.states.popitem(last=False)
        batch = StaticBatch(fast, grid, siblings, length, tokens, self.compiled)
        made = batch, StaticDraw(draw.agent, batch, draw), Graphs(capturing)
        self.states[key] = made
        return made
