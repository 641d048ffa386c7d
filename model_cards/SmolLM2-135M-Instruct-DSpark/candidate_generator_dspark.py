"""`DSparkCandidateGenerator`: drafts for the host's assisted-decoding loop, one round at a time.

A round, for `k = 1..G`: the confidence `c_k` from `(h_k, x_{k-1})`; the schedule's stop test; only then the draw of
`x_k`. On a CPU the loop leaves at the stop; on an accelerator all slots are drawn, the same rule is evaluated on the
device and the result read once.
"""

import time
from contextlib import contextmanager

import torch
from transformers.generation import CandidateGenerator

from .cost_table_dspark import cost_table_for
from .draft_chain_dspark import DraftChain
from .sampling_dspark import GREEDY_TEMPERATURE, draw_from, is_stateless_warper, warped_law
from .schedule_dspark import SCHEDULES, AcceptanceRates, PrefixScheduler, RestPolicy
from .statistics_dspark import DSparkStatistics
from .stopwatch_dspark import Stopwatch
from .taps_dspark import FeatureTaps


# `generate` fills these in on every call, so they cannot be told from a user's wish for the same value.
HOST_DEFAULTS = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
SETTINGS = ("dspark_schedule", "dspark_threshold", "dspark_log")


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts blocks for one `generate` call of one prompt.

    Args:
        drafter: the [`DSparkModel`].
        target: the model that generates.
        generation_config: the call's, complete. `dspark_schedule` and `dspark_threshold` are read if set,
            `num_assistant_tokens` caps the block and `assistant_confidence_threshold` selects the threshold schedule
            where they differ from the host's defaults.
        logits_processor: the call's processors. The stateless warpers shape the draft law too; the others act on the
            target only, which costs acceptance at most.
        model_kwargs: the call's forward arguments, for the prompt's mask and positions.

    Raises:
        ValueError: for settings that make no sense, and for a target the drafter does not fit.
    """

    requires_model_outputs = False

    def __init__(self, drafter, target, generation_config, logits_processor=None, model_kwargs=None):
        self.drafter, self.target = drafter, target
        self.link = drafter.link(target)
        self.link.refresh()
        config = drafter.config
        kind, threshold, self.cap = read_settings(config, generation_config)
        self.max_length = generation_config.max_length
        self.reach, self.beyond = position_limit(target.config.get_text_config(decoder=True))
        self.eos_ids = eos_ids(generation_config)
        self.do_sample = bool(generation_config.do_sample)
        self.warpers = [p for p in logits_processor or () if is_stateless_warper(p)] if self.do_sample else []
        temperature = (generation_config.temperature or 1.0) if self.do_sample else 0.0
        self.greedy_drafts = temperature < GREEDY_TEMPERATURE
        self.temperatures = drafter.confidence_temperatures(temperature)
        self.whole_block = drafter.device.type != "cpu"

        self.statistics = DSparkStatistics(config.block_size, schedule=kind)
        started = time.perf_counter()
        table = cost_table_for(drafter, target) if kind == "throughput" else None
        self.statistics.profile_seconds = time.perf_counter() - started
        self.scheduler = PrefixScheduler(kind, config.block_size, table, threshold)
        self.rest = RestPolicy(table) if table is not None else None
        self.rates = AcceptanceRates(config.block_size)

        self.taps = FeatureTaps(self.link.layers, config.target_layer_ids, drafter.device, drafter.dtype)
        self.cache = drafter.new_cache()
        self.awaiting_verification = False
        self.before_draft = None  # called before anything else of a round
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # features and positions not in the draft cache
        self._prompt_mask, self._prompt_positions = prompt_layout(model_kwargs or {})
        self._next_position: int | None = None  # of the anchor; None until the prompt went through
        self._drafts: list[int] = []
        self._drafted_round = False
        self._watch = Stopwatch(drafter.device, target)

    # The protocol of the hook: the host's loop is given this object as its assistant and asks it for the generator.
    def dspark_candidate_generator(self) -> "DSparkCandidateGenerator":
        return self

    @contextmanager
    def running(self):
        """Hooks on the target for the length of a call; the statistics are complete when it ends."""
        started = time.perf_counter()
        with torch.no_grad(), self.taps, self._watch:
            yield self
            self._watch.read_into(self.statistics)
            self.statistics.total_seconds = time.perf_counter() - started

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.LongTensor, *args, **kwargs):
        """`input_ids` `[1, S]` with `l` drafts behind them, and `log q` `[1, l, V]` of the law they were drawn from
        when sampling. Without a draft: `(input_ids, None)`."""
        if self.before_draft is not None:
            self.before_draft()
        self._length = input_ids.shape[1]
        self._drafts, self._drafted_round = [], False
        candidates, log_q = input_ids, None
        if self._next_position is not None:
            limit = min(self.drafter.config.block_size, self.cap, self.max_length - self._length - 1)
            if self._next_position < self.reach:
                limit = min(limit, self.reach - 1 - self._next_position)
            elif not self.beyond:
                limit = 0
            why = self._why_not(limit)
            if why is None:
                self._watch.start()
                candidates, log_q = self._draft(input_ids, limit)
                self._watch.stop("draft")
            else:
                self.statistics.rests[why] += 1
                self.statistics.plain_rounds += 1
        self.awaiting_verification = True
        self.taps.clear()  # a criterion may have run the target
        self._watch.before_verification()
        return candidates, log_q

    def _why_not(self, limit: int) -> str | None:
        if limit <= 0:
            return "at the length limit" if self.cap > 0 else "num_assistant_tokens is 0"
        if self.rest is not None and not self.rest.drafts():
            return "drafting did not pay"
        return None

    def _draft(self, input_ids: torch.LongTensor, limit: int):
        """Run the backbone and draw up to `limit` drafts, as many as the schedule admits."""
        statistics = self.statistics
        statistics.rounds += 1
        self._drafted_round = True
        self._context = self._next_position
        self.scheduler.start_round(limit, self._context)
        features, positions = (torch.cat(parts, dim=1) for parts in zip(*self._pending))
        self._pending.clear()
        block = torch.arange(self.drafter.config.block_size, device=positions.device)[None] + self._next_position
        anchor = input_ids[:, -1:].to(self.drafter.device)
        chain = DraftChain(self.drafter, self.link, anchor, features, self.cache, positions, block)

        draw = self._draw_whole_block if self.whole_block else self._draw_slot_by_slot
        tokens, laws, confidences, drawn = draw(chain, limit)
        # Behind a drafted EOS no slot is examined.
        examined = len(tokens) + (not tokens or tokens[-1] not in self.eos_ids)
        self.scheduler.end_round(confidences[:examined])
        self._drafts = tokens
        statistics.drafted += drawn
        statistics.verified += len(tokens)
        statistics.lengths[len(tokens)] += 1
        if statistics.keep_log:
            statistics.log.append([self._next_position, list(tokens), list(confidences), None])
        if not tokens:
            return input_ids, None
        drafts = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafts], dim=1), self._log_q(laws) if self.do_sample else None

    def _draw_slot_by_slot(self, chain: DraftChain, limit: int):
        tokens, laws, confidences = [], [], []
        for slot in range(limit):
            confidences.append(float(self._confidence(chain, slot)))
            if not self.scheduler.admits(confidences[-1]):
                break
            draft, law = self._draw(chain.logits())
            tokens.append(int(chain.push(draft)))
            laws.append(law)
            if tokens[-1] in self.eos_ids:  # cut after a drafted EOS, never before one
                break
        return tokens, laws, confidences, len(tokens)

    def _draw_whole_block(self, chain: DraftChain, limit: int):
        drawn, laws, confidences = [], [], []
        for slot in range(limit):
            confidences.append(self._confidence(chain, slot).reshape(()))
            draft, law = self._draw(chain.logits())
            drawn.append(chain.push(draft))
            laws.append(law)
        tokens, confidences = torch.cat(drawn), torch.stack(confidences)
        length = self.scheduler.length(confidences)
        # One transfer; ids below 2^24 are exact in fp32.
        packed = torch.cat([tokens.to(confidences.dtype), confidences, length[None].to(confidences.dtype)]).tolist()
        tokens, confidences, length = [int(t) for t in packed[:limit]], packed[limit:-1], int(packed[-1])
        for slot, token in enumerate(tokens[:length]):
            if token in self.eos_ids:
                length = slot + 1
                break
        return tokens[:length], laws[:length], confidences, limit

    def _confidence(self, chain: DraftChain, slot: int) -> torch.Tensor:
        """`c_k` in fp32; without a confidence head, the acceptance rate of the slot in past rounds."""
        if self.drafter.confidence_head is None:
            return torch.tensor(self.rates[slot], device=chain.hidden.device)
        return torch.sigmoid(chain.confidence_logit() / self.temperatures[slot])

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, tuple | None]:
        """A draft `[1]` from logits `[1, V']`, and the law it was drawn from: probabilities `[1, n]` and the ids they
        belong to, `[1, n]` (`None`: all of them in order)."""
        if not self.do_sample:
            return logits.argmax(dim=-1), None
        if self.greedy_drafts:
            draft = logits.argmax(dim=-1)
            return draft, (torch.ones_like(draft, dtype=logits.dtype)[:, None], draft[:, None])
        q, ids = warped_law(logits, self.warpers)
        draft = draw_from(q)
        return draft if ids is None else ids.gather(1, draft[:, None])[:, 0], (q, ids)

    def _log_q(self, laws: list[tuple]) -> torch.Tensor:
        """The drafts' laws as `log q` `[1, l, V]` in the target's ids, `-inf` where a law has nothing."""
        head = self.target.get_output_embeddings()
        width = getattr(head, "out_features", None) or self.drafter.config.vocab_size
        kept = self.drafter.kept_ids
        if kept is None and all(ids is None and q.shape[-1] == width for q, ids in laws):
            return torch.stack([q for q, _ in laws], dim=1).log_()
        log_q = laws[0][0].new_full((1, len(laws), width), float("-inf"))
        for row, (q, ids) in zip(log_q[0], laws):
            if kept is not None:
                ids = kept if ids is None else kept[ids[0]]
            elif ids is not None:
                ids = ids[0]
            if ids is None:
                row[: q.shape[-1]] = q[0].log()
            else:
                row[ids] = q[0].log()
        return log_q

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores=None, num_matches=None) -> None:
        """Called by the host behind each verification, with the accepted tokens in `input_ids`."""
        self._watch.after_verification(prefill=self._next_position is None)
        self.awaiting_verification = False
        emitted = input_ids.shape[1] - self._length
        self._keep_features(self.taps.take(), emitted)
        if not self._drafted_round:
            return
        new = input_ids[0, self._length :].tolist()
        accepted = 0
        while accepted < min(len(new), len(self._drafts)) and new[accepted] == self._drafts[accepted]:
            accepted += 1
        self._outcome = accepted, emitted
        self.statistics.record_round(len(self._drafts), accepted)
        self.rates.record(len(self._drafts), accepted)
        if self.statistics.keep_log:
            self.statistics.log[-1][-1] = accepted
        if self.rest is not None:
            self.rest.record(len(self._drafts), accepted, self._context)

    def cut(self, overrun: int) -> None:
        """Accepted drafts among the last `overrun` tokens of the last round are not in the text: uncount them."""
        if not (overrun and self._drafted_round):
            return
        accepted, emitted = self._outcome
        kept = min(accepted, emitted - overrun)
        self.statistics.uncount(kept, accepted, len(self._drafts))
        if self.statistics.keep_log:
            self.statistics.log[-1][-1] = kept

    def _keep_features(self, features: torch.Tensor, emitted: int) -> None:
        """Queue the features of committed positions: the prompt's, later the old anchor's and accepted drafts'."""
        if self._next_position is None:
            positions = self._prompt_positions
            if positions is None or positions.shape[1] != features.shape[1]:
                positions = torch.arange(features.shape[1])[None]
            positions = positions.to(features.device)
            if self._prompt_mask is not None and self._prompt_mask.shape[1] == features.shape[1]:
                real = self._prompt_mask[0].bool().to(features.device)  # padding is no context
                features, positions = features[:, real], positions[:, real]
            self._next_position = int(positions[0, -1]) + 1
        else:
            features = features[:, :emitted]
            positions = torch.arange(emitted, device=features.device)[None] + self._next_position
            self._next_position += emitted
        self._pending.append((features, positions))
        kept = sum(f.numel() * f.element_size() for f, _ in self._pending)
        self.statistics.feature_bytes = max(self.statistics.feature_bytes, kept)


def read_settings(config, generation_config) -> tuple[str, float, int]:
    """Schedule, threshold and cap on the block of one call.

    Raises:
        ValueError: naming the setting.
    """

    def given(name):
        value = getattr(generation_config, name, None)
        return None if value == HOST_DEFAULTS.get(name) else value

    confidence_threshold = given("assistant_confidence_threshold")
    threshold = given("dspark_threshold")
    kind = given("dspark_schedule")
    if kind is None:
        asked = threshold is not None or confidence_threshold is not None
        kind = "threshold" if asked else config.schedule
    if kind not in SCHEDULES:
        where = "`dspark_schedule`" if given("dspark_schedule") is not None else "`schedule` of the drafter's config"
        raise ValueError(f"{where} is {kind!r}: choose 'throughput', 'fixed' or 'threshold'.")
    for value in (confidence_threshold, config.schedule_threshold):
        threshold = value if threshold is None else threshold
    if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise ValueError(f"`dspark_threshold` is {threshold}: it is compared with a probability, give 0 to 1.")
    unknown = [name for name in vars(generation_config) if name.startswith("dspark_") and name not in SETTINGS]
    if unknown:
        raise ValueError(f"`{unknown[0]}` is no DSpark setting: choose among {', '.join(SETTINGS)}.")
    cap = given("num_assistant_tokens")
    if cap is not None and (not isinstance(cap, int) or cap < 0):
        raise ValueError(f"`num_assistant_tokens` is {cap}: give the most drafts a round may verify, 0 for none.")
    return kind, float(threshold), config.block_size if cap is None else int(cap)


def rope_parameters(text_config) -> dict:
    """The rope parameters of a target, of its full-attention layers where a family nests one entry per layer type."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return rope.get("full_attention") or rope


def position_limit(text_config) -> tuple[float, bool]:
    """First position that no block may reach from before it, and whether drafting goes on behind it.

    Learned positions end there. With `longrope` every forward that reaches it rotates by other factors, with
    `dynamic` scaling every forward behind it by factors of its own longest position: a block that did would compute
    its earlier tokens otherwise than plain decoding.
    """
    rope = rope_parameters(text_config)
    kind = rope.get("rope_type", "default")
    longest = getattr(text_config, "max_position_embeddings", None) or float("inf")
    if kind == "longrope":
        return rope.get("original_max_position_embeddings", longest), True
    if kind == "dynamic" or not rope:
        return longest, False
    return float("inf"), True


def eos_ids(generation_config) -> frozenset[int]:
    """End-of-sequence ids of a call, whatever form they were given in."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    eos = generation_config.eos_token_id if eos is None else eos
    if eos is None:
        return frozenset()
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    return frozenset(eos if isinstance(eos, list) else [eos])


def prompt_layout(model_kwargs: dict) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Mask and positions of the prompt, `[1, S]` each, where the call has them."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if mask is not None and not mask.any():
        raise ValueError("`attention_mask` masks the whole prompt: nothing is left to continue.")
    if positions is not None and positions.dim() == 3:  # multimodal rope: text positions come first
        positions = positions[0]
    if positions is None and mask is not None:
        positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return mask, positions
