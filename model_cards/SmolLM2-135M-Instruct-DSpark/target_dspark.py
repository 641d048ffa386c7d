"""What a drafter borrows from its target: embedding, LM head, tapped layers, and the checks that they fit.

The target is frozen and owned by the user. A link holds it weakly, never as a submodule, and saves nothing of it.
"""

import hashlib
import weakref

import torch
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)


class TargetLink:
    """A drafter's view of one target.

    Raises:
        ValueError: when the two cannot work together (sizes, depth, vocabulary, mask id), before any forward.
    """

    def __init__(self, drafter: nn.Module, target: nn.Module):
        self.config = drafter.config
        self._target = weakref.ref(target)
        self._head_rows: torch.Tensor | None = None
        self._head_bias: torch.Tensor | None = None
        self._head_key = None
        check_fit(drafter.config, target)
        check_kept_ids(drafter)
        self.layers = decoder_layers(target)
        warn_if_other_target(drafter.config, target)

    @property
    def target(self) -> nn.Module:
        return self._target()

    def embed(self, drafter: nn.Module, ids: torch.LongTensor) -> torch.Tensor:
        """Embeddings of a block's ids, `[B, G]` to `[B, G, H]`, on the drafter's device and in its dtype.

        The target's embedding module is called, so a scale that lives in it (Gemma 3) applies.
        """
        embedding = drafter.embed_tokens if drafter.embed_tokens is not None else self.target.get_input_embeddings()
        out = embedding(ids.to(input_device(embedding.weight, ids)))
        return out.to(device=drafter.device, dtype=drafter.dtype)

    def base_logits(self, drafter: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """`U_k` of eq. 4 over the producible ids: hidden states `[..., H]` to fp32 `[..., V']`."""
        head = drafter.lm_head if drafter.lm_head is not None else self.target.get_output_embeddings()
        if self.config.draft_vocab_size is not None and is_plain_linear(head):
            rows, bias = self._gathered_head(head, drafter)
            logits = nn.functional.linear(hidden.to(device=rows.device, dtype=rows.dtype), rows, bias)
        else:
            logits = self._run_head(head, hidden)
            if self.config.draft_vocab_size is not None:
                logits = logits[..., drafter.kept_ids.to(logits.device)]
        return self._as_the_target_reads(logits.to(hidden.device))

    def target_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's own logits: its states before the LM head `[..., H]` to fp32 `[..., V]`."""
        return self._as_the_target_reads(self._run_head(self.target.get_output_embeddings(), states))

    def _run_head(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        device = input_device(head.weight, hidden)
        logits = head(hidden.to(device=device, dtype=head_dtype(head, hidden.dtype)))
        return logits[..., : self.config.vocab_size]

    def _as_the_target_reads(self, logits: torch.Tensor) -> torch.Tensor:
        """In fp32, with the scale and the soft-cap that some targets put behind their head."""
        logits = logits.float()
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.final_logit_softcapping is not None:
            cap = self.config.final_logit_softcapping
            logits = torch.tanh(logits / cap) * cap
        return logits

    def refresh(self) -> None:
        """Gather the LM head's rows anew: not every way of writing to a weight shows in its version."""
        self._head_key = None

    def _gathered_head(self, head: nn.Linear, drafter: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of a plain LM head for the kept ids, gathered again only when the weight or the kept ids changed."""
        key = (tensor_version(head.weight), tensor_version(drafter.d2t))
        if key != self._head_key:
            ids = drafter.kept_ids.to(head.weight.device)
            self._head_rows = head.weight.detach()[ids]
            self._head_bias = None if head.bias is None else head.bias.detach()[ids]
            self._head_key = key
        return self._head_rows, self._head_bias

    def drop_own_embeddings(self, drafter: nn.Module) -> None:
        """Free the embedding and head a foreign checkpoint carries when they are the target's, as they nearly always
        are; otherwise keep them, say so, and draft with them."""
        if drafter.embed_tokens is None:
            return
        pairs = (
            (drafter.embed_tokens.weight, self.target.get_input_embeddings().weight),
            (drafter.lm_head.weight, self.target.get_output_embeddings().weight),
        )
        if all(same_values(own, theirs) for own, theirs in pairs):
            drafter.embed_tokens = drafter.lm_head = None
            drafter.config.own_embeddings = False
        else:
            logger.warning(
                "The drafter's checkpoint has an embedding and an LM head that differ from the target's: they are "
                "kept and used for drafting. The output is right either way; acceptance may be low if the drafter "
                "was trained for another target."
            )


def text_config(target: nn.Module):
    return target.config.get_text_config(decoder=True)


def check_fit(config, target: nn.Module) -> None:
    """Refuse a target the drafter was not built for, naming both values."""
    theirs = text_config(target)
    names = f"drafter for {describe(config.target_name_or_path)}, target {describe(theirs._name_or_path)}"
    pairs = (
        ("hidden_size", config.hidden_size, theirs.hidden_size),
        ("num_target_layers", config.num_target_layers, theirs.num_hidden_layers),
        ("vocab_size", config.vocab_size, theirs.vocab_size),
    )
    for key, ours, target_value in pairs:
        if ours != target_value:
            raise ValueError(
                f"`assistant_model` does not fit the target: its `{key}` is {ours}, the target has {target_value} "
                f"({names}). Use a drafter trained for this target."
            )
    embedding = target.get_input_embeddings()
    width = getattr(embedding, "embedding_dim", config.hidden_size)
    if width != config.hidden_size:
        raise ValueError(
            f"the target's embedding is {width} wide and its layers {config.hidden_size} ({names}): a drafter shares "
            "embedding and LM head with its target, which takes targets where the two are equal."
        )
    if getattr(theirs, "sliding_window", None) == 1:
        raise ValueError(f"a target with `sliding_window` 1 cannot roll its cache back ({names}).")
    rows = embedding.weight.shape[0]
    if config.mask_token_id >= rows:
        raise ValueError(
            f"`mask_token_id` {config.mask_token_id} is not a row of the target's embedding, which has {rows} "
            f"({names})."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"the target {type(target).__name__} has no LM head; load it with AutoModelForCausalLM.")


def check_kept_ids(drafter: nn.Module) -> None:
    """Refuse a reduced vocabulary that does not name distinct ids: the law of the drafts would not be what it says."""
    kept = drafter.kept_ids
    if kept is None:
        return
    if kept.min() < 0 or kept.max() >= drafter.config.vocab_size or len(kept.unique()) != len(kept):
        raise ValueError(
            "`d2t` of the drafter does not name distinct ids of the target's vocabulary: the checkpoint is damaged, "
            "or a fresh drafter was not given its ids (target id = draft id + d2t[draft id])."
        )


def decoder_layers(target: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, found by their number: families name them differently.

    Raises:
        ValueError: when no module list of that length is there.
    """
    count = text_config(target).num_hidden_layers
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    for root in (decoder, target):
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise ValueError(
        f"cannot find the {count} decoder layers of {type(target).__name__}: DSpark taps them with forward hooks."
    )


def is_plain_linear(head: nn.Module) -> bool:
    """Whether an LM head is `x W^T + b` and no more: no adapter, quantisation, wrapper or offload hook."""
    return (
        type(head) is nn.Linear
        and head.weight.is_floating_point()
        and head.weight.device.type != "meta"
        and not head._forward_hooks
        and not head._forward_pre_hooks
        and not hasattr(head, "_hf_hook")
    )


def input_device(weight: torch.Tensor, given: torch.Tensor) -> torch.device:
    """Where to send a module's input: to its weight, unless that is offloaded and fetched by a hook of its own."""
    return given.device if weight.device.type == "meta" else weight.device


def head_dtype(head: nn.Module, default: torch.dtype) -> torch.dtype:
    """The dtype to feed an LM head with: its weight's, unless that is a packed integer format."""
    return head.weight.dtype if head.weight.is_floating_point() else default


def tensor_version(tensor: torch.Tensor) -> tuple:
    """Changes whenever a tensor is replaced, moved or written to."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, str(tensor.device)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality up to the rounding of the coarser of the two dtypes."""
    if a.shape != b.shape or not b.is_floating_point() or "meta" in (a.device.type, b.device.type):
        return False
    dtype = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    return torch.equal(a.detach().to(b.device, dtype), b.detach().to(dtype))


def target_fingerprint(target: nn.Module) -> str | None:
    """A short hash of a few weights of every layer, equal in fp32 and in bf16; `None` for weights out of reach.

    A fine-tuned, quantised or merged target has another fingerprint than the one it came from.
    """
    # The longest parameter of each layer is one of its projections; norms often survive a fine-tune unchanged.
    weights = [target.get_input_embeddings().weight]
    for layer in decoder_layers(target):
        parameters = [p for p in layer.parameters() if p.is_floating_point()]
        weights += [max(parameters, key=torch.Tensor.numel)] if parameters else []
    if any(w.device.type == "meta" for w in weights):
        return None
    samples = [w.detach().flatten()[:: max(1, w.numel() // 64)][:64].to(torch.bfloat16).cpu() for w in weights]
    return hashlib.sha256(torch.cat(samples).view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def warn_if_other_target(config, target: nn.Module) -> None:
    """One warning when the drafter was made for another target: legitimate (fine-tunes, quantised weights, adapters),
    and the output stays the target's, but acceptance may be lower."""
    theirs = target.config
    name, revision = theirs._name_or_path, getattr(theirs, "_commit_hash", None)
    fingerprint = target_fingerprint(target) if config.target_fingerprint else None
    if fingerprint is not None:
        differs = fingerprint != config.target_fingerprint
    elif config.target_revision and revision:
        differs = revision != config.target_revision
    else:
        differs = bool(config.target_name_or_path and name) and name != config.target_name_or_path
    if differs:
        logger.warning(
            f"The drafter was made for {describe(config.target_name_or_path, config.target_revision)} (fingerprint "
            f"{config.target_fingerprint}); the target is {describe(name, revision)} (fingerprint {fingerprint}). "
            "The output is the target's all the same; fewer drafts may be accepted."
        )


def describe(name: str | None, revision: str | None = None) -> str:
    return f"{name or 'an unnamed model'}" + (f" at {revision}" if revision else "")
