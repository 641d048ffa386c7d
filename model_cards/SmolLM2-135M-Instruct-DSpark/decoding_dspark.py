"""The way into `generate`: `target.generate(**inputs, assistant_model=drafter)`.

The host chooses a candidate generator by a hard-coded chain, so importing the drafter wraps three methods of
`GenerationMixin`, once a process. The wrappers know no version: they only ask whether the assistant offers the
protocol and hand over to its own class, so drafters of different code versions live side by side. `DSPARK_HOOK=0` in
the environment leaves the host untouched; the official `custom_generate=` route works all the same.
"""

import copy
import functools
import os

import torch
from transformers.generation import GenerationMixin, StoppingCriteriaList
from transformers.utils import logging

from .batch_decoding_dspark import batch_decoding
from .candidate_generator_dspark import DSparkCandidateGenerator, rope_parameters
from .ends_dspark import BlockEnds
from .prepare_dspark import refuse_guidance, with_stop_strings
from .statistics_dspark import DSparkStatistics


logger = logging.get_logger(__name__)

HOOK_SWITCH = "DSPARK_HOOK"
HOOK_MARK = "_dspark_hook"

# Written to `custom_generate/generate.py` of every saved drafter.
CUSTOM_GENERATE = '''"""The official spelling of assisted decoding with the drafter of this repo:

    target.generate(**inputs, assistant_model=drafter, custom_generate=<this repo>, trust_remote_code=True)
"""


def generate(model, assistant_model=None, **kwargs):
    if not hasattr(assistant_model, "decode_for"):
        raise ValueError("pass the DSpark drafter of this repo as `assistant_model=`.")
    return assistant_model.decode_for(model, **kwargs)
'''


def install_hook() -> bool:
    """Make `generate` understand DSpark drafters; `True` if it does. Idempotent: the first drafter loaded wraps each
    of the host's methods for all."""
    if os.environ.get(HOOK_SWITCH, "1").lower() in ("0", "off", "false", "no") and not hook_installed():
        logger.info(f"{HOOK_SWITCH} is off: decode with `custom_generate=` or `drafter.decode_for(target, ...)`.")
        return False
    for name, wrap in WRAPPERS.items():
        original = getattr(GenerationMixin, name)
        if not getattr(original, HOOK_MARK, False):
            wrapper = functools.wraps(original)(wrap(original))
            setattr(wrapper, HOOK_MARK, True)
            setattr(GenerationMixin, name, wrapper)
    logger.info(f"`generate(assistant_model=...)` takes DSpark drafters; {HOOK_SWITCH}=0 leaves it as it was.")
    return True


def wrapped_decoding(original):
    def _assisted_decoding(self, *args, **kwargs):
        own = getattr(kwargs.get("assistant_model"), "dspark_assisted_decoding", None)
        return original(self, *args, **kwargs) if own is None else own(original, self, *args, **kwargs)

    return _assisted_decoding


def wrapped_generator(original):
    def _get_candidate_generator(self, *args, **kwargs):
        own = getattr(kwargs.get("assistant_model"), "dspark_candidate_generator", None)
        return original(self, *args, **kwargs) if own is None else own()

    return _get_candidate_generator


def wrapped_validation(original):
    """The host refuses several sequences a prompt for any assistant; whether one can is its own affair."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if getattr(generation_mode_kwargs.get("assistant_model"), "dspark_takes_batches", False):
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


WRAPPERS = {
    "_assisted_decoding": wrapped_decoding,
    "_get_candidate_generator": wrapped_generator,
    "_validate_generation_mode": wrapped_validation,
}


def hook_installed() -> bool:
    return getattr(GenerationMixin._assisted_decoding, HOOK_MARK, False)


def assisted_decoding(
    drafter,
    original,
    target,
    input_ids: torch.LongTensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    streamer=None,
    **kwargs,
):
    """The host's `_assisted_decoding` with a DSpark drafter: same arguments, same outputs.

    Raises:
        ValueError: for what assisted decoding cannot do exactly; nothing was generated then.
    """
    refuse_unsupported(target, input_ids, logits_processor, kwargs)
    if input_ids.shape[0] > 1:
        return batch_decoding(
            drafter, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs
        )
    refuse_rope_switch(target, input_ids, generation_config, kwargs)
    kwargs = without_full_mask(kwargs, input_ids)
    cache = call_cache(kwargs)
    generator = DSparkCandidateGenerator(drafter, target, generation_config, logits_processor, kwargs)
    generator.statistics.keep_log = bool(getattr(generation_config, "dspark_log", False))
    ends = BlockEnds(stopping_criteria, streamer, cache, input_ids.shape[1], lambda: generator.awaiting_verification)
    generator.before_draft = ends.release_crop
    with generator.running(), ends:
        output = original(
            target,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=StoppingCriteriaList([ends]),
            generation_config=generation_config,
            streamer=None if streamer is None else ends,
            **{**kwargs, "assistant_model": generator},
        )
        output = ends.trim(output)
        generator.cut(ends.overrun)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    generator.statistics.generated = sequences.shape[1] - input_ids.shape[1]
    drafter.statistics = generator.statistics
    return output


def without_full_mask(model_kwargs: dict, input_ids: torch.LongTensor) -> dict:
    """The call's arguments without a mask that masks nothing, where `inputs_embeds` came without ids: the host's loop
    would cut the mask to the length of the ids, and with it the prompt's."""
    mask = model_kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] == input_ids.shape[1]:
        return model_kwargs
    if not mask.bool().all():
        raise ValueError(
            "`inputs_embeds` with padding cannot be drafted for without ids: pass `input_ids` of the same length as "
            "well, or drop the padding, or drop `assistant_model`."
        )
    return {key: value for key, value in model_kwargs.items() if key != "attention_mask"}


def call_cache(model_kwargs: dict):
    """The target's cache of a call: `cache` from transformers 5.24 on, `past_key_values` before."""
    return model_kwargs.get("cache") if model_kwargs.get("cache") is not None else model_kwargs.get("past_key_values")


def refuse_unsupported(target, input_ids, logits_processor, model_kwargs: dict) -> None:
    """Errors for calls whose result would be wrong, before anything runs."""
    if target.config.is_encoder_decoder:
        raise ValueError(f"DSpark drafts for decoder-only targets; {type(target).__name__} has an encoder.")
    if not model_kwargs.get("use_cache", True):
        raise ValueError(
            "assisted decoding needs a cache, and `use_cache` is False here or in the target's generation config: "
            "pass `use_cache=True`, or drop `assistant_model`."
        )
    cache = call_cache(model_kwargs)
    if cache is None:
        raise ValueError(f"assisted decoding needs a cache, and {type(target).__name__} was given none.")
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"the cache passed to `generate` already holds {cache.get_seq_length()} tokens, for which the drafter has "
            "no target features. Pass the whole prompt without `past_key_values`, or drop `assistant_model`."
        )
    refuse_guidance(logits_processor)


def refuse_rope_switch(target, input_ids, generation_config, model_kwargs: dict) -> None:
    """Before 5.24 the host's Phi-3 classes drop the cache where their `longrope` factors switch, in mid round."""
    rope = rope_parameters(target.config.get_text_config(decoder=True))
    switch = rope.get("original_max_position_embeddings")
    own_inputs = type(target).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if rope.get("rope_type") != "longrope" or not switch or not own_inputs or "cache" in model_kwargs:
        return
    if input_ids.shape[1] <= switch < generation_config.max_length:
        raise ValueError(
            f"this call may pass position {switch}, where the target's `longrope` factors switch, and with this "
            "release of transformers drafting is not exact there: use 5.24 or newer, or a smaller `max_new_tokens`."
        )


def generate_with(drafter, target, **kwargs):
    """`target.generate(assistant_model=drafter, **kwargs)`; without the hook, through the host's `custom_generate`."""
    if hook_installed():
        return target.generate(assistant_model=drafter, **kwargs)
    # A callable gets neither streamer nor tokenizer from the host, so both are bound here.
    streamer = kwargs.get("streamer")
    kwargs = with_stop_strings(target, kwargs, kwargs.pop("tokenizer", None))

    def decode(model, input_ids, **inner):
        return assisted_decoding(drafter, host_loop, model, input_ids, **{**inner, "streamer": streamer})

    return target.generate(custom_generate=decode, **kwargs)


def host_loop(target, *args, assistant_model, **kwargs):
    """The untouched host loop with a given candidate generator."""
    target._get_candidate_generator = lambda **_: assistant_model
    try:
        return GenerationMixin._assisted_decoding(target, *args, assistant_model=assistant_model, **kwargs)
    finally:
        del target._get_candidate_generator


__all__ = ["CUSTOM_GENERATE", "DSparkStatistics", "assisted_decoding", "generate_with", "install_hook"]
