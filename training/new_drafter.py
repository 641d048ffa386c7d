"""A fresh drafter for a target: its config, its reduced vocabulary, its layers started from the target's last ones."""

import torch

from dspark.modeling_dspark import DSparkConfig, DSparkModel
from dspark.modeling_dspark.target_dspark import decoder_layers, target_fingerprint


def new_drafter(
    target,
    tokenizer=None,
    *,
    warm_start: bool = True,
    token_counts: torch.Tensor | None = None,
    seed: int = 0,
    **config,
) -> DSparkModel:
    """A drafter to train.

    Args:
        target: the causal LM.
        warm_start: start layers from the target's last ones, the context projection from the last tap.
        token_counts: `[V]`, how often the target writes each id; with `draft_vocab_size` the most frequent are kept.
        config: keys of `DSparkConfig.from_target` (`num_hidden_layers`, `block_size`, `draft_vocab_size`, ...).

    Raises:
        ValueError: for a reduced vocabulary without counts, or values no drafter can have.
    """
    torch.manual_seed(seed)
    settings = DSparkConfig.from_target(target.config, tokenizer=tokenizer, **config)
    settings.target_fingerprint = target_fingerprint(target)
    drafter = DSparkModel(settings)
    if settings.draft_vocab_size is not None:
        if token_counts is None:
            raise ValueError("`draft_vocab_size` needs `token_counts`: which ids to keep is read off the data.")
        drafter.d2t.copy_(draft_vocabulary(token_counts, settings))
    if warm_start:
        start_from_target(drafter, target)
    return drafter


def draft_vocabulary(counts: torch.Tensor, config: DSparkConfig) -> torch.LongTensor:
    """Offsets `d2t [V']` of the most frequent ids; ends of text are always among them, ties go to the lower id."""
    counts = counts.clone().double()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    counts[[end for end in ends if end is not None]] = float("inf")
    kept = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    return kept - torch.arange(len(kept))


@torch.no_grad()
def start_from_target(drafter: DSparkModel, target) -> int:
    """Copy the target's last layers into the drafter's where shapes agree, its final norm, and let the context be the
    last tap's features at first. Returns how many tensors were copied."""
    layers = decoder_layers(target)
    copied = 0
    for ours, theirs in zip(drafter.layers, list(layers)[-len(drafter.layers) :]):
        weights = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            source = weights.get(name)
            if source is not None and source.shape == parameter.shape and source.is_floating_point():
                parameter.copy_(source)
                copied += 1
    norm = getattr(target.get_decoder(), "norm", None)
    if (
        norm is not None
        and getattr(norm, "weight", None) is not None
        and norm.weight.shape == drafter.norm.weight.shape
    ):
        drafter.norm.weight.copy_(norm.weight)
        copied += 1
    if copied:
        size = drafter.config.hidden_size
        drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device)
        first = dict(list(layers)[-len(drafter.layers)].named_parameters()).get("input_layernorm.weight")
        if first is not None and first.shape == drafter.hidden_norm.weight.shape:
            drafter.hidden_norm.weight.copy_(first)  # keys and values read the context behind this norm
    return copied
