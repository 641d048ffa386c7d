"""From a prompt and the settings of `generate` to a request, by the host's own preparation."""

import copy

import torch
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from .requests_dspark import Request


# Settings of `generate` that are about a whole call and mean nothing for one request among others.
CALL_SETTINGS = ("num_beams", "num_return_sequences", "num_beam_groups")


def prepare_request(target, drafter, input_ids, generation_config, seed, tokenizer, kwargs: dict) -> Request:
    """A request with processors, criteria and lengths as `generate` prepares them.

    Raises:
        ValueError: naming what cannot be served.
    """
    ids = prompt_ids(input_ids, target.config.get_text_config(decoder=True).vocab_size)
    kwargs = with_stop_strings(target, {**kwargs, "generation_config": generation_config}, tokenizer)
    prepared = {}

    def capture(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        prepared.update(processors=logits_processor, criteria=stopping_criteria, settings=generation_config)
        return input_ids

    kwargs.setdefault("attention_mask", torch.ones_like(ids[None]))
    target.generate(ids[None].to(target.device), custom_generate=capture, **kwargs)
    settings = prepared["settings"]
    for name in CALL_SETTINGS:
        if (getattr(settings, name, None) or 1) > 1:
            raise ValueError(f"`{name}` is {getattr(settings, name)}: a request is one text; submit it several times.")
    refuse_guidance(prepared["processors"])
    return Request(drafter, ids, settings, prepared["processors"], prepared["criteria"], seed=seed)


def prompt_ids(input_ids, vocabulary: int) -> torch.LongTensor:
    """`[S]` from a list, `[S]` or `[1, S]`.

    Raises:
        ValueError: for an empty prompt, a batch, or ids that are none.
    """
    if isinstance(input_ids, str):
        raise ValueError("`input_ids` is text: give the tokenizer's ids.")
    ids = torch.as_tensor(input_ids)
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise ValueError(f"`input_ids` must be the ids of one prompt, at least one; got shape {tuple(ids.shape)}.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"`input_ids` must lie in 0 to {vocabulary - 1}, the target's vocabulary.")
    return ids.long().cpu()


def with_stop_strings(target, kwargs: dict, tokenizer) -> dict:
    """The arguments of a `generate` call with a criterion in place of `stop_strings`: the host does not hand a
    tokenizer to the callables of `custom_generate`.

    Raises:
        ValueError: for stop strings that are none, or without a tokenizer.
    """
    kwargs = dict(kwargs)
    settings = kwargs.get("generation_config")
    settings = target.generation_config if settings is None else settings
    stops = kwargs.pop("stop_strings", None)
    if stops is None and getattr(settings, "stop_strings", None) is not None:
        stops = settings.stop_strings
        kwargs["generation_config"] = copy.copy(settings)
        kwargs["generation_config"].stop_strings = None
    if stops is None:
        return kwargs
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, (list, tuple)) and stops and all(isinstance(s, str) and s for s in stops)):
        raise ValueError(f"`stop_strings` is {stops!r}: give a string or a list of strings, none of them empty.")
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the `tokenizer`.")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=list(stops)))
    return {**kwargs, "stopping_criteria": criteria}


def refuse_guidance(processors) -> None:
    if any("ClassifierFreeGuidance" in type(p).__name__ for p in processors or ()):
        raise ValueError(
            "`guidance_scale` keeps a cache of its own, which cannot follow rejected drafts: drop it, or drop "
            "`assistant_model`."
        )
    if any("SynthID" in type(p).__name__ for p in processors or ()):
        raise ValueError(
            "SynthID watermarks keep a state of their own, which cannot follow rejected drafts: drop "
            "`watermarking_config`, or drop `assistant_model`."
        )
