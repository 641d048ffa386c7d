"""Drafts for many requests in one pass of the backbone: one block a request, slot by slot through the light heads."""

from dataclasses import dataclass

import torch

from .draft_chain_dspark import DraftChain
from .packed_attention_dspark import additive, attend_groups
from .sampling_dspark import draw_from, warped_law
from .slots_dspark import Packing, Slots, SlotStorage


class DraftSlots:
    """The drafter's cache for many requests: context in slots, the block of each written behind it for one forward."""

    def __init__(self, drafter):
        self.slots = Slots()
        self.storages = [SlotStorage(self.slots) for _ in drafter.layers]
        self.packing: Packing | None = None
        self._masks: dict = {}

    def get_seq_length(self) -> int:
        return 0  # the context's positions are always given

    def add(self, drafter, rows: list[int], features: list[torch.Tensor], first_positions: list[int]) -> None:
        """Context of several requests, `[S_r, F]` each, behind what their slots hold."""
        starts = [self.slots.lengths[row] for row in rows]
        packing = Packing(rows, starts, [len(f) for f in features], drafter.device)
        self.slots.reserve(packing.keys)
        offsets = [first for first, n in zip(first_positions, packing.counts) for _ in range(n)]
        positions = packing.token_places + torch.tensor(offsets, device=drafter.device)
        states = drafter.context_keys_values(torch.cat(features)[None], positions[None])
        for storage, (key, value) in zip(self.storages, states):
            storage.write(key[0].transpose(0, 1), value[0].transpose(0, 1), packing.token_rows, packing.token_places)
        for row, n in zip(rows, packing.counts):
            self.slots.lengths[row] += n

    def for_blocks(self, rows: list[int], width: int, device: torch.device) -> "DraftSlots":
        """Make the next forward one over blocks of `width` slots behind these requests' contexts."""
        starts = [self.slots.lengths[row] for row in rows]
        self.packing = Packing(rows, starts, [width] * len(rows), device)
        self.slots.reserve(self.packing.keys)
        self._masks.clear()
        return self

    def attend(self, module, query, key, value) -> torch.Tensor:
        """Attention of blocks `[R, Hq, W, D]` with their own keys and values `[R, Hkv, W, D]`: `[R, W, Hq, D]`."""
        packing, storage = self.packing, self.storages[module.layer_idx]
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (key, value))  # [R * W, Hkv, D]
        storage.write(*flat, packing.token_rows, packing.token_places)
        tokens = query.transpose(1, 2).flatten(0, 1)  # [R * W, Hq, D]
        repeats = query.shape[1] // key.shape[1]

        def inputs(group):
            keys, values = (group.rows_of(stored, 0) for stored in (storage.keys, storage.values))
            return keys, values, self._mask(group, module, repeats, query.dtype)

        out = attend_groups(tokens, packing.groups, inputs, module.scaling)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:])

    def _mask(self, group, module, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """All context and the whole block; in sliding layers the window, with a causal block what is before."""
        window, causal = module.sliding_window, module.config.is_causal
        key = (id(group), window)
        if key not in self._masks:
            device = group.starts.device
            at = torch.arange(group.keys, device=device)
            slot = group.starts[:, None, None] + torch.arange(group.queries, device=device)[:, None]  # [R, W, 1]
            seen = (at < group.starts[:, None, None] + group.queries).expand(-1, group.queries, -1)
            if window is not None:
                seen = seen & (slot - at < window)
            if causal:
                seen = seen & (at <= slot)
            self._masks[key] = additive(seen, repeats, dtype)
        return self._masks[key]


@dataclass
class Drafts:
    """Drafted blocks of several requests.

    Attributes:
        tokens: `[R, W]` target ids.
        confidences: `[R, W]`, `c` in fp32; `None` without a confidence head.
        laws: by request, for every slot `(q, ids, chance)`: the law `[n]` and its ids as `warped_law` gives them, and
            the probability of the draft; `None` for requests decoded greedily.
    """

    tokens: torch.LongTensor
    confidences: torch.Tensor | None
    laws: list[list | None]


class BatchDrafter:
    """Drafts blocks for many requests of one target.

    Args:
        drafter: the [`DSparkModel`].
        link: its link to the target.
    """

    def __init__(self, drafter, link):
        self.drafter, self.link = drafter, link
        self.cache = DraftSlots(drafter)

    def clear(self) -> None:
        """Forget all requests and free what they held."""
        self.cache = DraftSlots(self.drafter)

    def free_if_large(self) -> None:
        """Free what long requests made the storages grow to; only when no slot is taken."""
        if self.cache.slots.large:
            self.clear()

    def acquire(self) -> int:
        return self.cache.slots.acquire()

    def release(self, slot: int) -> None:
        self.cache.slots.release(slot)

    @torch.no_grad()
    def draft(self, requests: list, width: int) -> Drafts:
        """One block of `width` slots for each request (see [`Request`]). Their pending features enter the cache."""
        drafter, device = self.drafter, self.drafter.device
        rows = [request.draft_slot for request in requests]
        self.cache.add(
            drafter, rows, [r.take_features() for r in requests], [request.first_position for request in requests]
        )
        firsts = torch.tensor([r.first_position + self.cache.slots.lengths[r.draft_slot] for r in requests])
        positions = (firsts[:, None] + torch.arange(width)).to(device)
        anchors = torch.tensor([[request.ids[-1]] for request in requests], device=device)
        cache = self.cache.for_blocks(rows, width, device)
        chain = DraftChain(drafter, self.link, anchors, None, cache, position_ids=positions, width=width)
        temperatures = torch.tensor([request.confidence_temperatures[:width] for request in requests], device=device)

        groups = grouped(requests, lambda request: request.draft_key)
        laws = [[] if request.do_sample else None for request in requests]
        tokens, confidences = [], []
        for slot in range(width):
            if drafter.confidence_head is not None:
                confidences.append(torch.sigmoid(chain.confidence_logit() / temperatures[:, slot]))
            drafts = self._draw(chain.logits(), requests, groups, laws)
            tokens.append(chain.push(drafts))
        stacked = torch.stack(confidences, dim=1).float() if confidences else None
        return Drafts(torch.stack(tokens, dim=1), stacked, laws)

    def _draw(self, logits: torch.Tensor, requests: list, groups: list, laws: list) -> torch.LongTensor:
        """One draft `[R]` of each request from logits `[R, V']`, adding the laws they were drawn from to `laws`."""
        best = logits.argmax(dim=-1)
        drafts = best.clone()
        for members in groups:
            first = requests[members[0]]
            if not first.do_sample:
                continue
            if first.greedy_drafts:
                for i in members:
                    laws[i].append((logits.new_ones(1), best[i : i + 1], logits.new_ones(())))
                continue
            q, ids = warped_law(logits if len(members) == len(requests) else logits[members], first.warpers)
            drawn = draw_from(q, uniforms([requests[i] for i in members], q.device))
            chances = q.gather(1, drawn[:, None])[:, 0]
            drafts[members] = drawn if ids is None else ids.gather(1, drawn[:, None])[:, 0]
            for at, i in enumerate(members):
                laws[i].append((q[at], None if ids is None else ids[at], chances[at]))
        return drafts

    @torch.no_grad()
    def time(self, requests: int, width: int, timed) -> float:
        """Seconds of one block for that many requests behind short contexts, greedy."""
        config, device = self.drafter.config, self.drafter.device
        slots = [self.acquire() for _ in range(requests)]
        features = torch.zeros(1, len(config.target_layer_ids) * config.hidden_size, dtype=self.drafter.dtype)
        anchors = torch.zeros(requests, 1, dtype=torch.long, device=device)

        def run():
            for slot in slots:
                self.cache.slots.lengths[slot] = 8
            self.cache.add(self.drafter, slots, [features.to(device)] * requests, [0] * requests)
            cache = self.cache.for_blocks(slots, width, device)
            positions = torch.arange(9, 9 + width, device=device).expand(requests, -1)
            chain = DraftChain(self.drafter, self.link, anchors, None, cache, position_ids=positions, width=width)
            for _ in range(width):
                if self.drafter.confidence_head is not None:
                    chain.confidence_logit()
                chain.push(chain.logits().argmax(dim=-1))

        try:
            return timed(run)
        finally:
            for slot in slots:
                self.release(slot)


def grouped(items: list, key) -> list[list[int]]:
    """Indices of items with equal keys, in order of first appearance."""
    groups: dict = {}
    for i, item in enumerate(items):
        groups.setdefault(key(item), []).append(i)
    return list(groups.values())


def uniforms(requests: list, device: torch.device) -> torch.Tensor:
    """One number in [0, 1) for each request, from its own generator where it has one; fp64 (fp32 on MPS)."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    out = torch.rand(len(requests), dtype=wide, device=device)
    for i, request in enumerate(requests):
        if request.generator is not None:
            out[i] = torch.rand((), dtype=wide, generator=request.generator)
    return out
