"""Anchors and blocks of a training batch (paper, training: "several anchors of each target sequence").

Worked example, block size 3, anchor at position 2 of `A B C D E F`, all of them the target's words:

    slot                 0        1        2
    position             2        3        4
    input                C      <mask>   <mask>
    previous token       C        D        E       (teacher-forced; what the heads are conditioned on)
    label                D        E        F
    target's states at   2        3        4       (their logits are the law of the label)
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch


def sample_anchors(ids: np.ndarray, mask: np.ndarray, num_anchors: int, seed: int, epoch: int) -> np.ndarray:
    """Up to `num_anchors` distinct anchor positions of one sequence, ascending.

    They depend on the seed, the epoch and the sequence itself, not on the batch it is in, its place in it, or what was
    drawn before: a resumed or re-batched run sees the same ones. An anchor is a token of the target's with another one
    behind it, as every anchor is in decoding, and has context before it.
    """
    candidates = np.flatnonzero(mask[1:-1] & mask[2:]) + 1
    if len(candidates) <= num_anchors:
        return candidates
    generator = np.random.default_rng([seed, epoch, zlib.crc32(ids.tobytes())])
    return np.sort(generator.choice(candidates, num_anchors, replace=False))


@dataclass
class Blocks:
    """The blocks of a batch: anchor positions `[B, A]` and which slots are supervised `[B, A, G]`.

    A slot is supervised while its label and all labels before it in the block are the target's words of this turn.
    Rows with fewer anchors are filled up with blocks of no supervised slot.
    """

    anchors: torch.LongTensor
    supervised: torch.BoolTensor

    @classmethod
    def of(cls, masks: torch.Tensor, anchors: list[np.ndarray], block_size: int) -> "Blocks":
        """Blocks at given anchors, one array a row; `masks` are the assistant masks `[B, S]`."""
        count = max(1, max(map(len, anchors)))
        positions = torch.zeros(len(anchors), count, dtype=torch.long)
        keep = torch.zeros(len(anchors), count, dtype=torch.bool)
        for row, own in enumerate(anchors):
            positions[row, : len(own)] = torch.from_numpy(own)
            keep[row, : len(own)] = True
        labels = positions[..., None] + torch.arange(1, block_size + 1)  # [B, A, G]
        rows = torch.arange(len(anchors))[:, None, None]
        inside = labels < masks.shape[1]
        words = masks.bool()[rows, labels.clamp(max=masks.shape[1] - 1)] & inside
        return cls(positions, words.cumprod(dim=-1).bool() & keep[..., None])

    @property
    def slots(self) -> torch.LongTensor:
        """Positions of the slots `[B, A, G]`; also those of their previous tokens and of the target's states."""
        return self.anchors[..., None] + torch.arange(self.supervised.shape[-1], device=self.anchors.device)

    def rows(self, length: int) -> torch.LongTensor:
        """`slots` as rows of the batch's positions in one line, `[B S]`: `[B, A, G]`."""
        return self.slots + torch.arange(len(self.anchors), device=self.anchors.device)[:, None, None] * length

    def tokens(self, ids: torch.LongTensor, shift: int) -> torch.LongTensor:
        """`[B, A, G]` tokens of the sequences `[B, S]`, `shift` positions behind each slot: 0 previous, 1 label."""
        rows = torch.arange(len(ids), device=ids.device)[:, None, None]
        return ids[rows, (self.slots + shift).clamp(max=ids.shape[1] - 1)]

    def inputs(self, ids: torch.LongTensor, mask_token_id: int) -> torch.LongTensor:
        """`[B, A, G]` input ids: the anchor, then mask tokens."""
        inputs = torch.full_like(self.slots, mask_token_id)
        inputs[..., 0] = ids.gather(1, self.anchors)
        return inputs

    def to(self, device: torch.device) -> "Blocks":
        return Blocks(self.anchors.to(device), self.supervised.to(device))


def slot_weights(supervised: torch.Tensor, gamma: float) -> torch.Tensor:
    """`w_k = exp(-(k-1)/gamma)` (eq. 9-11) on supervised slots, 0 elsewhere: fp32 `[B, A, G]`."""
    slot = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised * torch.exp(-slot / gamma)
