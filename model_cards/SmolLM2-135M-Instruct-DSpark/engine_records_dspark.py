"""What an engine counts, and what a step of it consists of."""

from collections import Counter
from dataclasses import dataclass, field

from .engine_costs_dspark import EngineCosts
from .requests_dspark import Request


@dataclass
class EngineStatistics:
    """Counts and seconds of an engine since it was made.

    Attributes:
        steps: packed forwards.
        prefilled, verified, accepted, generated: tokens of prompts, drafts sent to the target, drafts kept, tokens of
            text.
        decoded: blocks verified, with or without drafts; drafted: those with a drafter's pass before them.
        lengths: drafts verified of a block -> blocks, of those drafted.
        finished: requests that left.
        draft_seconds, verify_seconds, total_seconds: in the drafter, in target forwards, in `step`.
    """

    steps: int = 0
    prefilled: int = 0
    verified: int = 0
    accepted: int = 0
    generated: int = 0
    decoded: int = 0
    drafted: int = 0
    finished: int = 0
    lengths: Counter = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """In `step`, outside the two models."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds


@dataclass
class Entry:
    """What one request brings to a step.

    Attributes:
        tokens: what it feeds to the target: a piece of its prompt, or its anchor and drafts.
        drafts, laws: the drafts among them and what they were drawn from.
        whole: whether its last committed token is among `tokens`, so that a new one comes out.
    """

    request: Request
    tokens: list[int]
    drafts: list[int]
    laws: list | None
    whole: bool


@dataclass
class StepWork:
    """What a step consisted of, as the table counts it: see [`EngineCosts`]."""

    drafted_slots: int
    tokens: int
    requests: int
    longest: int
    keys: int

    def price(self, costs: EngineCosts) -> float:
        """Seconds of the step by a table."""
        verify = costs.verify_seconds(self.tokens, self.requests, self.longest, self.keys)
        return costs.draft_seconds(self.drafted_slots) + verify
