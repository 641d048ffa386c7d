"""`target.generate(batch, assistant_model=drafter)`: several prompts, or several texts of one, in one call."""

import time

import torch
from transformers.generation import EosTokenCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .candidate_generator_dspark import read_settings
from .engine_dspark import DSparkEngine
from .requests_dspark import Request
from .statistics_dspark import DSparkStatistics


PREFILL_TOKENS = 2048  # of the prompts in one forward
# What a call may hand over beside the ids without changing what a row's tokens depend on.
UNDERSTOOD = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"),
    *("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus"),
    *("output_attentions", "output_hidden_states"),
}


def batch_decoding(
    drafter, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: dict
):
    """What the host's loop returns for a batch `[B, S]`, left-padded, through an engine made for the call.

    Raises:
        ValueError: for what a batch cannot have; nothing was generated then.
    """
    refuse_in_batches(generation_config, model_kwargs)
    paddings, firsts = row_layout(input_ids, model_kwargs)
    started = time.perf_counter()
    kind, threshold, _ = read_settings(drafter.config, generation_config)
    batch = input_ids.shape[0]
    width = 1 + drafter.config.block_size
    engine = DSparkEngine(
        target,
        drafter,
        schedule=kind,
        threshold=threshold,
        max_requests=batch,
        max_step_tokens=PREFILL_TOKENS + batch * width,
        prefill_chunk=PREFILL_TOKENS,
    )
    profiled = time.perf_counter()
    pads = any(isinstance(criterion, EosTokenCriteria) for criterion in stopping_criteria)
    requests = [
        Request(
            drafter,
            row,
            generation_config,
            logits_processor,
            stopping_criteria,
            padding=padding,
            first_position=first,
            row=i,
            batch=batch,
        )
        for i, (row, padding, first) in enumerate(zip(input_ids.cpu(), paddings, firsts))
    ]
    columns = Columns(streamer, requests, generation_config._pad_token_tensor)
    for request in requests:
        request.held = not pads  # without an EOS the host lets rows that ended write on until all have
        engine.enqueue(request)
    while engine.busy:
        engine.step()
        columns.show()
    longest = max(len(request.ids) for request in requests)
    for request in requests:
        if request.error is not None:
            raise request.error
        if len(request.ids) < longest and not pads:
            request.write_on(longest)
    while any(r.finished is None for r in requests):
        engine.step()
    columns.show()
    if streamer is not None:
        streamer.end()
    statistics = DSparkStatistics.merged([request.statistics for request in requests])
    statistics.profile_seconds = profiled - started
    statistics.total_seconds = time.perf_counter() - profiled
    statistics.draft_seconds = engine.statistics.draft_seconds
    statistics.verify_seconds = engine.statistics.verify_seconds
    drafter.statistics = statistics

    out = input_ids.new_full((batch, longest), columns.pad, dtype=torch.long)
    for row, request in zip(out, requests):
        row[: len(request.ids)] = torch.tensor(request.ids, dtype=row.dtype)
    return GenerateDecoderOnlyOutput(sequences=out) if generation_config.return_dict_in_generate else out


class Columns:
    """Shows a batch to a streamer as plain decoding does: one token of every row at a time, padding behind an end."""

    def __init__(self, streamer, requests: list[Request], pad_token: torch.Tensor | None):
        self.streamer, self.requests = streamer, requests
        self.pad = 0 if pad_token is None else int(pad_token)
        self.shown = requests[0].prompt_length

    def show(self) -> None:
        """Put the columns that are complete."""
        if self.streamer is None:
            return
        texts = [request.ids for request in self.requests]
        open_texts = [len(r.ids) for r in self.requests if r.finished is None or r.held]
        until = min(open_texts) if open_texts else max(map(len, texts))
        for at in range(self.shown, until):
            self.streamer.put(torch.tensor([text[at] if at < len(text) else self.pad for text in texts]))
        self.shown = max(self.shown, until)


def row_layout(input_ids: torch.LongTensor, model_kwargs: dict) -> tuple[list[int], list[int]]:
    """Padding in front of each row, and the position of its first token.

    Raises:
        ValueError: for padding elsewhere, and for positions with gaps.
    """
    batch, length = input_ids.shape
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    mask = torch.ones(batch, length) if mask is None else mask.cpu()
    if mask.shape != input_ids.shape:
        raise ValueError(f"`attention_mask` is {tuple(mask.shape)}, the ids are {(batch, length)}.")
    paddings = []
    for row, seen in enumerate(mask.bool().tolist()):
        if True not in seen:
            raise ValueError(f"`attention_mask` masks the whole prompt of row {row}: nothing is left to continue.")
        paddings.append(seen.index(True))
        if not all(seen[paddings[-1] :]):
            raise ValueError(
                f"`attention_mask` of row {row} has zeros behind its first token: pad on the left "
                "(`padding_side='left'` of the tokenizer)."
            )
    if positions is None:
        return paddings, [0] * batch
    positions = positions.cpu().expand(batch, -1)
    firsts = [int(row[padding]) for row, padding in zip(positions, paddings)]
    for row, padding, first in zip(positions, paddings, firsts):
        if not torch.equal(row[padding:], torch.arange(first, first + length - padding)):
            raise ValueError("`position_ids` of a batch must be consecutive in every row.")
    return paddings, firsts


def refuse_in_batches(generation_config, model_kwargs: dict) -> None:
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in UNDERSTOOD]
    if unknown:
        raise ValueError(
            f"a batch with `{unknown[0]}` cannot be drafted for: call `generate` once a prompt, or drop "
            "`assistant_model`."
        )
    names = [f"output_{name}" for name in ("scores", "logits", "attentions", "hidden_states")]
    asked = [name for name in names if getattr(generation_config, name) or model_kwargs.get(name)]
    if generation_config.return_dict_in_generate and asked:
        raise ValueError(
            f"`{asked[0]}` is there for one prompt at a time when drafting: call `generate` once a prompt, or "
            "drop `assistant_model`."
        )
