"""Where the time of a call goes: drafter, target forwards, and what is left for the host's loop."""

import threading
import time

import torch

from .statistics_dspark import DSparkStatistics


class Stopwatch:
    """Seconds in drafter and target: by the clock on a CPU, by events on the stream of a CUDA device, where nothing
    waits for them until the call ends."""

    def __init__(self, device: torch.device, target):
        self._cuda = device.type == "cuda"
        self._target = target
        self._spans: dict[str, list] = {"draft": [], "verify": [], "prefill": []}
        self._handles: list = []
        self._forward: list = []

    def __enter__(self) -> "Stopwatch":
        if not self._cuda:
            self._thread, self._started = threading.get_ident(), self._now()
            self._handles = [
                self._target.register_forward_pre_hook(self._forward_begins),
                self._target.register_forward_hook(self._forward_ends),
            ]
        return self

    def _forward_begins(self, *_) -> None:
        if threading.get_ident() == self._thread:
            self.start()

    def _forward_ends(self, *_) -> None:
        if threading.get_ident() == self._thread:
            self._forward.append((self._started, self._now()))

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._started = self._now()

    def stop(self, name: str) -> None:
        self._spans[name].append((self._started, self._now()))

    def before_verification(self) -> None:
        self._forward.clear()
        if self._cuda:
            self.start()

    def after_verification(self, prefill: bool) -> None:
        spans = [(self._started, self._now())] if self._cuda else self._forward
        self._spans["prefill" if prefill else "verify"] += spans

    def read_into(self, statistics: DSparkStatistics) -> None:
        if self._cuda:
            torch.cuda.synchronize()

        def seconds(name):
            if self._cuda:
                return sum(begin.elapsed_time(end) for begin, end in self._spans[name]) / 1000
            return sum(end - begin for begin, end in self._spans[name])

        statistics.draft_seconds = seconds("draft")
        statistics.prefill_seconds = seconds("prefill")
        statistics.verify_seconds = seconds("verify") + statistics.prefill_seconds
