"""The light heads behind the parallel backbone: the sequential head (eq. 4-6) and the confidence head (eq. 7).

Shapes: `B` batch, `G` block size, `H` hidden, `V` vocabulary, `R` Markov rank. Both heads work on one slot at a time
or, in training, on all slots at once: every leading dimension is kept.
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """The bias `B_k(x_0, x_{<k}, .)` that the sequential head adds to the base logits of slot `k`.

    `vanilla` is the low-rank transition `W_1[x_{k-1}] W_2` (eq. 5); `gated` scales the embedding by a gate of the
    hidden state; `rnn` carries a state of width `R` through the block (eq. 6), zero at its start. `W_1` keeps all `V`
    rows, since the anchor may be any token; `W_2` has a row per producible id.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.kind = config.markov_head_type
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.output_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * self.rank, 3 * self.rank)

    def embed(self, previous: torch.LongTensor) -> torch.Tensor:
        """`W_1[x_{k-1}]`: `[...]` token ids to `[..., R]`."""
        return self.markov_w1(previous)

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bias of one slot: `W_2` on what `features` gives.

        Returns:
            The bias `[..., V']` over the producible ids, and the state for the next slot.
        """
        features, state = self.features(hidden, embedding, state)
        return self.markov_w2(features), state

    def features(
        self, hidden: torch.Tensor, embedding: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `W_2` projects to a bias.

        Args:
            hidden: `[..., H]`, the backbone's output at the slot.
            embedding: `[..., R]`, `embed` of the token before the slot's prediction.
            state: `[..., R]`, what this method returned for the slot before; `None` at slot 0. Only `rnn` has one.

        Returns:
            Features `[..., R]`, and the state for the next slot.
        """
        if self.kind == "vanilla":
            return embedding, None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
            return gate * embedding, None
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """`c_k = sigmoid(w^T [h_k ; W_1[x_{k-1}]] + b)` (eq. 7): P(draft `k` is accepted | those before it were)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.confidence_input_size, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits in fp32, before any temperature: `[..., H]` (and `[..., R]`) to `[...]`."""
        features = torch.cat([hidden, embedding], dim=-1) if self.with_markov else hidden
        logits = nn.functional.linear(features.float(), self.proj.weight.float(), self.proj.bias.float())
        return logits.squeeze(-1)
