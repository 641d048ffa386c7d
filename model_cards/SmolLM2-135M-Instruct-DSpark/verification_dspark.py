"""Which drafts of several requests are kept, and the target's own token behind them (Leviathan et al., 2023)."""

from dataclasses import dataclass

import torch
from transformers.generation import PrefixConstrainedLogitsProcessor

from .batch_drafter_dspark import grouped, uniforms
from .sampling_dspark import draw_from, is_stateless_warper


@dataclass
class Block:
    """What was verified of one request.

    Attributes:
        request: the [`Request`].
        drafts: the `l` verified drafts.
        laws: of each of them, see [`Drafts`]; `None` when decoding greedily.
        first: row of its first logits; `1 + l` rows belong to it.
    """

    request: object
    drafts: list[int]
    laws: list | None
    first: int


@torch.no_grad()
def judge(blocks: list[Block], logits: torch.Tensor, kept_ids: torch.LongTensor | None) -> list:
    """The outcome of every block.

    Args:
        logits: `[N, V]` of the target, in any dtype.
        kept_ids: target ids of the drafter's producible ids, `None` when those are all.

    Returns:
        `(accepted, token)` for each block: how many drafts are kept, and the token behind them; or the exception that
        a processor of the request raised.
    """
    outcomes: list = [None] * len(blocks)
    for members in grouped(blocks, lambda block: block.request.process_key):
        group = [blocks[i] for i in members]
        rows = [row for block in group for row in range(block.first, block.first + len(block.drafts) + 1)]
        mine = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        try:
            scores = processed(group, mine)
        except Exception as error:  # a request's own code; the others go on
            for i in members:
                outcomes[i] = error
            continue
        decide = sampled if group[0].request.do_sample else greedy
        for i, outcome in zip(members, decide(group, scores, kept_ids)):
            outcomes[i] = outcome
    return outcomes


def processed(group: list[Block], logits: torch.Tensor) -> torch.Tensor:
    """Logits `[n, V]` behind the processors of requests that share them (or of one), in fp32.

    What looks at a row of scores only runs on all rows at once; the rest sees every prefix as plain decoding would
    show it: at the request's own row of a batch of its size.
    """
    processors = group[0].request.processors
    if not processors:
        return logits
    scores = logits.float()
    for processor in processors:
        if is_stateless_warper(processor):
            scores = processor(None, scores)
            continue
        # A constraint of this row's may not know the text in another row's place: it is asked for this row alone.
        allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
        out, row = [], 0
        for block in group:
            request = block.request
            for length in range(len(block.drafts) + 1):
                prefix, own = request.shown(block.drafts[:length], logits.device), request.row
                if allowed is not None:
                    at = own
                    processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(at, ids), 1)
                    prefix, own = prefix[:1], 0
                row_scores = scores[row][None].expand(len(prefix), -1).clone()
                out.append(processor(prefix, row_scores)[own])
                row += 1
        scores = torch.stack(out)
    return scores


def greedy(group: list[Block], scores: torch.Tensor, kept_ids) -> list[tuple[int, int]]:
    best = scores.argmax(dim=-1).tolist()
    outcomes, at = [], 0
    for block in group:
        right = best[at : at + len(block.drafts) + 1]
        accepted = 0
        while accepted < len(block.drafts) and block.drafts[accepted] == right[accepted]:
            accepted += 1
        outcomes.append((accepted, right[accepted]))
        at += len(right)
    return outcomes


def sampled(group: list[Block], scores: torch.Tensor, kept_ids) -> list[tuple[int, int]]:
    """Draft `x` is kept with probability `min(1, p(x) / q(x))`; the first that is not gives way to a draw from
    `max(0, p - q)`, renormalised, and behind the last comes a draw from `p`."""
    scores = scores.float()
    total = scores.logsumexp(dim=-1)
    ratios = draft_ratios(group, scores, total)
    accepted, rows, at = [], [], 0
    for block, ratio in zip(group, ratios):
        accepted.append(accepted_drafts(ratio, block.request))
        rows.append(at + accepted[-1])
        at += len(block.drafts) + 1
    index = torch.tensor(rows, device=scores.device)
    final = torch.exp(scores[index] - total[index, None])  # [R, V]
    for row, block, count in zip(final, group, accepted):
        if count < len(block.drafts):
            q, ids, _ = block.laws[count]
            if kept_ids is not None:
                ids = kept_ids if ids is None else kept_ids[ids]
            rest = row.clone()
            if ids is None:
                rest[: len(q)] -= q.to(rest)
            else:
                rest[ids.to(rest.device)] -= q.to(rest)
            rest.clamp_(min=0)
            if rest.sum() > 0:  # else p is q up to rounding
                row.copy_(rest)
    requests = [block.request for block in group]
    return list(zip(accepted, draw_from(final, uniforms(requests, final.device)).tolist()))


def draft_ratios(group: list[Block], scores: torch.Tensor, total: torch.Tensor) -> list[list[float]]:
    """`p(x) / q(x)` of every draft, by block."""
    rows, ids, chances, at = [], [], [], 0
    for block in group:
        rows += range(at, at + len(block.drafts))
        ids += block.drafts
        chances += [law[2] for law in block.laws[: len(block.drafts)]] if block.drafts else []
        at += len(block.drafts) + 1
    if not ids:
        return [[] for _ in group]
    rows = torch.tensor(rows, device=scores.device)
    p = torch.exp(scores[rows, torch.tensor(ids, device=scores.device)] - total[rows])
    flat = iter((p / torch.stack(chances).to(p)).tolist())
    return [[next(flat) for _ in block.drafts] for block in group]


def accepted_drafts(ratios: list[float], request) -> int:
    """How many drafts are kept when each is kept with `min(1, ratio)` as long as those before it were."""
    if not ratios:
        return 0
    draws = torch.rand(len(ratios), dtype=torch.float64, generator=request.generator).tolist()
    for count, (ratio, draw) in enumerate(zip(ratios, draws)):
        if not draw < ratio:
            return count
    return len(ratios)
