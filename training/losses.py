"""The training loss (eq. 8-12) over supervised slots, without ever holding the `[B, A, G, V]` logits.

Slots are taken in order of the position of their label, in chunks. Slots of different blocks that predict the same
position share one row of target logits. The gradient of a chunk's loss with respect to its logits has a closed form,
so it is pushed through the LM head and the sequential head in the forward pass already and nothing of a chunk is kept:
memory is that of one chunk, time is one forward and one backward, no recomputation.

    L_ce = -log p_d(x*)           grad = p_d - onehot(x*)
    L_tv = sum_v |p_d - p_t|      grad = p_d * (s - sum_v p_d s),  s = sign(p_d - p_t)

With a reduced draft vocabulary `p_t` is the full target law; its mass outside counts as missed by the drafter, and CE
skips labels outside.
"""

from dataclasses import dataclass

import torch


@dataclass
class LossWeights:
    """`alpha` of eq. 12 and the decay of eq. 9-11 (`None`: the block size)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    gamma: float | None = None


@dataclass
class SlotTerms:
    """Per supervised slot `[N]`, detached: the terms of the loss, and what evaluation counts."""

    ce: torch.Tensor  # nats; 0 where the label is outside the draft vocabulary
    tv: torch.Tensor  # L1 distance of the laws, 0..2
    inside: torch.Tensor  # whether the label is in the draft vocabulary
    match: torch.Tensor  # whether draft and target have the same most likely token

    @property
    def acceptance(self) -> torch.Tensor:
        """`c* = 1 - |p_d - p_t|_1 / 2` (eq. 8)."""
        return 1 - 0.5 * self.tv


class SlotLaws:
    """Draft and target laws of `N` supervised slots, a chunk at a time.

    Args:
        draft_logits: `(hidden [n, H], features [n, R] or None)` to fp32 logits `[n, V']`.
        target_logits: states `[n, H]` to fp32 logits `[n, V]`.
        states: `[P, H]`, the target's states before its LM head, all positions of the batch.
        rows: `[N]`, ascending: which row of `states` predicts a slot's label.
        labels: `[N]` target ids.
        kept_ids: `[V']` target ids of a reduced vocabulary, else `None`.
        logits_per_chunk: numbers in a chunk of draft logits.
    """

    def __init__(self, draft_logits, target_logits, states, rows, labels, vocab_size, kept_ids, logits_per_chunk):
        self.draft_logits, self.target_logits = draft_logits, target_logits
        self.states, self.rows, self.labels = states, rows, labels
        self.kept_ids = kept_ids
        if kept_ids is None:
            self.draft_labels, self.inside = labels, torch.ones_like(labels, dtype=torch.bool)
        else:
            place = torch.full((vocab_size,), -1, dtype=torch.long, device=labels.device)
            place[kept_ids] = torch.arange(len(kept_ids), device=labels.device)
            self.inside = place[labels] >= 0
            self.draft_labels = place[labels].clamp(min=0)
        width = vocab_size if kept_ids is None else len(kept_ids)
        self.chunk = max(1, logits_per_chunk // width)

    def chunks(self):
        for start in range(0, len(self.rows), self.chunk):
            yield slice(start, min(start + self.chunk, len(self.rows)))

    @torch.no_grad()
    def target(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities `[n, V']` of the producible ids under the target, and its most likely ids `[n]`."""
        rows, back = torch.unique_consecutive(self.rows[chunk], return_inverse=True)
        logits = self.target_logits(self.states[rows])
        law = logits.softmax(dim=-1)
        if self.kept_ids is not None:
            law = law[:, self.kept_ids]
        return law[back], logits.argmax(dim=-1)[back]

    @torch.no_grad()
    def terms(self, logits: torch.Tensor, chunk: slice, weight_ce, weight_tv) -> tuple[SlotTerms, torch.Tensor]:
        """Terms of a chunk, and the gradient `[n, V']` of their sum under the weights `[n]`."""
        target, likely = self.target(chunk)
        label, inside = self.draft_labels[chunk, None], self.inside[chunk]
        top = logits.argmax(dim=-1)
        match = (top if self.kept_ids is None else self.kept_ids[top]) == likely
        log_draft = logits.log_softmax(dim=-1)
        ce = -log_draft.gather(1, label).squeeze(1) * inside
        draft = log_draft.exp_()
        outside = (1 - target.sum(dim=-1)).clamp(min=0) if self.kept_ids is not None else 0
        difference = target.neg_().add_(draft)
        tv = difference.abs().sum(dim=-1) + outside
        sign = difference.sign_()
        mean = (draft * sign).sum(dim=-1, keepdim=True)
        weight_ce = (weight_ce[chunk] * inside)[:, None]
        # weight_tv p (s - mean) + weight_ce (p - onehot), in the memory of s
        gradient = sign.sub_(mean).mul_(weight_tv[chunk, None]).add_(weight_ce).mul_(draft)
        gradient.scatter_add_(1, label, -weight_ce)
        return SlotTerms(ce, tv, inside, match), gradient


class ChunkedLoss(torch.autograd.Function):
    """`sum_n weight_ce ce_n + weight_tv tv_n`, differentiable to hidden states, head features and head weights."""

    @staticmethod
    def forward(ctx, laws: SlotLaws, kept: list, weight_ce, weight_tv, hidden, features, *parameters):
        inputs = [tensor for tensor in (hidden, features) if tensor is not None]
        wanted = [tensor.requires_grad for tensor in inputs]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sums = [torch.zeros_like(tensor) for tensor in (*inputs, *trained)]
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in laws.chunks():
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                pieces = [tensor[chunk].detach().requires_grad_(want) for tensor, want in zip(inputs, wanted)]
                logits = laws.draft_logits(pieces[0], pieces[1] if features is not None else None)
            terms, gradient = laws.terms(logits.detach(), chunk, weight_ce, weight_tv)
            kept.append(terms)
            total += (weight_ce[chunk] * terms.ce + weight_tv[chunk] * terms.tv).sum()
            if logits.requires_grad:
                sources = [piece for piece in pieces if piece.requires_grad] + trained
                found = iter(torch.autograd.grad(logits, sources, gradient))
                for tensor, want in zip(sums, wanted):
                    if want:
                        tensor[chunk] = next(found)
                for tensor, piece in zip(sums[len(inputs) :], found):
                    tensor += piece
        ctx.has_features, ctx.trained = features is not None, [p.requires_grad for p in parameters]
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        sums = iter([grad_output * tensor for tensor in ctx.saved_tensors])
        hidden = next(sums)
        features = next(sums) if ctx.has_features else None
        return None, None, None, None, hidden, features, *(next(sums) if trained else None for trained in ctx.trained)


def slot_loss(laws: SlotLaws, weight_ce, weight_tv, hidden, features, parameters) -> tuple[torch.Tensor, SlotTerms]:
    """CE and TV of all slots, weighted and summed, with the per-slot terms.

    Args:
        weight_ce, weight_tv: `[N]`, with alpha and denominators in them.
        hidden: `[N, H]`; features: `[N, R]` or `None`; parameters: trained ones behind the logits.
    """
    kept: list[SlotTerms] = []
    total = ChunkedLoss.apply(laws, kept, weight_ce, weight_tv, hidden, features, *parameters)
    return total, SlotTerms(*(torch.cat([getattr(t, name) for t in kept]) for name in ("ce", "tv", "inside", "match")))
