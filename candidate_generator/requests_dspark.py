"""One request among many: its text, its settings, where it ends, and what decoding keeps for it."""

import time

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from .candidate_generator_dspark import read_settings
from .sampling_dspark import GREEDY_TEMPERATURE, is_stateless_warper
from .schedule_dspark import RestPolicy
from .statistics_dspark import DSparkStatistics


class Request:
    """A text being continued.

    Args:
        drafter: the [`DSparkModel`].
        input_ids: `[S]`, the prompt as processors and criteria see it, left padding included.
        settings: the complete generation config.
        processors, criteria: the complete lists that `generate` prepared.
        padding: how many of `input_ids` are padding in front.
        first_position: position of the first token that is none.
        row, batch: where the request stands among those that were prepared together, for processors and criteria that
            tell rows apart.
        seed: makes the request's draws its own, whatever else is decoded beside it.

    Attributes:
        ids: prompt and text so far.
        finished: why it ended: `"stop"` (an EOS or a criterion), `"length"`, `"cancelled"`, `"error"`; `None` before.
        error: the exception behind `"error"`.
        statistics: counts of this request; the times are the engine's.
        times: `"submitted"`, `"admitted"`, `"first_token"`, `"ended"` by `time.perf_counter`.
    """

    def __init__(
        self,
        drafter,
        input_ids: torch.LongTensor,
        settings,
        processors=(),
        criteria=(),
        padding: int = 0,
        first_position: int = 0,
        row: int = 0,
        batch: int = 1,
        seed: int | None = None,
    ):
        self.ids: list[int] = input_ids.tolist()
        self.prompt_length = len(self.ids)
        self.padding, self.first_position = padding, first_position
        self.row, self.batch = row, batch
        self.finished: str | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.times: dict[str, float] = {}

        kind, _, self.cap = read_settings(drafter.config, settings)
        self.do_sample = bool(settings.do_sample)
        temperature = (settings.temperature or 1.0) if self.do_sample else 0.0
        self.greedy_drafts = temperature < GREEDY_TEMPERATURE
        self.confidence_temperatures = drafter.confidence_temperatures(temperature)
        self.processors = list(processors)
        self.warpers = [p for p in self.processors if is_stateless_warper(p)] if self.do_sample else []
        self.draft_key = (self.do_sample, self.greedy_drafts, *map(_settings_of, self.warpers))
        alike = len(self.warpers) == len(self.processors)
        self.process_key = (self.do_sample, *(self.draft_key if alike else (id(self),)))
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

        self.max_length = settings.max_length
        self.eos_ids: set[int] = set()
        self.criteria = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = criterion.max_length
            else:
                self.criteria.append(criterion)

        self.statistics = DSparkStatistics(drafter.config.block_size, schedule=kind)
        self.rest = RestPolicy()
        self.expected = [None] * drafter.config.block_size  # running mean of each slot's confidence
        self.slot: int | None = None  # of the target
        self.draft_slot: int | None = None
        self.cached = 0  # tokens in the target's cache
        self.held = False  # keeps its slot when it ends
        self.engine = None  # where it was queued
        self._features: list[torch.Tensor] = []

    # ---- the text

    @property
    def new_ids(self) -> list[int]:
        """The text behind the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def uncached(self) -> list[int]:
        """Tokens of the text that the target has not seen."""
        return self.ids[self.padding + self.cached :]

    @property
    def decoding(self) -> bool:
        """Whether only the anchor is left to be seen, so that the next forward gives a new token."""
        return len(self.ids) > self.prompt_length and len(self.ids) - self.padding - self.cached == 1

    def shown(self, drafts: list[int], device) -> torch.LongTensor:
        """The text with `drafts` behind it as processors see it, `[batch, S]` with every row alike."""
        return torch.tensor([self.ids + drafts], device=device).expand(self.batch, -1)

    def extend(self, tokens: list[int], device) -> int:
        """Take tokens up to the first that ends the text; returns how many were taken."""
        self.times.setdefault("first_token", time.perf_counter())
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            if self._ends(token, device):
                return count
        return len(tokens)

    def _ends(self, token: int, device) -> bool:
        if token in self.eos_ids:
            self.finished = "stop"
        elif len(self.ids) >= self.max_length:
            self.finished = "length"
        if self.criteria:  # asked at every token, also the last, as plain decoding does
            shown = self.shown([], device)
            if bool(self.criteria(shown, None)[self.row]):
                self.finished = "stop"
        return self.finished is not None

    def write_on(self, length: int) -> None:
        """Go on behind an end, up to a length of text that nothing else ends."""
        self.finished, self.max_length, self.eos_ids, self.criteria = None, length, set(), StoppingCriteriaList()

    def fail(self, error: BaseException) -> None:
        self.error = error  # before the end shows in another thread
        self.finished = "error"

    # ---- for the drafter

    def draft_limit(self, reach: float, beyond: bool, block_size: int) -> int:
        """The most drafts a round may verify: the room left, the cap, and the position no block may cross."""
        limit = min(block_size, self.cap, self.max_length - len(self.ids) - 1)
        anchor = self.first_position + len(self.ids) - self.padding - 1
        if anchor < reach:
            return int(max(0, min(limit, reach - 1 - anchor)))
        return max(0, limit) if beyond else 0

    def keep_features(self, features: torch.Tensor) -> None:
        """Features `[n, F]` of tokens that are now in the target's cache for good."""
        if self.cap == 0:
            return
        self._features.append(features.clone())
        if len(self._features) == 64:  # a long rest
            self._features = [torch.cat(self._features)]

    def take_features(self) -> torch.Tensor:
        """Those not in the draft cache yet."""
        features, self._features = torch.cat(self._features), []
        return features

    def close(self) -> None:
        """Let go of what only decoding needs."""
        self.slot = self.draft_slot = None
        self._features.clear()
        self.times["ended"] = time.perf_counter()

    def note_confidences(self, confidences: list[float]) -> None:
        for slot, c in enumerate(confidences):
            before = self.expected[slot]
            self.expected[slot] = c if before is None else 0.7 * before + 0.3 * c


def _settings_of(processor) -> tuple:
    """A processor's class and settings, equal for processors that do the same."""
    values = ((k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in sorted(vars(processor).items()))
    return type(processor).__name__, repr(list(values))
