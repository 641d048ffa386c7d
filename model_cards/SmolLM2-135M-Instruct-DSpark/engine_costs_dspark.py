"""What a step of many requests costs on this machine: SPS by packed tokens, with the terms attention adds.

The paper's `SPS(B)` knows the tokens of a forward only. Two things more were measured to matter (they are what a
packed forward pads): keys to be read, by request and context, and the rectangle of queries and keys, which one long
block makes longer for all. So `T_verify = f(B) + read * R * K + cell * R * L * K` for `R` requests whose longest block
has `L` tokens and longest context `K`, and `T_draft = g(R * slots)`.
"""

import json
import time
from itertools import accumulate
from pathlib import Path

import torch
from transformers.utils import logging

from .cost_table_dspark import (
    LEAST_WIDE_COST,
    CostTable,
    cache_folder,
    interpolate,
    kept_or_measured,
    monotone,
    synchronize,
    table_key,
    table_path,
    write_json,
)


logger = logging.get_logger(__name__)

PROFILE_SECONDS = 12.0
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # packed tokens
REQUESTS = (1, 4, 16, 32)  # that draft a block together
ROWS, CONTEXT = 8, 384  # of the forwards that show what contexts cost


class EngineCosts:
    """Seconds of a packed forward and of drafting a block for several requests.

    Args:
        verify: packed tokens -> seconds of the forward behind short contexts.
        draft: slots drafted, over all requests -> seconds.
        read: seconds per request and key of the longest context.
        cell: seconds per request, query of the longest block, and key of the longest context.
        key: what the numbers hold for.

    Raises:
        ValueError: for costs that are not positive and finite.
    """

    def __init__(self, verify: dict, draft: dict, read: float = 0.0, cell: float = 0.0, key: dict | None = None):
        self.verify = {int(n): float(s) for n, s in sorted(verify.items(), key=lambda point: int(point[0]))}
        self.draft = {int(n): float(s) for n, s in sorted(draft.items(), key=lambda point: int(point[0]))}
        self.read, self.cell, self.key = float(read), float(cell), key or {}
        fine = all(0 < s < float("inf") for s in self.verify.values())
        rest = (*self.draft.values(), self.read, self.cell)
        if not (self.verify and self.draft and fine and all(0 <= s < float("inf") for s in rest)):
            raise ValueError("costs are seconds: `verify` needs positive ones, none may be negative or infinite.")
        self._points = monotone(list(self.verify.items()))
        self._drafts = monotone(list(self.draft.items()))
        self._by_tokens = torch.empty(0, dtype=torch.float64)

    @classmethod
    def from_table(cls, table: CostTable) -> "EngineCosts":
        """What a table for one request says of many: its first row by tokens, and one price for a block."""
        row = table.verify[min(table.verify)]
        return cls(row, {1: table.draft_seconds(0)})

    def for_one_request(self, block_size: int) -> CostTable:
        """The same costs as a table for decoding one request."""
        verify = {
            context: {n: self.verify_seconds(n, 1, n, context) for n in range(1, block_size + 2)}
            for context in (32, 1024)
        }
        return CostTable(verify, {0: self.draft_seconds(block_size)}, self.key)

    def draft_seconds(self, slots: int) -> float:
        """Of drafting `slots` slots in one pass of the backbone, over all requests."""
        return interpolate(self._drafts, slots) if slots else 0.0

    def verify_seconds(self, tokens: int, requests: int = 0, longest: int = 1, keys: int = 0) -> float:
        """Of one packed forward (`T_verify`)."""
        return float(self.by_tokens(tokens + 1)[tokens]) + requests * keys * (self.read + self.cell * longest)

    def by_tokens(self, count: int) -> torch.Tensor:
        """`f(B)` for `B = 0 .. count - 1` at least, fp64."""
        if len(self._by_tokens) < count:
            size = max(64, 2 * count)
            seconds = [interpolate(self._points, n) for n in range(size)]
            self._by_tokens = torch.tensor(seconds, dtype=torch.float64)
        return self._by_tokens

    def plausible(self) -> bool:
        """Whether more tokens never cost much less than fewer, as they seem to when other work disturbs a profile."""
        for points in (list(self.verify.values()), list(self.draft.values())):
            if any(later < LEAST_WIDE_COST * before for before, later in zip(accumulate(points, max), points)):
                return False
        return True

    def save(self, path) -> None:
        write_json(path, {name: getattr(self, name) for name in ("verify", "draft", "read", "cell", "key")})

    @classmethod
    def load(cls, path) -> "EngineCosts":
        """Read what `save` wrote.

        Raises:
            ValueError: for a file that is something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**{name: content[name] for name in ("verify", "draft", "read", "cell", "key")})
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} holds no engine costs ({error!r}); delete it or profile again.") from error

    def __str__(self) -> str:
        verify = "  ".join(f"{n}: {1000 * s:.1f}" for n, s in self.verify.items())
        draft = "  ".join(f"{n}: {1000 * s:.1f}" for n, s in self.draft.items())
        return (
            f"ms of a packed forward, by tokens   {verify}\nms of drafting, by slots            {draft}\n"
            f"ms per 1,000 keys read              {1e6 * self.read:.3f}\n"
            f"ms per 1,000,000 query-key pairs    {1e9 * self.cell:.3f}"
        )


def engine_costs_for(drafter, packed, batch_drafter) -> EngineCosts:
    """The costs a drafter was given, else those kept for this machine, else a new profile, which is kept."""
    given = drafter.cost_table
    if given is not None:
        return given if isinstance(given, EngineCosts) else EngineCosts.from_table(given)
    return kept_or_measured(
        drafter._runtime.cost_tables,
        engine_costs_path(engine_key(drafter, packed)),
        EngineCosts,
        lambda: profile_engine(packed, batch_drafter),
    )


def engine_key(drafter, packed) -> dict:
    """What measured costs hold for."""
    return {**table_key(drafter, packed.target), "engine": packed.backend}


def engine_costs_path(key: dict) -> Path:
    """Where they are kept."""
    return cache_folder() / table_path(key).name.replace("cost_table", "engine_costs")


@torch.no_grad()
def profile_engine(packed, batch_drafter, seconds: float = PROFILE_SECONDS) -> EngineCosts:
    """Time packed forwards by tokens, by context and by block, and drafting by requests; draws no random number.

    Contexts are slots of zeros, so nothing is prefilled.
    """
    logger.info(f"profiling {type(packed.target).__name__} and its drafter for many requests (about {seconds:g} s)")
    deadline = time.perf_counter() + seconds

    def measure(run) -> float:
        return timed(run, packed.target.device, deadline)

    def forward(requests: int, block: int, context: int) -> float:
        slots = [packed.acquire() for _ in range(requests)]
        try:
            return packed.time_at(slots, context, block, measure)
        finally:
            for slot in slots:
                packed.release(slot)

    block = batch_drafter.drafter.config.block_size
    room = getattr(packed.text_config, "max_position_embeddings", None) or CONTEXT + block + 1
    context = max(8, min(CONTEXT, room - block - 1))
    # Few rows and long contexts first: the storages these need are smaller than those of many rows would be.
    deep = {n: forward(ROWS, n, context) for n in (1, 1 + block)} if packed.backend != "loop" else {}
    verify = {n: forward(min(n, 32), max(1, n // 32), 8) for n in sorted(WIDTHS, key=lambda n: (n not in (1, 32), n))}
    read = cell = 0.0
    if deep:
        curve = EngineCosts(verify, {1: 0.0})
        one, wide = (max(0.0, deep[n] - curve.verify_seconds(ROWS * n)) for n in (1, 1 + block))
        cell = max(0.0, (wide - one) / (ROWS * block * (context + block)))
        read = max(0.0, one / (ROWS * context) - cell)
    draft = {}
    for requests in REQUESTS:
        for width in dict.fromkeys((block, 2, 1)):
            draft.setdefault(requests * width, batch_drafter.time(requests, width, measure))
    packed.clear()
    batch_drafter.clear()
    return EngineCosts(verify, draft, read, cell, engine_key(batch_drafter.drafter, packed))


def timed(run, device: torch.device, deadline: float, repeats: int = 3) -> float:
    """The least of a few runs behind one that warms up (other work only adds), of one where time is short."""
    samples = []
    while len(samples) <= repeats and (len(samples) < 2 or time.perf_counter() < deadline):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        samples.append(time.perf_counter() - started)
    return min(samples[1:])
