"""A fresh drafter for a target: its config, its reduced vocabulary, its layers started from the target's last ones."""

import torch
from transformers.utils import logging

from dspark.modeling_dspark import DSparkConfig, DSparkModel
from dspark.modeling_dspark.target_dspark import decoder_layers, target_fingerprint


logger = logging.get_logger(__name__)


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
        if token_counts is not None and len(token_counts) != settings.vocab_size:
            raise ValueError(f"`token_counts` has {len(token_counts)} entries, the vocabulary {settings.vocab_size}.")
        if token_counts is None:
            raise ValueError("`draft_vocab_size` needs `token_counts`: which ids to keep is read off the data.")
        drafter.d2t.copy_(draft_vocabulary(token_counts, settings, ends_of_text(target)))
    if warm_start:
        copied = start_from_target(drafter, target)
        logger.info(f"{copied} of {sum(1 for _ in drafter.parameters())} tensors start from the target")
    return drafter


def ends_of_text(target) -> set[int]:
    """All ids that end the target's text, by its config and its generation defaults."""
    ends: set[int] = set()
    for source in (target.config, getattr(target, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ends |= set(value if isinstance(value, list) else [value])
    return ends - {None}


def draft_vocabulary(counts: torch.Tensor, config: DSparkConfig, ends: set[int]) -> torch.LongTensor:
    """Offsets `d2t [V']` of the most frequent ids; ends of text are always among them, ties go to the lower id."""
    counts = counts.clone().double()
    counts[[end for end in sorted(ends) if end < len(counts)]] = float("inf")
    kept = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    return kept - torch.arange(len(kept))


@torch.no_grad()
def start_from_target(drafter: DSparkModel, target) -> int:
    """Copy the target's last layers into the drafter's where names and shapes agree, its final norm, and let the
    context be the last tap's features at first. Returns how many tensors were started from the target.

    Norms are taken by what they do, not by their weight: some families multiply by `1 + w`. Where a family norms a
    branch behind its attention (Gemma 2, 3), the norm before the MLP has another name.
    """
    layers = list(decoder_layers(target))[-len(drafter.layers) :]
    copied = 0
    for ours, theirs in zip(drafter.layers[-len(layers) :], layers):
        weights = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            if name.endswith("norm.weight"):
                continue
            source = weights.get(name)
            if source is not None and source.shape == parameter.shape and source.is_floating_point():
                parameter.copy_(source)
                copied += 1
        before_mlp = "pre_feedforward_layernorm" if hasattr(theirs, "pre_feedforward_layernorm") else None
        for name, module in ours.named_modules():
            if name.endswith("norm") and hasattr(module, "weight"):
                other = before_mlp if name == "post_attention_layernorm" and before_mlp else name
                copied += copy_norm(module, dict(theirs.named_modules()).get(other))
    copied += copy_norm(drafter.norm, getattr(target.get_decoder(), "norm", None))
    if copied:
        size = drafter.config.hidden_size
        drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device)
        # Keys and values read the context behind this norm.
        copied += copy_norm(drafter.hidden_norm, getattr(layers[0], "input_layernorm", None))
    return copied


@torch.no_grad()
def copy_norm(ours: torch.nn.Module, theirs: torch.nn.Module | None) -> bool:
    """Give an RMS norm the factors by which another one scales; `False` when that is no RMS norm of this width."""
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != ours.weight.shape or not weight.is_floating_point():
        return False
    probe = torch.full_like(weight, 64.0)[None]  # large beside any epsilon
    factors = theirs(probe)[0].float()
    other = torch.linspace(-2, 2, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
    expected = (other.float() * other.float().pow(2).mean().rsqrt())[0] * factors
    if not torch.allclose(theirs(other)[0].float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())):
        return False  # a layer norm, say
    ours.weight.copy_(factors)
    return True
