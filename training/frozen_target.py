"""The frozen target in training: tapped features and states before the LM head, of one forward without gradients."""

import torch

from dspark.candidate_generator.taps_dspark import FeatureTaps


class FrozenTarget:
    """A target as the trainer sees it. It is put into evaluation mode and never written to.

    Raises:
        ValueError: when the target's logits are not its LM head on its decoder's output (with the scale and soft-cap
            the drafter's config knows): the drafter would be aligned to another law.
    """

    def __init__(self, target: torch.nn.Module, drafter):
        self.target = target.eval()
        self.link = drafter.link(target)
        self.layer_ids = drafter.config.target_layer_ids
        self.dtype = target.get_input_embeddings().weight.dtype
        self.device = target.get_input_embeddings().weight.device
        self._check(drafter.config.vocab_size)

    @torch.no_grad()
    def run(self, ids: torch.LongTensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[B, S, T * H]` and states before the LM head `[B, S, H]` of sequences padded on the right.

        The padding is behind all that counts and the target is causal, so it needs no mask.
        """
        with FeatureTaps(self.link.layers, self.layer_ids, device, self.dtype) as taps:
            states = self.target.get_decoder()(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
            return taps.take(), states.to(device)

    @torch.no_grad()
    def _check(self, vocab_size: int) -> None:
        ids = torch.arange(8)[None] % vocab_size
        _, states = self.run(ids, self.device)
        ours = self.link.target_logits(states)
        theirs = self.target(ids.to(self.device), use_cache=False).logits[..., :vocab_size].float().to(ours.device)
        tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * theirs.std()
        if not torch.isfinite(theirs).all():
            raise ValueError(
                f"the target's logits hold NaN or infinity in {self.dtype}: load it in bfloat16 or float32."
            )
        if not (ours - theirs).abs().max() <= tolerance:
            raise ValueError(
                f"the logits of {type(self.target).__name__} are not its LM head on its decoder's output (they differ "
                f"by {(ours - theirs).abs().max():.3g}): training does not support this family. If the drafter's "
                "config was written by hand, look at `logit_scale` and `final_logit_softcapping`."
            )
