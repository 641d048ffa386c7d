"""Before a step of many requests is verified: who drafts, how many slots, and how much of it goes to the target."""

import time
from dataclasses import dataclass, field

import torch

from .batch_drafter_dspark import BatchDrafter
from .candidate_generator_dspark import position_limit
from .engine_costs_dspark import EngineCosts
from .global_schedule_dspark import GlobalScheduler, Load, Pool
from .requests_dspark import Request
from .schedule_dspark import AcceptanceRates


@dataclass
class Plan:
    """The drafts of one step.

    Attributes:
        load: what the step verifies besides.
        drafts: by request (its `id()`), the drafts that are verified, perhaps none, and the laws they were drawn from.
        seconds: spent on drafting.
    """

    load: Load
    drafts: dict[int, tuple[list[int], list | None]] = field(default_factory=dict)
    seconds: float = 0.0


class DraftPlanner:
    """Drafts for all requests of an engine's step in one pass, and asks the schedule how much is verified.

    Three decisions, in this order, each from what may be known then: a request *rests* while its drafts have not paid
    (its own balance of past rounds); the *width*, how many slots the backbone drafts, is the one that promises most
    tokens a second by the running means of past confidences; the schedule admits prefixes. Only the schedule sees this
    step's confidences.
    """

    WIDTH_STEPS = 8  # steps between choices of the width

    def __init__(
        self, batch_drafter: BatchDrafter, scheduler: GlobalScheduler, costs: EngineCosts | None, text_config
    ):
        self.batch_drafter, self.scheduler, self.costs = batch_drafter, scheduler, costs
        self.block_size = batch_drafter.drafter.config.block_size
        self.reckons = scheduler.kind in ("throughput", "asynchronous")
        self.reach, self.beyond = position_limit(text_config)
        self.rates = AcceptanceRates(self.block_size)
        self._width, self._age = self.block_size, 0

    def plan(self, decoding: list[Request], other_tokens: int, room: int) -> Plan:
        """Draft for a step.

        Args:
            decoding: requests whose anchor is verified in this step.
            other_tokens: of prompts, in the same forward.
            room: how many drafts may be verified in all.
        """
        keys = max((len(r.ids) - r.padding for r in decoding), default=0)
        plan = Plan(Load(len(decoding) + other_tokens, len(decoding), keys))
        limits = {id(r): r.draft_limit(self.reach, self.beyond, self.block_size) for r in decoding}
        drafting = [r for r in decoding if self._drafts(r, limits[id(r)])]
        if not drafting or room <= 0:
            return plan
        started = time.perf_counter()
        width = self._choose_width(drafting, plan.load)
        drafts = self.batch_drafter.draft(drafting, width)
        tokens = drafts.tokens.tolist()
        if drafts.confidences is None:
            confidences = torch.tensor([[self.rates[slot] for slot in range(width)]] * len(drafting))
        else:
            confidences = drafts.confidences.cpu()
        plan.seconds = time.perf_counter() - started
        plan.load.drafting = width * len(drafting)
        # The draft is cut behind a drafted EOS, never before one.
        ends = [next((j + 1 for j, t in enumerate(row) if t in r.eos_ids), width) for r, row in zip(drafting, tokens)]
        caps, ends = torch.tensor([limits[id(r)] for r in drafting]), torch.tensor(ends)
        lengths = self.scheduler.lengths(confidences, caps, plan.load, room, ends).tolist()
        for request, row, seen, laws, length in zip(drafting, tokens, confidences.tolist(), drafts.laws, lengths):
            request.note_confidences(seen)
            request.statistics.rounds += 1
            request.statistics.drafted += width
            request.statistics.verified += length
            request.statistics.lengths[length] += 1
            plan.drafts[id(request)] = row[:length], laws
        return plan

    def _drafts(self, request: Request, limit: int) -> bool:
        if limit <= 0:
            why = "at the length limit" if request.cap > 0 else "num_assistant_tokens is 0"
        elif self.reckons and not request.rest.drafts():
            why = "drafting did not pay"
        else:
            return True
        request.statistics.rests[why] += 1
        request.statistics.plain_rounds += 1
        return False

    def _choose_width(self, drafting: list[Request], load: Load) -> int:
        if not self.reckons:
            return min(self.scheduler.length, self.block_size)
        self._age -= 1
        if self._age <= 0:
            self._age = self.WIDTH_STEPS
            known = [c for r in drafting for c in r.expected if c is not None]
            usual = sum(known) / len(known) if known else 0.8
            expected = torch.tensor([[usual if c is None else c for c in r.expected] for r in drafting]).double()

            def promise(width):
                allowed = torch.ones(len(drafting), width, dtype=torch.bool)
                planned = Load(load.tokens, load.requests, load.keys, width * len(drafting))
                return float(Pool(expected[:, :width], allowed, planned, self.costs).theta.max())

            self._width = max(range(1, self.block_size + 1), key=promise)
        return self._width

    def settle(self, plan: Plan, outcomes: list[tuple[Request, int, int]]) -> None:
        """Count the outcome of a step for later ones: requests that drafted, each with its drafts that were judged and
        those that were kept."""
        for request, judged, kept in outcomes:
            request.statistics.record_round(judged, kept)
            self.rates.record(judged, kept)
        if not self.reckons:
            return
        # What the drafts cost, in tokens that all requests together would have written plainly in that time.
        load, costs = plan.load, self.costs
        lengths = [len(plan.drafts[id(request)][0]) for request, _, _ in outcomes]
        plain = costs.verify_seconds(load.tokens, load.requests, 1, load.keys)
        wide = costs.verify_seconds(load.tokens + sum(lengths), load.requests, 1 + max(lengths), load.keys)
        drafting = costs.draft_seconds(load.drafting) / len(outcomes)
        for (request, _, kept), length in zip(outcomes, lengths):
            share = length / sum(lengths) if length else 0.0
            price = (drafting + share * (wide - plain)) * load.requests / plain
            request.rest.settle(kept - price, kept)
