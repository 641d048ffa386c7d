"""How long a prefix of a drafted block is verified: Algorithm 1 for one request, and when not to draft at all.

A slot is admitted or refused before its token is drawn. The decision may read confidences of this block up to its
own slot (they are functions of tokens already admitted) and anything from earlier rounds, never a clock and never a
later token: that is what keeps the output law the target's (appendix A of the paper shows what happens otherwise).
"""

from collections.abc import Sequence

import torch

from .cost_table_dspark import CostTable


SCHEDULES = ("throughput", "fixed", "threshold")


class PrefixScheduler:
    """Chooses the verified length `l` of each round of one `generate` call.

    `"throughput"` maximises `Theta(l) = (1 + sum_{j<=l} a_j) / (T_draft + T_verify(1 + l))` by Algorithm 1, where
    `a_j = prod_{i<=j} c_i`: slot `j` is admitted while it raises Theta, and the search stops at the first that does
    not. *Bridging* keeps a jump of cost from stopping it for ever: such a slot is admitted all the same when, with
    `a_j` known and the later slots at forecasts fixed before their tokens (their running means over past rounds, or
    `c_j` where a slot has none yet), some longer prefix would raise Theta. Theta is always compared with that of the
    prefix admitted so far, since an admission is never taken back.

    `"fixed"` admits every slot; `"threshold"` admits while `c_j >= threshold`.

    Args:
        kind: `"throughput"`, `"fixed"` or `"threshold"`.
        block_size: slots of a block, `G`.
        cost_table: needed by `"throughput"`.
        threshold: needed by `"threshold"`.
        bridging: `False` leaves plain Algorithm 1.
    """

    def __init__(
        self,
        kind: str,
        block_size: int,
        cost_table: CostTable | None = None,
        threshold: float = 0.5,
        bridging: bool = True,
    ):
        if kind not in SCHEDULES:
            raise ValueError(f"unknown schedule {kind!r}: choose 'throughput', 'fixed' or 'threshold'.")
        if kind == "throughput" and cost_table is None:
            raise ValueError("the 'throughput' schedule needs a `cost_table`.")
        self.kind = kind
        self.block_size = block_size
        self.cost_table = cost_table
        self.threshold = torch.tensor(threshold, dtype=torch.float32).item()  # as the confidences it is compared with
        self.bridging = bridging
        self._sums = [0.0] * block_size
        self._counts = [0] * block_size
        self.start_round(block_size, 0)

    def start_round(self, limit: int, context: int) -> None:
        """Fix everything a round may read: its slots (`limit <= G`), the costs at this context, the forecasts."""
        self.limit = limit
        self._seen: list[float] = []
        self._survival, self._tokens, self._open = 1.0, 1.0, True
        self._forecasts = [s / n if n else None for s, n in zip(self._sums, self._counts)]
        if self.kind == "throughput":
            draft = self.cost_table.draft_seconds(context)
            self.seconds = [draft + self.cost_table.verify_seconds(1 + n, context) for n in range(limit + 1)]

    def admits(self, confidence: float) -> bool:
        """Whether the next slot, of conditional acceptance `confidence` (`c_j`), is verified. After the first `False`
        every later slot of the round is refused."""
        slot = len(self._seen)
        if not self._open or slot >= self.limit:
            return False
        self._seen.append(confidence)
        if self.kind == "fixed":
            return True
        if self.kind == "threshold":
            self._open = confidence >= self.threshold
            return self._open
        survival = self._survival * confidence
        tokens = self._tokens + survival
        best = self._tokens / self.seconds[slot]
        self._open = tokens / self.seconds[slot + 1] > best or (
            self.bridging and self._pays_later(slot, survival, tokens, best)
        )
        if self._open:
            self._survival, self._tokens = survival, tokens
        return self._open

    def _pays_later(self, slot: int, survival: float, tokens: float, best: float) -> bool:
        here = self._seen[slot]
        for later in range(slot + 1, self.limit):
            forecast = self._forecasts[later]
            survival *= here if forecast is None else forecast
            tokens += survival
            if tokens / self.seconds[later + 1] > best:
                return True
        return False

    def length(self, confidences: torch.Tensor) -> torch.Tensor:
        """The same rule for a whole block at once, without reading anything back from the device.

        Args:
            confidences: `[limit]`, `c_1..c_limit` of a block whose tokens are all drawn.

        Returns:
            The admitted length, a scalar integer tensor on the same device. It equals the number of `True` that
            `admits` would answer, slot by slot.
        """
        limit = self.limit
        device = confidences.device
        if self.kind == "fixed":
            return torch.tensor(limit, device=device)
        if self.kind == "threshold":
            return (confidences >= self.threshold).long().cumprod(0).sum()
        c = confidences.to(torch.float32 if device.type == "mps" else torch.float64)
        seconds = torch.tensor(self.seconds, dtype=c.dtype, device=device)
        survival = c.cumprod(0)
        tokens = torch.cat([c.new_ones(1), 1 + survival.cumsum(0)])  # of the prefixes 0..limit
        theta = tokens / seconds
        admitted = theta[1:] > theta[:-1]
        if self.bridging:
            # factor[j, t]: what slot t multiplies survival by, as seen when slot j is decided; 1 up to j itself.
            known = torch.tensor([f is not None for f in self._forecasts[:limit]], device=device)
            mean = torch.tensor([f or 0.0 for f in self._forecasts[:limit]], dtype=c.dtype, device=device)
            later = torch.ones(limit, limit, dtype=torch.bool, device=device).triu(1)
            factor = torch.where(later, torch.where(known, mean, c[:, None]), 1.0)
            gained = torch.where(later, survival[:, None] * factor.cumprod(1), 0.0).cumsum(1)
            reached = (tokens[1:, None] + gained) / seconds[1:]
            admitted = admitted | (later & (reached > theta[:-1, None])).any(1)
        return admitted.long().cumprod(0).sum()

    def end_round(self, examined: Sequence[float] | None = None) -> None:
        """Move the round's examined confidences (up to the first refused slot) into the forecasts of later rounds.

        Args:
            examined: what `length` was computed from, cut after the first refused slot; `None` after `admits`.
        """
        for slot, confidence in enumerate(self._seen if examined is None else examined):
            self._sums[slot] += confidence
            self._counts[slot] += 1


class AcceptanceRates:
    """Running conditional acceptance per slot, the confidence of a drafter that has no confidence head."""

    PRIOR = (1.0, 0.5)  # accepted and refused pseudo-drafts: starts at 2/3, gives way after a few rounds

    def __init__(self, block_size: int):
        self._accepted = [self.PRIOR[0]] * block_size
        self._offered = [sum(self.PRIOR)] * block_size

    def __getitem__(self, slot: int) -> float:
        return self._accepted[slot] / self._offered[slot]

    def record(self, verified: int, accepted: int) -> None:
        """A round's outcome: slots `0..accepted - 1` were taken and the next one, if verified, was not."""
        for slot in range(min(accepted + 1, verified)):
            self._offered[slot] += 1
            self._accepted[slot] += slot < accepted


class RestPolicy:
    """Decides, before the backbone runs, whether a round drafts at all; from earlier rounds and the table only.

    A running balance of tokens: each drafted round adds what it emitted and takes what plain decoding would have
    emitted in the same time by the table. When the credit is used up, drafting rests; it is tried again, on a smaller
    credit, after a pause that grows with each failure. So a drafter that never hits loses a bounded number of tokens,
    and one that pays builds up a reserve against a run of bad luck.
    """

    CREDIT, TRIAL_CREDIT = 2.0, 1.0  # tokens that may be lost at the start of a call, and after a pause
    RESERVE = 6.0  # tokens the balance may grow to
    LEAST_CHARGE = 0.5  # tokens a round costs at least while no draft was accepted since the start or the last pause
    FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 8, 3, 216  # plain rounds

    def __init__(self, cost_table: CostTable | None = None):
        self.cost_table = cost_table  # needed by `record`
        self.balance = self.CREDIT
        self.pause = self.FIRST_PAUSE
        self.resting = 0
        self.hit = False

    def drafts(self) -> bool:
        """Whether the coming round drafts. Call once a round."""
        if self.resting:
            self.resting -= 1
            return False
        return True

    def record(self, verified: int, accepted: int, context: int) -> None:
        """Count a drafted round.

        Args:
            verified: draft tokens sent to the target, `l`.
            accepted: how many of them were taken.
            context: tokens in the cache before the round.
        """
        plain = self.cost_table.verify_seconds(1, context)
        spent = self.cost_table.draft_seconds(context) + self.cost_table.verify_seconds(1 + verified, context)
        self.settle(1 + accepted - spent / plain, accepted)

    def settle(self, gain: float, accepted: int) -> None:
        """Count a drafted round whose worth is known.

        Args:
            gain: tokens it emitted beyond what plain decoding would have in the same time.
            accepted: drafts that were taken.
        """
        self.hit = self.hit or accepted > 0
        self.balance = min(self.balance + (gain if self.hit else min(gain, -self.LEAST_CHARGE)), self.RESERVE)
        if self.balance <= 0:
            self.resting, self.balance, self.hit = self.pause, self.TRIAL_CREDIT, False
            self.pause = min(self.GROWTH * self.pause, self.LONGEST_PAUSE)
        elif self.balance >= self.CREDIT:
            self.pause = self.FIRST_PAUSE
