"""Attention of a packed forward: each request's tokens over its own keys, as few padded rectangles as it takes.

Registered with the host's attention interface under `PACKED`. A model whose implementation has a name the host has no
mask for builds none; window, chunk and causality are applied here.
"""

import hashlib
from contextvars import ContextVar

import torch
from transformers import AttentionInterface

from .slots_dspark import Group


# Each copy of this code (installed, or of a Hub repo) has a name of its own in the host's one table.
PACKED = f"dspark_packed_{hashlib.sha256(__name__.encode()).hexdigest()[:8]}"
CURRENT: ContextVar = ContextVar("dspark_packed_step", default=None)  # the `PackedStep` of this thread's forward
# Tensors that models hand to their attention function beside what is used here, and that change nothing.
HARMLESS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "attention_mask"}


class PackedStep:
    """What the attention function needs to know of one packed forward.

    Args:
        packing: the forward's geometry.
        config: the text config of the target, for the reach of each layer.
        flash: the host's flash attention function where the target uses one; it takes requests of any length behind
            each other.
        softcaps: whether the target's own implementation applies a soft-cap (the host's sdpa does not).
    """

    def __init__(self, packing, config, flash=None, softcaps: bool = True):
        self.packing = packing
        self.config = config
        self.flash, self.softcaps = flash, softcaps
        self._masks: dict = {}

    def reach(self, module, sliding_window) -> tuple[int | None, int | None]:
        """Window and chunk of a layer, `None` where it has none."""
        kinds, index = getattr(self.config, "layer_types", None), getattr(module, "layer_idx", None)
        if kinds is None or index is None:
            return sliding_window or getattr(module, "sliding_window", None), None
        kind = kinds[index]
        if kind == "sliding_attention":
            return sliding_window or self.config.sliding_window, None
        if kind == "chunked_attention":
            return None, self.config.attention_chunk_size
        if kind == "full_attention":
            return None, None
        raise NotImplementedError(f"layers of type {kind!r} cannot be packed")

    def mask(self, group: Group, window, chunk, first_key: int, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """`[R, 1, repeats * L, K - first_key]`, 0 where a query may look and the lowest number elsewhere."""
        key = (id(group), window, chunk, repeats, dtype)
        if key not in self._masks:
            device = group.starts.device
            query = group.starts[:, None, None] + torch.arange(group.queries, device=device)[:, None]  # [R, L, 1]
            at = torch.arange(first_key, group.keys, device=device)
            seen = at <= query
            if window is not None:
                seen &= at > query - window
            if chunk is not None:
                seen &= at // chunk == query // chunk
            self._masks[key] = additive(seen, repeats, dtype)
        return self._masks[key]


def additive(seen: torch.Tensor, repeats: int, dtype: torch.dtype) -> torch.Tensor:
    """What may be looked at, `[R, L, K]`, as `rectangle_attention` reads it: `[R, 1, repeats * L, K]`, 0 there and the
    lowest number elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    mask = mask[:, None].expand(-1, repeats, -1, -1)  # [R, repeats, L, K]
    return mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])


def rectangle_attention(query, key, value, mask, scaling=None, softcap=None, sinks=None) -> torch.Tensor:
    """Attention of `[R, Hq, L, D]` over `[R, Hkv, K, D]` with an additive mask `[R, 1, Hq / Hkv * L, K]`.

    The query heads that share a key head are folded into the query length, so no key is repeated.

    Returns:
        `[R, L, Hq, Dv]`.
    """
    rows, heads, length, size = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads * length, size)
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        weights = folded @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            weights = torch.tanh(weights / softcap) * softcap
        weights = weights + mask
        if sinks is not None:  # one more logit a head, which takes probability and gives nothing
            own = sinks.to(weights.dtype).reshape(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, length, 1)
            weights = torch.cat([weights, own.reshape(rows, kv_heads, -1, 1)], dim=-1)
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., : key.shape[2]] @ value
    return out.reshape(rows, heads, length, -1).transpose(1, 2)


def attend_groups(tokens, groups: list[Group], inputs, scaling=None, softcap=None, sinks=None) -> torch.Tensor:
    """Attention of packed tokens `[T, Hq, D]`, group by group.

    Args:
        inputs: called with a group for its keys, values `[R, Hkv, K, *]` and mask, see `rectangle_attention`.

    Returns:
        `[T, Hq, Dv]`.
    """
    out = None
    for group in groups:
        key, value, mask = inputs(group)
        rectangle = tokens.new_zeros(len(group.starts), group.queries, *tokens.shape[1:])
        rectangle[group.row, group.offset] = tokens[group.tokens]
        attended = rectangle_attention(rectangle.transpose(1, 2), key, value, mask, scaling, softcap, sinks)
        if out is None:
            out = attended.new_empty(len(tokens), *attended.shape[2:])
        out[group.tokens] = attended[group.row, group.offset]
    return out


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs
):
    """The host's attention function for a packed forward.

    Args:
        query: `[1, Hq, T, D]`, the packed tokens.
        key, value: `[rows, Hkv, K, D]`, the storage from slot `packing.first` on, as the cache handed it out.

    Returns:
        `[1, T, Hq, Dv]`, and `None` for the attention weights.
    """
    step = CURRENT.get()
    if step is None:
        raise RuntimeError(
            "this target is decoding a packed batch in another thread: wait for it, or give each thread a target."
        )
    unknown = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in HARMLESS]
    if unknown:
        raise NotImplementedError(f"{type(module).__name__} hands `{unknown[0]}` to its attention")
    window, chunk = step.reach(module, sliding_window)
    softcap = softcap if step.softcaps else None
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    packing = step.packing.on(query.device)
    if step.flash is not None and chunk is None:
        lengths = packing.varlen()
        keys, values = (stored[lengths.rows, :, lengths.places].transpose(0, 1)[None] for stored in (key, value))
        kwargs |= {"cu_seq_lens_q": lengths.queries, "cu_seq_lens_k": lengths.keys}
        kwargs |= {"max_length_q": lengths.longest_query, "max_length_k": lengths.longest_key}
        reach = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
        reach = {name: value for name, value in reach.items() if value is not None}
        return step.flash(module, query, keys, values, None, scaling=scaling, is_causal=True, **reach, **kwargs)
    repeats = query.shape[1] // key.shape[1]

    def inputs(group: Group):
        first_key = 0 if window is None else max(0, group.least - window + 1)  # before it no row looks
        keys, values = (group.rows_of(stored, packing.first, first_key) for stored in (key, value))
        return keys, values, step.mask(group, window, chunk, first_key, repeats, query.dtype)

    return attend_groups(query[0].transpose(0, 1), packing.groups, inputs, scaling, softcap, sinks)[None], None


AttentionInterface.register(PACKED, packed_attention)
