"""The laws drafts are drawn from, and draws from a law: shared by decoding one prompt and decoding many."""

import torch


# Warpers that look at one row of scores and keep no state: applied to draft and target alike.
STATELESS_WARPERS = (
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper"),
)
GREEDY_TEMPERATURE = 1e-5  # DeepSpec drafts greedily below it


def is_stateless_warper(processor) -> bool:
    return type(processor).__name__ in STATELESS_WARPERS and type(processor).__module__.startswith("transformers.")


def warped_law(logits: torch.Tensor, warpers) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities `[B, n]` of draft logits `[B, V']` behind stateless warpers, and the ids `[B, n]` they belong to
    (`None`: all of them in order).

    The warpers only rank and renormalise a row: the producible ids can be warped by themselves, and behind top-k there
    are only k of them.
    """
    ids = None
    for warper in warpers:
        if hasattr(warper, "top_k"):
            logits, order = torch.topk(logits, min(warper.top_k, logits.shape[-1]))
            ids = order if ids is None else ids.gather(1, order)
        else:
            logits = warper(None, logits)
    return torch.softmax(logits, dim=-1), ids


def draw_from(q: torch.Tensor, uniforms: torch.Tensor | None = None) -> torch.LongTensor:
    """One id from each law `[B, V]` (any positive weights), by inverting its distribution function; several times
    faster than `torch.multinomial`, which draws `V` random numbers. An id of probability 0 is never drawn.

    Args:
        uniforms: `[B]` numbers in [0, 1), by default drawn here.
    """
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    cdf = q.to(wide).cumsum(dim=-1)
    total = cdf[:, -1:]
    if uniforms is None:
        uniforms = torch.rand(q.shape[0], 1, dtype=wide, device=q.device)
    point = uniforms.to(cdf).view(-1, 1) * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up to total
    return torch.searchsorted(cdf, point, right=True).squeeze(1)
