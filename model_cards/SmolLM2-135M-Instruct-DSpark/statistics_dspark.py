"""What one `generate` call did: rounds, drafts, acceptances, pauses, time. Counts are (sum, count) pairs."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DSparkStatistics:
    """Counts and times of one call.

    Attributes:
        rounds: rounds in which the backbone drafted.
        plain_rounds: target forwards without a draft in front of them, the prompt's excluded.
        drafted: draft tokens drawn. Verified tokens on a CPU, whole blocks on an accelerator.
        verified: draft tokens sent to the target.
        accepted: draft tokens in the returned text.
        generated: tokens in the returned text, the target's own included.
        offered_per_slot: rounds in which slot k was verified and every slot before it accepted.
        accepted_per_slot: rounds in which slot k was accepted.
        lengths: chosen verified length `l` -> rounds.
        rests: why a round did not draft -> rounds.
        draft_seconds, verify_seconds, total_seconds: wall time in the drafter, in target forwards, in the whole call.
            On a CUDA device draft and verify are measured by events on the stream.
        prefill_seconds: the part of `verify_seconds` spent on the prompt.
        profile_seconds: time spent before the call on getting a cost table; part of nothing else.
        feature_bytes: most bytes of target features kept at once.
        log: per round `(anchor position, drafted ids, confidences, accepted)`; filled only with `keep_log`.
    """

    block_size: int
    schedule: str = ""
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    generated: int = 0
    offered_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)
    lengths: Counter = field(default_factory=Counter)
    rests: Counter = field(default_factory=Counter)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    profile_seconds: float = 0.0
    total_seconds: float = 0.0
    feature_bytes: int = 0
    keep_log: bool = False
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.offered_per_slot = self.offered_per_slot or [0] * self.block_size
        self.accepted_per_slot = self.accepted_per_slot or [0] * self.block_size

    @property
    def host_seconds(self) -> float:
        """Wall time outside drafter and target forwards."""
        return max(0.0, self.total_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of the call, prompt included."""
        return self.generated / self.total_seconds if self.total_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per drafted round, bonus token included (the paper's tau). 0 without a drafted round."""
        return self.accepted / self.rounds + 1 if self.rounds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per drafted round, bonus token not included."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified draft tokens."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """Per slot: accepted share of the rounds that verified it with every slot before it accepted."""
        return [a / o if o else None for a, o in zip(self.accepted_per_slot, self.offered_per_slot)]

    def record_round(self, verified: int, accepted: int) -> None:
        """Count the outcome of a verified round."""
        self.accepted += accepted
        for slot in range(min(accepted + 1, verified)):
            self.offered_per_slot[slot] += 1
            self.accepted_per_slot[slot] += slot < accepted

    def uncount(self, kept: int, accepted: int, verified: int) -> None:
        """Take back what the last round showed of slots behind the end of the call: of its `accepted` drafts only the
        first `kept` are in the text."""
        self.accepted -= accepted - kept
        for slot in range(kept, min(accepted + 1, verified)):
            self.offered_per_slot[slot] -= 1
            self.accepted_per_slot[slot] -= slot < accepted

    @classmethod
    def merged(cls, parts: list["DSparkStatistics"]) -> "DSparkStatistics":
        """The counts of several calls or requests together; times and logs are left out."""
        whole = cls(parts[0].block_size, schedule=parts[0].schedule)
        for part in parts:
            for name in ("rounds", "plain_rounds", "drafted", "verified", "accepted", "generated"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            for name in ("offered_per_slot", "accepted_per_slot"):
                setattr(whole, name, [a + b for a, b in zip(getattr(whole, name), getattr(part, name))])
            whole.lengths += part.lengths
            whole.rests += part.rests
        return whole

    def as_dict(self) -> dict:
        """All figures as JSON values."""
        names = ("schedule", "rounds", "plain_rounds", "drafted", "verified", "accepted", "generated")
        times = ("draft_seconds", "verify_seconds", "host_seconds", "prefill_seconds", "total_seconds")
        derived = ("acceptance_length", "acceptance_rate", "conditional_acceptance", "feature_bytes")
        out = {name: getattr(self, name) for name in (*names, *times, *derived)}
        out["lengths"] = {str(length): count for length, count in sorted(self.lengths.items())}
        out["rests"] = dict(self.rests)
        return out

    def __str__(self) -> str:
        def row(name, value):
            return f"{name:<28}{value}"

        per_slot = " ".join("   -" if a is None else f"{a:.2f}" for a in self.conditional_acceptance)
        rests = ", ".join(f"{count} {why}" for why, count in self.rests.items())
        lengths = ", ".join(f"{length}: {count}" for length, count in sorted(self.lengths.items()))
        times = f"{self.draft_seconds:.2f} / {self.verify_seconds:.2f} / {self.host_seconds:.2f}"
        return "\n".join(
            (
                row("schedule", self.schedule),
                row("tokens generated", f"{self.generated}, {self.tokens_per_second:.1f} a second"),
                row("rounds drafted / plain", f"{self.rounds} / {self.plain_rounds}"),
                row("drafted / verified / taken", f"{self.drafted} / {self.verified} / {self.accepted}"),
                row("acceptance length", f"{self.acceptance_length:.2f} tokens a drafted round, bonus token included"),
                row("acceptance by slot", f"{per_slot}  (given the slots before)"),
                row("chosen lengths", lengths or "none"),
                row("rounds not drafted", rests or "none"),
                row("seconds draft/verify/host", f"{times} of {self.total_seconds:.2f}"),
            )
        )
