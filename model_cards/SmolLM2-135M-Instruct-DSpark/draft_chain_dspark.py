"""One drafted block: the parallel backbone once (eq. 2-3), then the sequential head slot by slot (eq. 4-7)."""

import torch


class DraftChain:
    """A block being drafted. For every slot: `confidence_logit` (before the token is known), `logits`, `push`.

    Args:
        drafter: the [`DSparkModel`].
        link: its link to the target, for embedding and LM head.
        anchor: `[B, 1]`, the last committed token, `x_0`.
        features: `[B, S, T * H]` of the context positions that are not in `cache` yet, or `None`.
        cache: the draft cache; the new context enters it.
        context_position_ids: `[B, S]`, by default the positions behind the cache.
        position_ids: `[B, W]` of the block, by default behind the context.
        width: slots of the block, `W <= G`; by default all.
    """

    def __init__(
        self, drafter, link, anchor, features, cache, context_position_ids=None, position_ids=None, width=None
    ):
        self.drafter = drafter
        width = drafter.config.block_size if width is None else width
        block = anchor.new_full((anchor.shape[0], width), drafter.config.mask_token_id)
        block[:, :1] = anchor
        self.hidden = drafter(
            link.embed(drafter, block),
            features,
            position_ids=position_ids,
            context_position_ids=context_position_ids,
            cache=cache,
        ).last_hidden_state  # [B, W, H]
        self.base_logits = link.base_logits(drafter, self.hidden)  # [B, W, V'], fp32
        self.slot = 0
        self._state = None
        self._embed(anchor[:, 0].to(self.hidden.device))

    def _embed(self, previous: torch.LongTensor) -> None:
        head = self.drafter.markov_head
        self._embedding = None if head is None else head.embed(previous)  # [B, R]

    def confidence_logit(self) -> torch.Tensor:
        """Logit of `c_k` for the current slot, `[B]`, before any temperature."""
        return self.drafter.confidence_head(self.hidden[:, self.slot], self._embedding)

    def logits(self) -> torch.Tensor:
        """`U_k + B_k` of the current slot over the producible ids, `[B, V']`, fp32."""
        base = self.base_logits[:, self.slot]
        if self._embedding is None:
            return base
        bias, self._next_state = self.drafter.markov_head(self.hidden[:, self.slot], self._embedding, self._state)
        return base + bias

    def push(self, draft: torch.LongTensor) -> torch.LongTensor:
        """Take the token of the current slot and move on.

        Args:
            draft: `[B]`, an id among the producible ones (what `logits` is indexed by).

        Returns:
            The target's id for it, `[B]`.
        """
        token = draft if self.drafter.config.draft_vocab_size is None else draft + self.drafter.d2t[draft]
        if self._embedding is not None:
            self._state = self._next_state
            self._embed(token)
        self.slot += 1
        return token
