"""How many drafts of each request are verified: Algorithm 1 over all active requests, and its relatives.

All slots are drawn before the schedule is asked, and the answer is what a walk would give that examines a slot only
when all slots before it are admitted: the pool is walked by falling survival `a_{r,j} = prod_{i<=j} c_{r,i}`, so what
is compared next is always the next slot of each request, whose `a` is known from admitted tokens. Where the walk stops
depends on nothing else of this round, which is what makes it exact for all requests jointly (docs/design.md, 5).
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import torch

from .engine_costs_dspark import EngineCosts


GLOBAL_SCHEDULES = ("throughput", "asynchronous", "fixed", "threshold", "none")


@dataclass
class Load:
    """What a step verifies whatever the schedule says.

    Attributes:
        tokens: of the packed forward without drafts: one for each decoding request, and prompts' chunks.
        requests: decoding requests, those without drafts included.
        keys: the longest context among them.
        drafting: slots that were drafted.
    """

    tokens: int
    requests: int
    keys: int = 0
    drafting: int = 0


class GlobalScheduler:
    """Chooses the verified lengths of all requests of a step.

    - `"throughput"`: Algorithm 1. Admits in the order `(-a, j, r)` while `Theta = tau / (T_draft + T_verify)` strictly
      rises. With `bridging`, a jump of cost does not stop it for ever: where Theta would fall, the smallest number `m`
      of further slots is admitted for which Theta would rise by what is known (the survival of each request's next
      slot) and what was fixed before (the running mean confidence of the slots behind it), if there is one.
    - `"asynchronous"` (section 5.2): the same order, cut at a budget `K` that an unconstrained search found on the
      survivals of two steps ago; those of this step decide who gets it, not how much there is.
    - `"fixed"`: the first `length` slots of each. `"threshold"`: each request while `c >= threshold`. `"none"`.

    Args:
        kind: one of the above.
        block_size: slots of a block, `G`.
        costs: needed by `"throughput"` and `"asynchronous"`.
        threshold, length, bridging: see above; `length` is the whole block by default.
        delay: steps between the confidences a budget is found on and the step it is for, at least 1.
    """

    DELAY = 2  # section 5.2

    def __init__(
        self,
        kind: str,
        block_size: int,
        costs: EngineCosts | None = None,
        threshold: float = 0.5,
        length: int | None = None,
        bridging: bool = True,
        delay: int = DELAY,
    ):
        if kind not in GLOBAL_SCHEDULES:
            raise ValueError(f"unknown schedule {kind!r}: choose among {', '.join(GLOBAL_SCHEDULES)}.")
        if delay < 1:
            raise ValueError(
                f"`delay` is {delay}: a budget must not look at this step's confidences; give at least 1."
            )
        if kind in ("throughput", "asynchronous") and costs is None:
            raise ValueError(f"the {kind!r} schedule needs `costs`.")
        self.kind, self.costs, self.bridging = kind, costs, bridging
        self.threshold = torch.tensor(threshold, dtype=torch.float32).double().item()  # as the confidences
        self.length = block_size if length is None else length
        self._sums = torch.zeros(block_size, dtype=torch.float64)
        self._counts = torch.zeros(block_size, dtype=torch.float64)
        self._past: deque = deque(maxlen=delay)

    def lengths(
        self,
        confidences: torch.Tensor,
        limits: torch.Tensor,
        load: Load,
        room: int,
        ends: torch.Tensor | None = None,
    ) -> torch.LongTensor:
        """Verified lengths `[R]` of one step.

        Args:
            confidences: `[R, W]`, `c` of the drafted slots, on the CPU.
            limits: `[R]`, how many slots of each request may be verified, known before anything was drafted.
            load: what is verified anyway.
            room: how many drafts may be verified in all.
            ends: `[R]`, slots up to a drafted EOS, that one included; nothing behind it is verified. An EOS that is
                not admitted changes nothing.
        """
        c = confidences.double()
        requests, width = c.shape
        if self.kind == "none":
            return torch.zeros(requests, dtype=torch.long)
        within = torch.arange(width) < limits[:, None]
        allowed = within if ends is None else within & (torch.arange(width) < ends[:, None])
        if self.kind == "threshold":
            allowed = allowed & (c >= self.threshold)
        elif self.kind == "fixed":
            allowed = allowed & (torch.arange(width) < self.length)
        if self.kind in ("fixed", "threshold"):
            lengths = allowed.long().cumprod(1).sum(1)
            return lengths if int(lengths.sum()) <= room else self._first(lengths, room)
        pool = Pool(c, allowed, load, self.costs)
        if self.kind == "asynchronous" and len(self._past) == self._past.maxlen:
            count = pool.best(*self._past[0])
        else:
            count = self._climb(pool, c, within, room)
        if self.kind == "asynchronous":
            self._past.append((pool.survivals, pool.slots))
        lengths = pool.lengths(min(count, pool.size, room))
        if self.kind == "throughput" and self.bridging:
            self._remember(c, lengths, pool.allowed)
        return lengths

    def _first(self, lengths: torch.LongTensor, room: int) -> torch.LongTensor:
        """Shortened to `room` drafts in all, slot by slot: every request's first ones before anyone's second."""
        out = torch.zeros_like(lengths)
        for slot in range(int(lengths.max())):
            takers = (lengths > slot).nonzero()[: max(0, room - int(out.sum())), 0]
            out[takers] += 1
        return out

    def _climb(self, pool: "Pool", c: torch.Tensor, within: torch.Tensor, room: int) -> int:
        """How many of the pool Algorithm 1 admits; `within` `[R, W]` are the slots that were open before drafting."""
        count = 0
        while True:
            rises = pool.rises[count:]
            count += len(rises) if bool(rises.all()) else int(rises.byte().argmin())
            if not (self.bridging and self.kind == "throughput") or count >= min(pool.size, room):
                return count
            further = self._bridge(pool, c, within, count)
            if not further:
                return count
            count = min(count + further, pool.size)

    def _bridge(self, pool: "Pool", c: torch.Tensor, within: torch.Tensor, count: int) -> int:
        """The smallest number of further slots that would raise Theta by what may be known; 0 if none would.

        Neither confidences behind a request's next slot are known nor where its refused drafts end.
        """
        # No forecast is above the next member's survival: where that does not pay, nothing does.
        further = within.numel() - count
        seconds = pool.base(count + 1, count + 1 + further)
        most = pool.tokens[count] + pool.survivals[count] * torch.arange(1, further + 1)
        if not bool((most > pool.theta[count] * seconds).any()):
            return 0
        lengths = pool.lengths(count)
        slots = torch.arange(c.shape[1])
        ended = lengths >= pool.allowed.sum(1)  # behind an admitted EOS, or at a limit
        open_slots = within & (slots >= lengths[:, None]) & ~ended[:, None]
        # What each slot would multiply survival by: known up to a request's next slot, its mean behind that.
        means = torch.where(self._counts > 0, self._sums / self._counts.clamp(min=1), -1.0)[: c.shape[1]]
        next_c = c.gather(1, lengths.clamp(max=c.shape[1] - 1)[:, None])
        forecast = torch.where(means >= 0, means, next_c)
        survival = torch.where(slots <= lengths[:, None], c, forecast).cumprod(1)
        survival = torch.where(open_slots, survival, -1.0)
        values, order = survival.t().reshape(-1).sort(descending=True, stable=True)
        values = values[: int(open_slots.sum())]
        seconds = seconds[: len(values)]
        if pool.costs.cell:
            longest = torch.div(order[: len(values)], len(c), rounding_mode="floor").cummax(0).values + 2
            seconds = seconds + pool.rectangle(torch.maximum(longest, pool.longest[count]))
        better = (pool.tokens[count] + values.cumsum(0)) / seconds > pool.theta[count]
        return int(better.long().argmax()) + 1 if bool(better.any()) else 0

    def _remember(self, c: torch.Tensor, lengths: torch.Tensor, allowed: torch.Tensor) -> None:
        """Means for later rounds, from the confidences the walk examined."""
        slots = torch.arange(c.shape[1])
        examined = allowed & (slots <= lengths[:, None])
        self._sums[: c.shape[1]] += torch.where(examined, c, 0.0).sum(0)
        self._counts[: c.shape[1]] += examined.sum(0)


class Pool:
    """The slots of all requests in the order in which they are admitted, and what every prefix of it is worth.

    Args:
        c: `[R, W]` confidences, fp64.
        allowed: `[R, W]`, slots that may be verified, a prefix of each row.
        load, costs: see [`GlobalScheduler`].
    """

    def __init__(self, c: torch.Tensor, allowed: torch.Tensor, load: Load, costs: EngineCosts):
        self.load, self.costs = load, costs
        self.requests, self.width = c.shape
        survival = c.cumprod(1)
        self.allowed = allowed & (survival > 0)
        self.size = int(self.allowed.sum())
        if self.size < survival.numel():
            survival = survival.masked_fill(~self.allowed, -1.0)
        # Column by column, so that a stable sort breaks ties by (slot, request).
        values, order = survival.t().reshape(-1).sort(descending=True, stable=True)
        self.survivals, self._order = values[: self.size], order[: self.size]
        self._draft_seconds = costs.draft_seconds(load.drafting)

    @cached_property
    def slots(self) -> torch.LongTensor:
        """The slot each member of the pool is."""
        return torch.div(self._order, self.requests, rounding_mode="floor")

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Expected tokens of the step for every prefix, the empty one first."""
        return self._expected(self.survivals)

    @cached_property
    def longest(self) -> torch.LongTensor:
        """Tokens of the longest block for every prefix."""
        return self._longest(self.slots)

    @cached_property
    def theta(self) -> torch.Tensor:
        return self.tokens / self._seconds(self.size, self.slots)

    @cached_property
    def rises(self) -> torch.BoolTensor:
        """Whether Theta is higher with a member than without it."""
        return self.theta[1:] > self.theta[:-1]

    def _expected(self, survivals: torch.Tensor) -> torch.Tensor:
        return torch.cat([survivals.new_full((1,), self.load.requests), survivals]).cumsum(0)

    @staticmethod
    def _longest(slots: torch.LongTensor) -> torch.LongTensor:
        return torch.cat([slots.new_full((1,), -1), slots]).cummax(0).values + 2

    def _seconds(self, drafts: int, slots: torch.LongTensor) -> torch.Tensor:
        """Of a step that verifies 0, 1, .. `drafts` drafts, taken in the order of those slots."""
        base = self.base(0, drafts + 1)
        return base + self.rectangle(self._longest(slots)) if self.costs.cell else base

    def base(self, first: int, stop: int) -> torch.Tensor:
        """Seconds of steps that verify `first .. stop - 1` drafts in blocks of one token."""
        load, costs = self.load, self.costs
        by_tokens = costs.by_tokens(load.tokens + stop)[load.tokens + first : load.tokens + stop]
        return by_tokens + (self._draft_seconds + load.requests * load.keys * (costs.read + costs.cell))

    def rectangle(self, longest: torch.LongTensor) -> torch.Tensor:
        """What blocks of up to `longest` tokens cost beyond blocks of one."""
        return self.load.requests * self.load.keys * self.costs.cell * (longest - 1)

    def best(self, survivals: torch.Tensor, slots: torch.LongTensor) -> int:
        """The best number of slots for survivals of another step: the unconstrained search."""
        count = self.requests * self.width
        survivals, slots = survivals[:count], slots[:count]
        return int((self._expected(survivals) / self._seconds(len(survivals), slots)).argmax())

    def lengths(self, count: int) -> torch.LongTensor:
        """By request, when the first `count` of the pool are admitted."""
        return torch.bincount(self._order[:count] % self.requests, minlength=self.requests)
