"""One target forward for many requests: `sum(1 + l_r)` tokens, whatever the requests' lengths.

Three back ends, chosen by the model's own flags and checked by a probe (one packed forward against plain ones):

- `"packed"`: the model's attention function is exchanged for one that knows the slots; everything else of the model
  runs on exactly the packed tokens.
- `"mask"`: the same packed tokens, with a block-diagonal 4D mask, for models that do not look their attention up.
- `"loop"`: one request at a time in the model's own cache.

The target is as it was whenever no forward runs, also after an exception.
"""

import inspect
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .candidate_generator_dspark import position_limit, rope_parameters
from .cost_table_dspark import cache_argument
from .packed_attention_dspark import CURRENT, PACKED, PackedStep
from .slots_dspark import Packing, Slots, SlotStorage
from .taps_dspark import FeatureTaps


logger = logging.get_logger(__name__)

FLASH = ("flash_attention_2", "flash_attention_3")
BACKENDS = ("packed", "mask", "loop")
# Largest error of a probe's logits, as a share of their spread. A wrong mask is off by more than half of it.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
PROBE_TOLERANCE_HALF = 0.1
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


@dataclass
class Verified:
    """What one forward over several requests gave.

    Attributes:
        logits: `[N, V]`, those asked for, request by request; `None` if none were.
        features: `[T, F]` of all packed tokens, request by request; `None` where nothing is tapped.
    """

    logits: torch.Tensor | None
    features: torch.Tensor | None


class SlotLayer(DynamicLayer):
    """One layer's view of the slots, as the model's attention sees it."""

    is_sliding = False

    def __init__(self, owner: "SlotCache"):
        super().__init__()
        self.owner = owner
        self.storage = SlotStorage(owner.slots)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        packing = self.owner.packing.on(key_states.device)
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)  # [T, H, D]
        self.storage.write(key, value, packing.token_rows, packing.token_places)
        if self.owner.gather is not None:
            rows, places = (index.to(key.device) for index in self.owner.gather)
            return tuple(s[rows, :, places].transpose(0, 1)[None] for s in (self.storage.keys, self.storage.values))
        view = slice(packing.first, packing.last), slice(None), slice(0, packing.keys)
        return self.storage.keys[view], self.storage.values[view]

    def get_seq_length(self) -> int:
        """Of the text a forward goes on from, for layers that count positions by it: see `_parts`."""
        packing = self.owner.packing
        return packing.starts[0] if packing is not None and len(packing.rows) == 1 else 0

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return 0 if self.owner.packing is None else self.owner.packing.keys, 0

    def get_max_cache_shape(self) -> int:
        return -1


class SlotCache(Cache):
    """The host's cache over slots. `update` takes whatever further arguments a release passes."""

    def __init__(self, layers: int, slots: Slots):
        self.slots = slots
        self.packing: Packing | None = None
        self.gather = None  # slots and places of all keys of the step, where they are to be concatenated
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def activate_past_recording(self) -> None:
        pass


class PackedTarget:
    """Verifies, rolls back and releases requests of one target.

    Args:
        target: a decoder-only causal LM.
        layers: its decoder layers.
        layer_ids: tapped layers, see [`FeatureTaps`].
        device, dtype: where and how features are handed over.
        bucket: forwards are filled up to a multiple of so many tokens, so that compiled kernels and CUDA graphs meet
            few shapes; 1 on a CPU, 16 elsewhere, unless given.
        backend: `"packed"`, `"mask"` or `"loop"`; by default the first that the model's flags allow and a probe finds
            to agree with the model.

    Raises:
        ValueError: for a target whose state cannot be rolled back.
    """

    def __init__(self, target, layers, layer_ids, device, dtype, backend: str | None = None, bucket=None):
        self.target = target
        self.text_config = target.config.get_text_config(decoder=True)
        self.layers, self.layer_ids, self.device, self.dtype = layers, layer_ids, device, dtype
        self.bucket = bucket or (1 if target.device.type == "cpu" else 16)
        self.cache_argument = cache_argument(target)
        self.short = "logits_to_keep" in inspect.signature(target.forward).parameters
        self.positions = "position_ids" in inspect.signature(target.forward).parameters
        self.alone_from = first_position_alone(self.text_config)
        if getattr(target, "_is_stateful", False):
            raise ValueError(
                f"{type(target).__name__} keeps a recurrent state, which cannot be rolled back behind a rejected "
                "draft: decode it without a drafter."
            )
        if backend is None:
            backend = choose_backend(self)
        elif backend not in BACKENDS:
            raise ValueError(f"`backend` is {backend!r}: choose among {', '.join(BACKENDS)}.")
        self._use(backend)

    def clear(self) -> None:
        """Forget all requests and free what they held."""
        self._use(self.backend)

    def free_if_large(self) -> None:
        """Free what long requests made the storages grow to; only when no slot is taken."""
        if self.slots.large:
            self.clear()

    def _use(self, backend: str) -> None:
        self.backend = backend
        names = ("max_position_embeddings", "max_seq_len")
        longest = next((n for name in names if (n := getattr(self.text_config, name, None))), float("inf"))
        self.most_keys = longest if backend == "mask" else float("inf")
        self.slots = Slots()
        self.cache = SlotCache(self.text_config.num_hidden_layers, self.slots)
        self._own: dict[int, Cache] = {}  # of the loop
        self._first_position: dict[int, int] = {}

    def acquire(self, first_position: int = 0) -> int:
        """A slot for a new request, whose first token is at that position."""
        slot = self.slots.acquire()
        self._first_position[slot] = first_position
        return slot

    def release(self, slot: int) -> None:
        self.slots.release(slot)
        self._own.pop(slot, None)

    def length(self, slot: int) -> int:
        """Tokens of a request in the cache."""
        return self.slots.lengths[slot]

    def rollback(self, slot: int, tokens: int) -> None:
        """Take the last `tokens` tokens of a request out of the cache."""
        self.slots.rollback(slot, tokens)
        if self.backend == "loop":
            self._own[slot].crop(-tokens)

    @torch.no_grad()
    def verify(self, rows: list[int], tokens: list[list[int]], keep: list[int]) -> Verified:
        """Feed each request its next tokens.

        Args:
            rows: slots, each once.
            tokens: ids by request, at least one each.
            keep: how many of each request's last tokens need logits.
        """
        device = self.target.get_input_embeddings().weight.device
        device = self.target.device if device.type == "meta" else device
        parts = self._parts(rows, tokens)
        if len(parts) > 1:
            return self._verify_in_parts(parts, rows, tokens, keep)
        count, real = len(rows), sum(map(len, tokens))
        far = any(self._end(row, ids) > self.alone_from for row, ids in zip(rows, tokens))
        if self.bucket > 1 and self.backend != "loop" and not far and real % self.bucket:
            rows = [*rows, self.acquire()]  # nothing of it is kept
            tokens, keep = [*tokens, [0] * (-real % self.bucket)], [*keep, 0]
        starts = [self.slots.lengths[row] for row in rows]
        packing = Packing(rows, starts, [len(t) for t in tokens], device)
        self.slots.reserve(packing.keys)
        run = self._verify_one_by_one if self.backend == "loop" else self._verify_packed
        taps = FeatureTaps(self.layers, self.layer_ids, self.device, self.dtype)
        try:
            with lock_of(self.target), taps:
                verified = run(taps, packing, tokens, keep)
        finally:
            for spare in rows[count:]:
                self.release(spare)
        for row, ids in zip(rows[:count], tokens):
            self.slots.lengths[row] += len(ids)
        if len(rows) > count and verified.features is not None:
            verified.features = verified.features[:real]
        return verified

    def _end(self, row: int, tokens: list[int]) -> int:
        """First position behind a request's next tokens."""
        return self._first_position[row] + self.slots.lengths[row] + len(tokens)

    def _parts(self, rows, tokens) -> list[list[int]]:
        """Indices of the requests that may share a forward: all, but for those that are far enough for the target to
        treat a whole forward by its longest text, and for keys beyond what a mask's positions reach."""
        if self.backend == "loop":
            return [list(range(len(rows)))]
        ends = [self._end(row, ids) for row, ids in zip(rows, tokens)]
        shared = [i for i, end in enumerate(ends) if end <= self.alone_from]
        alone = [[i] for i, end in enumerate(ends) if end > self.alone_from]
        parts, keys, count = [], 0, 0
        for i in shared:
            more, size = len(tokens[i]), self.slots.lengths[rows[i]] + len(tokens[i])
            if not parts or keys + size > self.most_keys or count + more > self.alone_from:
                parts.append([])
                keys = count = 0
            parts[-1].append(i)
            keys, count = keys + size, count + more
        return parts + alone

    def _verify_in_parts(self, parts, rows, tokens, keep) -> Verified:
        logits, features = [None] * len(rows), [None] * len(rows)
        for part in parts:
            theirs = [keep[i] for i in part]
            done = self.verify([rows[i] for i in part], [tokens[i] for i in part], theirs)
            for i, piece in zip(part, done.logits.split(theirs) if done.logits is not None else ()):
                logits[i] = piece
            for i, piece in zip(part, done.features.split([len(tokens[i]) for i in part]) if self.layer_ids else ()):
                features[i] = piece
        known = [piece for piece in logits if piece is not None]
        return Verified(torch.cat(known) if known else None, torch.cat(features) if self.layer_ids else None)

    def time_at(self, rows: list[int], context: int, block: int, timed) -> float:
        """Seconds of a forward of `block` tokens a slot behind `context` tokens of zeros; for profiles."""
        vocabulary = self.text_config.vocab_size
        tokens = [[(row + j) % vocabulary for j in range(block)] for row in rows]

        def run():
            for row in rows:
                self.slots.lengths[row] = 0 if self.backend == "loop" else context
                self._own.pop(row, None)
            self.verify(rows, tokens, [block] * len(rows))

        return timed(run)

    def _verify_packed(self, taps, packing: Packing, tokens, keep) -> Verified:
        device = packing.token_rows.device
        ids = torch.tensor([[i for t in tokens for i in t]], device=device)
        offsets = [self._first_position[r] for r, n in zip(packing.rows, packing.counts) for _ in range(n)]
        arguments = {"input_ids": ids, "use_cache": True, self.cache_argument: self.cache}
        if self.positions:
            arguments["position_ids"] = packing.token_places[None] + torch.tensor([offsets], device=device)
        wanted = [i for n, end in zip(keep, packing.bounds[1:]) for i in range(end - n, end)]
        head = self.target.get_output_embeddings().weight.device
        wanted = torch.tensor(wanted or [0], device=device if head.type == "meta" else head)
        if self.short:
            arguments["logits_to_keep"] = wanted
        with self._packed(packing) as mask:
            if mask is not None:
                arguments["attention_mask"] = mask
            logits = self.target(**arguments).logits[0]
        if not self.short:
            logits = logits[wanted]
        return Verified(logits if any(keep) else None, self._features(taps))

    def _features(self, taps) -> torch.Tensor | None:
        return taps.take()[0] if self.layer_ids else None

    @contextmanager
    def _packed(self, packing: Packing):
        """The target with packed attention for one forward; yields the mask it needs, if any."""
        self.cache.packing = packing
        if self.backend == "mask":
            try:
                yield self._diagonal_mask(packing)
            finally:
                self.cache.packing = self.cache.gather = None
            return
        own = self.text_config._attn_implementation
        if str(own).startswith("dspark_packed"):
            raise RuntimeError("this target is in a packed forward already, in another thread: give each its own.")
        flash = ALL_ATTENTION_FUNCTIONS[own] if own in FLASH else None
        token = CURRENT.set(PackedStep(packing, self.text_config, flash, softcaps=own != "sdpa"))
        try:
            self.text_config._attn_implementation = PACKED
            yield None
        finally:
            self.text_config._attn_implementation = own
            CURRENT.reset(token)
            self.cache.packing = None

    def _diagonal_mask(self, packing: Packing):
        """`[1, 1, T, K]` over the keys of all requests behind each other; one a layer type where the model has any."""
        device = packing.token_rows.device
        ends = [s + n for s, n in zip(packing.starts, packing.counts)]
        key_rows = torch.tensor([r for r, end in zip(packing.rows, ends) for _ in range(end)], device=device)
        key_places = torch.tensor([j for end in ends for j in range(end)], device=device)
        self.cache.gather = key_rows, key_places
        query = packing.token_places[:, None]
        causal = (packing.token_rows[:, None] == key_rows) & (key_places <= query)
        masks = {"full_attention": causal}
        if getattr(self.text_config, "sliding_window", None):
            masks["sliding_attention"] = causal & (key_places > query - self.text_config.sliding_window)
        if getattr(self.text_config, "attention_chunk_size", None):
            chunk = self.text_config.attention_chunk_size
            masks["chunked_attention"] = causal & (key_places // chunk == query // chunk)
        masks = {kind: self._as_the_model_reads(mask[None, None]) for kind, mask in masks.items()}
        kinds = getattr(self.text_config, "layer_types", None)
        if kinds is not None:
            return {kind: masks[kind] for kind in set(kinds)}
        return masks.get("sliding_attention", masks["full_attention"])

    def _as_the_model_reads(self, mask: torch.Tensor) -> torch.Tensor:
        if self.text_config._attn_implementation == "sdpa":
            return mask
        dtype = self.target.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _verify_one_by_one(self, taps, packing: Packing, tokens, keep) -> Verified:
        device, logits, features = packing.token_rows.device, [], []
        for row, start, ids, n in zip(packing.rows, packing.starts, tokens, keep):
            if row not in self._own:
                self._own[row] = DynamicCache(config=self.target.config)
                self._own[row].activate_past_recording()
            arguments = {"use_cache": True, self.cache_argument: self._own[row]}
            if self.positions:
                first = self._first_position[row] + start
                arguments["position_ids"] = torch.arange(first, first + len(ids), device=device)[None]
            if self.short:
                arguments["logits_to_keep"] = max(n, 1)
            taps.clear()
            out = self.target(torch.tensor([ids], device=device), **arguments).logits[0]
            features.append(self._features(taps))
            if n:
                logits.append(out[-n:])
        features = torch.cat(features) if self.layer_ids else None
        return Verified(torch.cat(logits) if logits else None, features)


def lock_of(target) -> threading.RLock:
    """One forward at a time exchanges a target's attention."""
    with _making_locks:
        return _locks.setdefault(target, threading.RLock())


def first_position_alone(text_config) -> float:
    """First position behind which a request needs a forward of its own: there the target treats all tokens of a
    forward by its longest text (`longrope` and `dynamic` rotary factors), or counts positions from the cache's length
    (a temperature by position)."""
    rope = rope_parameters(text_config)
    reach = float("inf")
    if rope.get("rope_type") in ("longrope", "dynamic"):
        reach = position_limit(text_config)[0]
    if getattr(text_config, "attn_temperature_tuning", False):
        reach = min(reach, text_config.floor_scale - 1)
    return reach


def choose_backend(packed: PackedTarget) -> str:
    """The first back end that the model's flags allow and whose probe agrees with the model; says which did not."""
    target = packed.target
    allowed = ["packed"] if getattr(target, "_supports_attention_backend", False) else []
    for backend in (*allowed, "mask"):
        try:
            with lock_of(target):
                error = probe(packed, backend)
        except Exception as problem:  # a model this was not written for may fail anywhere inside
            error, why = None, repr(problem)
        else:
            half = PROBE_TOLERANCE_HALF
            if error <= PROBE_TOLERANCE.get(target.dtype, half):
                return backend
            why = f"its logits are off by {error:.1e} of their spread"
        logger.info(f"{type(target).__name__} is not packed with back end {backend!r}: {why}")
    logger.warning(
        f"{type(target).__name__} cannot verify several requests in one forward: they are verified one at a time, "
        "which is exact and not faster than one request a call."
    )
    return "loop"


@torch.no_grad()
def probe(packed: PackedTarget, backend: str) -> float:
    """Largest error of packed logits against uncached forwards of the same texts, as a share of the logits' spread:
    three requests of different lengths, then blocks behind them after one was rolled back and one slot changed hands.
    """
    packed._use(backend)
    vocabulary = packed.text_config.vocab_size
    texts = [[(7 * i + j * j + 3) % vocabulary for j in range(n)] for i, n in enumerate((9, 3, 14))]

    def plain(text):
        ids = torch.tensor([text], device=packed.target.device)
        return packed.target(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()

    def worst(parts, width):
        errors = []
        for text, got in zip(texts, parts):
            right = plain(text)[-width:].to(got.device)
            errors.append(float((got.float() - right).abs().max() / (right.max() - right.min()).clamp(min=1e-9)))
        return max(e if e == e else float("inf") for e in errors)  # NaN is no agreement

    try:
        slots = [packed.acquire() for _ in texts]
        packed.release(slots[1])
        slots[1] = packed.acquire()
        first = worst(packed.verify(slots, texts, [1, 1, 1]).logits.split(1), 1)
        packed.rollback(slots[2], 2)
        texts[2] = texts[2][:-2]
        blocks = [[i % vocabulary for i in block] for block in ((5, 6), (8,), (1, 2, 3, 4))]
        texts[:] = [text + block for text, block in zip(texts, blocks)]
        logits = packed.verify(slots, blocks, [2, 1, 4]).logits
        return max(first, worst([part[-1:] for part in logits.split([2, 1, 4])], 1))
    finally:
        packed._use(backend)
