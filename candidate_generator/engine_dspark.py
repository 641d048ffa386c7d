"""`DSparkEngine`: a stream of requests on one target, decoded together.

    engine = DSparkEngine(target, drafter)
    request = engine.submit(input_ids, max_new_tokens=128)
    for token in engine.stream(request):
        ...

A step is one packed forward: a chunk of the prompts that wait, one token of each request that decodes, and the drafts
the scheduler admits. Drafting is one pass of the backbone for all that draft. A request that ends leaves its slot to
the next one at once.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from transformers.utils import logging

from .batch_drafter_dspark import BatchDrafter
from .draft_plan_dspark import DraftPlanner
from .engine_costs_dspark import EngineCosts, engine_costs_for
from .engine_records_dspark import EngineStatistics, Entry, StepWork
from .global_schedule_dspark import GLOBAL_SCHEDULES, GlobalScheduler
from .packed_target_dspark import PackedTarget
from .prepare_dspark import prepare_request
from .requests_dspark import Request
from .verification_dspark import Block, judge


logger = logging.get_logger(__name__)


class EngineFull(RuntimeError):
    """The engine has as many requests waiting as it was told to keep."""


class DSparkEngine:
    """Decodes many requests on one target.

    One thread at a time steps; `submit`, `cancel` and `stream` may be called from any. `on_step`, if set, is called
    behind every step, in its thread.

    Args:
        target: a decoder-only causal LM. It is as it was whenever no step runs.
        drafter: a [`DSparkModel`] for it.
        schedule: `"throughput"`, `"asynchronous"`, `"fixed"`, `"threshold"` or `"none"`, by default the drafter's own;
            see [`GlobalScheduler`].
        threshold, fixed_length, bridging: of the schedule.
        max_requests: decoded at once; the others wait.
        max_waiting: more than that are refused.
        max_step_tokens: of one packed forward.
        prefill_chunk: tokens of prompts in one step, so that long prompts do not hold up the others.
        max_length: of one request, prompt and text; by default what the target's config gives as its positions.
        max_cached_tokens: requests at once times the longest of them, prompt and text to come, which is what their
            slots take (up to twice that for a while, as storages double); by default no limit.
        costs: what the schedule reckons with; by default the drafter's `cost_table`, else measured once and kept.
        backend: of [`PackedTarget`].

    Raises:
        ValueError: for a drafter or target that do not fit, and for settings that make no sense.
    """

    def __init__(
        self,
        target,
        drafter,
        schedule: str | None = None,
        threshold: float | None = None,
        fixed_length: int | None = None,
        bridging: bool = True,
        max_requests: int = 32,
        max_waiting: int = 1000,
        max_step_tokens: int = 512,
        prefill_chunk: int = 128,
        max_length: int | None = None,
        max_cached_tokens: int | None = None,
        costs: EngineCosts | None = None,
        backend: str | None = None,
    ):
        for name, value in (("max_requests", max_requests), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}: give at least 1.")
        if max_step_tokens <= max_requests:
            raise ValueError(
                f"`max_step_tokens` is {max_step_tokens}: a step needs a token for each of {max_requests} requests "
                "(`max_requests`) and one for prompts."
            )
        config = drafter.config
        schedule = config.schedule if schedule is None else schedule
        if schedule not in GLOBAL_SCHEDULES:
            raise ValueError(f"`schedule` is {schedule!r}: choose among {', '.join(GLOBAL_SCHEDULES)}.")
        if hasattr(target, "peft_config"):  # the adapters are in its layers
            target = target.get_base_model()
        target = getattr(target, "_orig_mod", target)
        self.target, self.drafter = target, drafter
        link = drafter.link(target)
        link.refresh()
        self.drafts = schedule != "none"
        taps = config.target_layer_ids if self.drafts else []
        backends = drafter._runtime.backends.setdefault(target, {})
        flavour = (target.dtype, target.config.get_text_config(decoder=True)._attn_implementation)
        known = backends.get(flavour) if backend is None else backend
        self.packed = PackedTarget(target, link.layers, taps, drafter.device, drafter.dtype, known)
        if backend is None:
            backends[flavour] = self.packed.backend
        batch_drafter = BatchDrafter(drafter, link)
        if costs is None and schedule in ("throughput", "asynchronous"):
            costs = engine_costs_for(drafter, self.packed, batch_drafter)
        threshold = config.schedule_threshold if threshold is None else threshold
        scheduler = GlobalScheduler(schedule, config.block_size, costs, threshold, fixed_length, bridging)
        self.planner = DraftPlanner(batch_drafter, scheduler, costs, self.packed.text_config)
        self.max_requests, self.max_waiting = max_requests, max_waiting
        self.max_step_tokens, self.prefill_chunk = max_step_tokens, prefill_chunk
        self.max_cached_tokens = max_cached_tokens
        if max_length is None:
            max_length = getattr(self.packed.text_config, "max_position_embeddings", None)
        self.max_length = float("inf") if max_length is None else max_length

        self.statistics = EngineStatistics()
        self.last_step: StepWork | None = None
        self.on_step: Callable[[], None] | None = None
        self.active: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    # ---- requests

    def submit(self, input_ids, generation_config=None, seed: int | None = None, tokenizer=None, **kwargs) -> Request:
        """Queue a prompt.

        Args:
            input_ids: a list of ids, or a tensor `[S]` or `[1, S]`, without padding.
            generation_config, kwargs: as for `generate`; the target's own defaults apply.
            seed: gives a sampled request draws of its own. The same seed gives the same text under schedules that do
                not look at the load (`"fixed"`, `"none"`); the others verify more or less by it, which changes the
                draws and not their law.
            tokenizer: for `stop_strings`.

        Raises:
            ValueError: for a prompt or settings that cannot be served; nothing was queued.
            EngineFull: when `max_waiting` requests wait.
        """
        request = prepare_request(self.target, self.drafter, input_ids, generation_config, seed, tokenizer, kwargs)
        if request.max_length > self.max_length:
            raise ValueError(
                f"prompt and text may have {request.max_length} tokens together, which is beyond position "
                f"{int(self.max_length)}, the engine's `max_length`: shorten the prompt or `max_new_tokens`."
            )
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a prepared request; raises as `submit` does."""
        need = request.max_length - request.padding
        if self.max_cached_tokens is not None and need > self.max_cached_tokens:
            raise ValueError(
                f"the request may grow to {need} tokens, and `max_cached_tokens` is {self.max_cached_tokens}: shorten "
                "the prompt or `max_new_tokens`."
            )
        with self._changed:
            if len(self.waiting) >= self.max_waiting:
                raise EngineFull(f"{len(self.waiting)} requests are waiting (`max_waiting`): try again later.")
            request.id, request.engine = next(self._ids), self
            request.times["submitted"] = time.perf_counter()
            self.waiting.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """End a request; what it has written stays in it. Its slot is free from the next step on."""
        with self._changed:
            if request in self.waiting:
                self.waiting.remove(request)
                request.finished = "cancelled"
            request.cancelled = True
            self._changed.notify_all()

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of a request as they come. Steps the engine itself unless `start` runs it; a caller that stops
        reading cancels the request.

        Raises:
            ValueError: for a request that was not queued here.
            Exception: what ended the request, if it failed.
        """
        if request.engine is not self:
            raise ValueError("this request was not submitted to this engine.")
        at = request.prompt_length
        try:
            while True:
                ended = request.finished is not None  # before the text is looked at
                new = request.ids[at:]
                yield from new
                at += len(new)
                if ended and at == len(request.ids):
                    break
                if not new:
                    self._advance(request, at)
        finally:
            if request.finished is None:
                self.cancel(request)
        if request.error is not None:
            raise request.error

    def _advance(self, request: Request, at: int) -> None:
        if self._thread is None:
            self.step()
            return
        with self._changed:
            self._changed.wait_for(lambda: request.finished is not None or len(request.ids) > at, timeout=1.0)

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(r.finished is None or not r.held for r in self.active)

    # ---- a thread of its own

    def start(self) -> "DSparkEngine":
        """Step in a thread of the engine's own whenever there is something to do."""
        if self._thread is None:
            self._closing = False
            self._thread = threading.Thread(target=self._loop, name="dspark-engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread behind its current step; requests stay where they are."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "DSparkEngine":
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self.busy)
                if self._closing:
                    return
            try:
                self.step()
            except BaseException:  # the requests it concerned have it
                logger.exception("a step failed; its requests were ended with the error")

    # ---- a step

    @torch.no_grad()
    def step(self) -> None:
        """One packed forward for all active requests, behind one pass of the drafter for those that draft.

        An exception of the models ends every active request with it and is raised; one of a request's own processors
        or criteria ends that request only.
        """
        with self._stepping:
            started = time.perf_counter()
            self._admit()
            running = [r for r in self.active if r.finished is None]
            try:
                if running:
                    self._run(running)
            except BaseException as error:
                for request in running:
                    if request in self.active:
                        if request.finished is None:
                            request.fail(error)
                        self._leave(request)
                raise
            finally:
                self.statistics.total_seconds += time.perf_counter() - started
                with self._changed:
                    self._changed.notify_all()
                if self.on_step is not None:
                    self.on_step()

    def _admit(self) -> None:
        with self._changed:
            for request in [r for r in self.active if r.cancelled]:
                request.finished = request.finished or "cancelled"
                self._leave(request)
            if not self.active:
                self.packed.free_if_large()
                self.planner.batch_drafter.free_if_large()
            while self.waiting and len(self.active) < self.max_requests:
                together = [*self.active, self.waiting[0]]
                if self.max_cached_tokens is not None:  # a slot takes the room of the longest
                    held = len(together) * max(r.max_length - r.padding for r in together)
                    if held > self.max_cached_tokens:
                        break
                request = self.waiting[0]
                request.slot = self.packed.acquire(request.first_position)
                request.draft_slot = self.planner.batch_drafter.acquire() if self.drafts else None
                request.times["admitted"] = time.perf_counter()
                self.active.append(self.waiting.popleft())

    def _leave(self, request: Request) -> None:
        self.active.remove(request)
        self.packed.release(request.slot)
        if request.draft_slot is not None:
            self.planner.batch_drafter.release(request.draft_slot)
        request.close()
        self.statistics.finished += 1

    def _run(self, running: list[Request]) -> None:
        decoding = [r for r in running if r.decoding]
        pieces = self._pieces([r for r in running if not r.decoding], self.max_step_tokens - len(decoding))
        other = sum(len(piece) for _, piece in pieces)
        statistics, plan = self.statistics, None
        if self.drafts:
            plan = self.planner.plan(decoding, other, self.max_step_tokens - len(decoding) - other)
            statistics.draft_seconds += plan.seconds
        entries = []
        for request in decoding:
            drafts, laws = plan.drafts.get(id(request), ([], None)) if plan else ([], None)
            entries.append(Entry(request, [request.ids[-1], *drafts], drafts, laws, True))
        entries += [Entry(r, piece, [], None, len(piece) == len(r.uncached)) for r, piece in pieces]

        started = time.perf_counter()
        keep = [entry.whole + len(entry.drafts) for entry in entries]
        verified = self.packed.verify([e.request.slot for e in entries], [e.tokens for e in entries], keep)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        statistics.verify_seconds += time.perf_counter() - started
        statistics.steps += 1
        statistics.prefilled += other
        self.last_step = StepWork(
            drafted_slots=plan.load.drafting if plan else 0,
            tokens=sum(len(entry.tokens) for entry in entries),
            requests=len(decoding),
            longest=1 + max((len(entry.drafts) for entry in entries), default=0),
            keys=max((len(r.ids) - r.padding for r in decoding), default=0),
        )

        blocks, at = [], 0
        for entry, rows in zip(entries, keep):
            if rows:
                blocks.append(Block(entry.request, entry.drafts, entry.laws, at))
                at += rows
        outcomes = iter(judge(blocks, verified.logits, self.drafter.kept_ids) if blocks else ())
        features = verified.features.split([len(e.tokens) for e in entries]) if self.drafts else [None] * len(entries)
        drafted = []
        for entry, known in zip(entries, features):
            counted = self._commit(entry, known, next(outcomes) if entry.whole else None)
            if plan is not None and id(entry.request) in plan.drafts and counted is not None:
                drafted.append((entry.request, *counted))
                statistics.lengths[len(entry.drafts)] += 1
                statistics.accepted += counted[1]
        if drafted:
            self.planner.settle(plan, drafted)
            statistics.drafted += len(drafted)
        for entry in entries:
            if entry.request.finished is not None and not entry.request.held and entry.request in self.active:
                self._leave(entry.request)

    def _pieces(self, prefilling: list[Request], room: int) -> list[tuple[Request, list[int]]]:
        """The next piece of each waiting prompt, in order of arrival, as far as the step's tokens go."""
        room = min(self.prefill_chunk, room)
        pieces = []
        for request in prefilling:
            piece = request.uncached[:room]
            if not piece:
                break
            pieces.append((request, piece))
            room -= len(piece)
        return pieces

    def _commit(self, entry: Entry, features, outcome) -> tuple[int, int] | None:
        """Take an outcome of `judge` into the text and the caches.

        Returns:
            Drafts that count as judged, and those kept; `None` for a request that failed. Where the text ends inside
            the block, nothing behind its end counts.
        """
        request = entry.request
        seen, counted = len(entry.tokens) - len(entry.drafts), (0, 0)  # tokens of the text that are now in the cache
        if isinstance(outcome, Exception):
            request.fail(outcome)
            return None
        if outcome is not None:
            accepted, token = outcome
            try:
                taken = request.extend([*entry.drafts[:accepted], token], self.target.device)
            except Exception as error:  # a criterion's
                request.fail(error)
                return None
            counted = (taken, taken) if taken <= accepted else (len(entry.drafts), accepted)
            seen += taken - 1  # the last token of the text is never in the cache
            self.statistics.decoded += 1
            self.statistics.verified += len(entry.drafts)
            self.statistics.generated += taken
            request.statistics.generated += taken
        self.packed.rollback(request.slot, len(entry.tokens) - seen)
        request.cached += seen
        if features is not None:
            request.keep_features(features[:seen])
        return counted
