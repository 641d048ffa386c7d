"""What a draft and a verification cost on this machine, in seconds, by tokens in the forward and by context.

The paper profiles `SPS(B)` once and looks it up at run time (section 3.2.2); so does this table, which keeps drafting
and verification apart: `SPS(B) = 1 / (T_draft + T_verify(B, context))`. A table is frozen: decoding never writes it.
"""

import hashlib
import inspect
import json
import math
import os
import statistics
import threading
import time
from bisect import bisect_right
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from .draft_chain_dspark import DraftChain


logger = logging.get_logger(__name__)

PROFILE_SECONDS = 5.0
CONTEXTS = (32, 1024)  # tokens in the cache when a cost is measured
REPEATS = 3
LEAST_WIDE_COST = 0.8  # of one token's


class CostTable:
    """Seconds of one target forward and of one drafted block.

    Args:
        verify: context length -> {tokens in the forward: seconds}. Between and beyond the points it is linear in
            both, flat below the smallest; a forward of more tokens is never taken to be cheaper than one of fewer.
        draft: context length -> seconds of drafting one block.
        key: what the numbers hold for (see `table_key`).

    Raises:
        ValueError: for a table without a cost for one token, or with a cost that is not positive.
    """

    def __init__(self, verify: dict[int, dict[int, float]], draft: dict[int, float], key: dict | None = None):
        rows = {int(c): {int(b): float(s) for b, s in row.items()} for c, row in verify.items()}
        self.verify = {c: dict(sorted(rows[c].items())) for c in sorted(rows)}  # by number: JSON's keys are strings
        self.draft = dict(sorted((int(c), float(s)) for c, s in draft.items()))
        self.key = key or {}
        for context, row in self.verify.items():
            if 1 not in row:
                raise ValueError(f"`verify` at context {context} has no cost for 1 token, which plain decoding costs.")
        seconds = [s for row in self.verify.values() for s in row.values()]
        drafts = list(self.draft.values())
        fine = all(0 < s < math.inf for s in seconds) and all(0 <= s < math.inf for s in drafts)  # NaN is not
        if not (seconds and drafts and fine):
            raise ValueError(
                "costs are seconds: `verify` needs positive finite ones, `draft` finite ones, not negative."
            )
        self._rows = [(context, monotone(sorted(row.items()))) for context, row in self.verify.items()]
        self._draft_points = list(self.draft.items())

    @classmethod
    def from_costs(cls, verify: dict[int, float], draft: float = 0.0) -> "CostTable":
        """A table that does not depend on the context, e.g. `from_costs({1: 1.0, 8: 1.2}, draft=0.1)`."""
        return cls({0: verify}, {0: draft})

    def verify_seconds(self, tokens: int, context: int = 0) -> float:
        """Seconds of one target forward over `tokens` tokens behind `context` cached ones (`T_verify`)."""
        last = self._rows[-1][0]
        seconds = interpolate([(at, interpolate(points, tokens)) for at, points in self._rows], min(context, last))
        if context > last:
            # What grows with the context is reading the cache, alike for every width; slopes of their own would soon
            # make a wide forward cheaper than a narrow one.
            one = [(at, points[0][1]) for at, points in self._rows]
            seconds += interpolate(one, context) - one[-1][1]
        return seconds

    def draft_seconds(self, context: int = 0) -> float:
        """Seconds of drafting one block behind `context` tokens (`T_draft`)."""
        return interpolate(self._draft_points, context)

    def plausible(self) -> bool:
        """Whether the widest forward costs about as much as one token or more; a table that says much less was
        disturbed while it was measured. (Some CPUs take a little longer for one token than for a few.)"""
        return all(row[max(row)] >= LEAST_WIDE_COST * row[1] for row in self.verify.values())

    def save(self, path: str | os.PathLike) -> None:
        """Write the table as JSON, atomically: a reader sees the old file or the new one."""
        write_json(path, {"key": self.key, "verify": self.verify, "draft": self.draft})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CostTable":
        """Read a table written by `save`.

        Raises:
            ValueError: for a file that is not one.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(content["verify"], content["draft"], content["key"])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a cost table ({error!r}); delete it or profile again.") from error

    def __str__(self) -> str:
        tokens = sorted({b for row in self.verify.values() for b in row})
        lines = ["seconds x 1000, target forward by tokens (columns) and context (rows); last column: one draft"]
        lines.append("context " + "".join(f"{b:>8}" for b in tokens) + "   draft")
        for context in self.verify:
            row = "".join(f"{1000 * self.verify_seconds(b, context):8.2f}" for b in tokens)
            lines.append(f"{context:>7} {row}{1000 * self.draft_seconds(context):8.2f}")
        return "\n".join(lines)


def write_json(path: str | os.PathLike, content) -> None:
    """Write JSON atomically, making its folder: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")  # no other writer's
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def monotone(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """More tokens never cost less: what says otherwise is noise, and would make a schedule jump at it."""
    best, out = 0.0, []
    for tokens, seconds in points:
        best = max(best, seconds)
        out.append((tokens, best))
    return out


def interpolate(points: list[tuple[int, float]], at: int) -> float:
    """Linear between the points, flat below the first, continued at the last slope (never falling) beyond the last."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, (at, float("inf"))), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    return y0 + (at - x0) * (max(slope, 0.0) if at > x1 else slope)


def table_key(drafter, target) -> dict:
    """Everything a measured table depends on, as JSON values."""
    config = target.config
    device = target.device
    quantization = getattr(config, "quantization_config", None)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {_processor()}",
        "threads": torch.get_num_threads(),
        "dtype": [str(target.dtype), str(drafter.dtype)],
        "attention": [config._attn_implementation, drafter.config._attn_implementation],
        "target": [type(target).__name__, config._name_or_path, _parameters(target)],
        "drafter": [drafter.config._name_or_path, _parameters(drafter), drafter.config.block_size],
        "drafter_device": str(drafter.device),
        "versions": [torch.__version__, transformers.__version__],
        "quantization": str(quantization) if quantization is not None else None,
        "compiled": hasattr(target, "_orig_mod") or getattr(target, "_compiled_call_impl", None) is not None,
    }


def _parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_IDENTIFIER", "cpu")


def cache_folder() -> Path:
    """`$DSPARK_CACHE`, by default `dspark/` in the Hugging Face home."""
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return Path(os.environ.get("DSPARK_CACHE") or os.path.join(home, "dspark"))


def table_path(key: dict) -> Path:
    """Where the table for a key is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"cost_table_{digest}.json"


def cost_table_for(drafter, target) -> CostTable:
    """The table decoding schedules with: `drafter.cost_table`, else the one kept for this machine, else a new profile
    (at most `PROFILE_SECONDS`), which is kept."""
    given = drafter.cost_table
    if hasattr(given, "for_one_request"):  # an engine's costs
        return given.for_one_request(drafter.config.block_size)
    if given is not None:
        if not hasattr(given, "verify_seconds"):
            raise TypeError(
                f"`drafter.cost_table` is a {type(given).__name__}: give a CostTable (`CostTable.load(path)` reads "
                "one), or None to let decoding measure it."
            )
        return given
    path = table_path(table_key(drafter, target))
    return kept_or_measured(drafter._runtime.cost_tables, path, CostTable, lambda: profile(drafter, target))


def kept_or_measured(kept: dict, path: Path, kind, measure):
    """The table of a process (`kept`), else of the disk, else `measure()`, which is kept if it is plausible.

    Args:
        kind: the table's class, with `load`, `plausible` and `save`.
    """
    if path not in kept:
        try:
            kept[path] = kind.load(path)
        except (OSError, ValueError):
            kept[path] = measure()
            if not kept[path].plausible():
                logger.warning(
                    "the cost table was measured while the machine was busy (more tokens seemed to cost less than "
                    "fewer), so the schedule may choose badly in this process. It is not kept: the next process, or "
                    "`dspark profile` on a quiet machine, measures again."
                )
                return kept[path]
            try:
                kept[path].save(path)
            except OSError as error:  # a read-only home: the table lives as long as the drafter
                logger.info(f"the cost table was not kept: {error}")
    return kept[path]


@torch.no_grad()
def profile(drafter, target, seconds: float = PROFILE_SECONDS, contexts: tuple[int, ...] = CONTEXTS) -> CostTable:
    """Time target forwards of 1, 2, 3, .. `1 + G` tokens and one draft, behind short and long context.

    Draws no random number and touches no cache of a call.

    Args:
        seconds: the time to stay within, roughly. A longer context is left out where it would not fit; where a single
            forward takes a good part of the time, the least that makes a table is measured all the same.
        contexts: tokens in the cache, cut to what the target's positions allow.
    """
    logger.info(f"profiling {type(target).__name__} and its drafter for the schedule (at most {seconds:g} s)")
    deadline = time.perf_counter() + seconds
    block = drafter.config.block_size
    link = drafter.link(target)
    widths = sorted({1, 1 + block, 2, 3, 1 + block // 2, *range(4, block, 2)})
    room = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or max(contexts)
    verify, draft = {}, {}
    prefill = 0.0  # seconds per token of context, as the context before had it
    for context in sorted({min(c, max(8, room - 1 - block)) for c in contexts}):
        measuring = sum(verify[min(verify)].values()) * REPEATS if verify else 0.0
        if verify and prefill * context + 2 * measuring > deadline - time.perf_counter():
            break
        started = time.perf_counter()
        cache = prefill_cache(target, context)
        prefill = (time.perf_counter() - started) / context
        verify[context] = time_forwards(target, cache, context, widths, deadline)
        draft[context] = time_draft(drafter, link, context, deadline)
    return CostTable(verify, draft, table_key(drafter, target))


def _ids(target, start: int, stop: int) -> torch.LongTensor:
    """Some text of the right length, `[1, stop - start]`: token ids in turn, no random number."""
    return torch.arange(start, stop, device=target.device)[None] % target.config.get_text_config().vocab_size


def prefill_cache(target, context: int):
    """A cache of `context` tokens that can be cropped."""
    short = {"logits_to_keep": 1} if target._supports_logits_to_keep() else {}
    cache = target(_ids(target, 0, context), use_cache=True, **short)[cache_argument(target)]
    cache.activate_past_recording()
    synchronize(target.device)
    return cache


def time_forwards(target, cache, context: int, widths: list[int], deadline: float) -> dict[int, float]:
    """Seconds by width: medians over rounds, so that a slow moment of the machine touches all widths alike."""
    name = cache_argument(target)
    samples: dict[int, list[float]] = {}
    # The ends first: with little time the line through them is the table.
    order = list(dict.fromkeys((1, max(widths), *widths)))
    for width in [1, max(widths), *order * REPEATS]:  # the first two warm up
        if time.perf_counter() > deadline and len(samples) > 1:
            break
        synchronize(target.device)
        started = time.perf_counter()
        target(_ids(target, context, context + width), use_cache=True, **{name: cache})
        synchronize(target.device)
        samples.setdefault(width, []).append(time.perf_counter() - started)
        cache.crop(-width)
    return {w: statistics.median(s[1:] if w in (1, max(widths)) and len(s) > 1 else s) for w, s in samples.items()}


def time_draft(drafter, link, context: int, deadline: float) -> float:
    """Seconds of one drafted block, greedy, with one new context token, as a round without acceptance has it."""
    device = drafter.device
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    features = torch.zeros(1, context, width, dtype=drafter.dtype, device=device)
    anchor = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache = drafter.new_cache()
    samples = []
    while len(samples) < 2 * REPEATS:
        synchronize(device)
        started = time.perf_counter()
        chain = DraftChain(drafter, link, anchor, features, cache)
        for _ in range(drafter.config.block_size):
            if drafter.confidence_head is not None:
                chain.confidence_logit()
            chain.push(chain.logits().argmax(dim=-1))
        synchronize(device)
        samples.append(time.perf_counter() - started)
        features = features[:, :1]
        if time.perf_counter() > deadline and len(samples) > 1:
            break
    return statistics.median(samples[1:])


def cache_argument(target) -> str:
    """The name a target's forward gives its cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
