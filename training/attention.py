"""Block attention in training: every block looks at the context before its anchor and at itself, at nothing else.

`A` blocks over one context as one dense mask would cost `(A G) (S + A G)` scores a head, nearly all of them masked.
Blocks are cut into groups of a few instead, each group one row of the attention call: `(A G) (S + g G)` scores. The
function is registered with the host's attention interface and picked for the training forward alone.
"""

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


NAME = "dspark_blocks"
GROUP_SLOTS = 112  # query rows of a group: enough to keep a matrix unit busy, few enough to waste little


class BlockLayout:
    """How the blocks of a batch are grouped, and their masks.

    Args:
        anchors: `[B, A]` positions.
        context_length: `S`.
        block_size: `G`.
        causal: whether a slot may look at later slots of its block.
    """

    def __init__(self, anchors: torch.LongTensor, context_length: int, block_size: int, causal: bool = False):
        self.size, self.context, self.causal = block_size, context_length, causal
        self.group = max(1, min(GROUP_SLOTS // block_size, anchors.shape[1]))
        self.missing = -anchors.shape[1] % self.group
        anchors = torch.nn.functional.pad(anchors, (0, self.missing), value=1)
        self.anchors = anchors.view(-1, self.group)  # [B n, g]
        self._masks: dict = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Boolean `[B n, 1, g G, S + g G]`, `True` where a slot may look; `window`: positions, in sliding layers."""
        if window not in self._masks:
            device = self.anchors.device
            slot = torch.arange(self.size, device=device)
            position = (self.anchors[..., None] + slot).flatten(1)  # [B n, g G]
            place = torch.arange(self.context, device=device)
            context = place < self.anchors.repeat_interleave(self.size, dim=1)[..., None]
            block = torch.arange(self.group, device=device).repeat_interleave(self.size)
            own = (block[:, None] == block).expand(len(position), -1, -1)
            distance = slot.repeat(self.group)[:, None] - slot.repeat(self.group)
            if self.causal:
                own = own & (distance >= 0)
            if window is not None:
                context = context & (position[..., None] - place < window)
                own = own & (distance < window)
            self._masks[window] = torch.cat([context, own], dim=-1)[:, None]
        return self._masks[window]

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, heads, A G, D]` to `[B n, heads, g G, D]`."""
        batch, heads, _, width = states.shape
        if self.missing:
            states = torch.nn.functional.pad(states, (0, 0, 0, self.missing * self.size))
        states = states.view(batch, heads, -1, self.group * self.size, width)
        return states.transpose(1, 2).reshape(-1, heads, self.group * self.size, width)

    def join(self, output: torch.Tensor, batch: int) -> torch.Tensor:
        """`[B n, g G, heads, D]`, as attention functions return it, to `[B, A G, heads, D]`."""
        output = output.reshape(batch, -1, *output.shape[2:])
        return output[:, : output.shape[1] - self.missing * self.size]


def block_attention(module, query, key, value, attention_mask, layout: BlockLayout, sliding_window=None, **kwargs):
    """The host's SDPA over groups of blocks; `attention_mask` comes from the layout."""
    batch = query.shape[0]
    groups = len(layout.anchors) // batch

    def keys(states):  # [B, kv, S + A G, D] to [B n, kv, S + g G, D]
        context = states[:, :, : layout.context].repeat_interleave(groups, dim=0)
        return torch.cat([context, layout.split(states[:, :, layout.context :])], dim=2)

    output, _ = sdpa_attention_forward(
        module, layout.split(query), keys(key), keys(value), layout.mask(sliding_window), **kwargs
    )
    return layout.join(output, batch), None


ALL_ATTENTION_FUNCTIONS.register(NAME, block_attention)
