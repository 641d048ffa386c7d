"""The machine a figure is measured on: how busy it is with other things, what it is made of, what it used.

A timing taken beside other work says little, so the benchmark looks here first. Needs nothing but Python until a
device is described; what a system does not tell is `None`.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path


# Share of all cores that other processes may use, and 1-minute load per core, before a timing is refused. The load
# average trails by a minute, so it only counts when it says that somebody had to wait.
BUSY_SHARE = 0.15
BUSY_LOAD = 1.0
BUSY_GPU_PERCENT = 10
SAMPLE_SECONDS = 1.0


class OtherWork:
    """Cores kept busy by anything but this process and its children, from its creation on (Linux)."""

    def __init__(self):
        self._start = self._read()
        self._processes = busy_ticks_by_process()

    def _read(self) -> tuple[float, float, float] | None:
        """Clock, busy seconds of the machine, busy seconds of this process."""
        try:
            fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = fields
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, sum(os.times()[:4])

    def cores(self) -> float | None:
        """Mean number of cores since the start; `None` where the system does not tell."""
        now = self._read()
        if self._start is None or now is None:
            return None
        seconds, busy, own = (b - a for a, b in zip(self._start, now))
        return max(0.0, (busy - own) / max(seconds, 1e-9))

    def busiest(self, count: int = 3) -> list[str]:
        """Names and ids of the processes that used most, each at least a tenth of a core."""
        now, start = busy_ticks_by_process(), self._processes
        seconds = time.perf_counter() - (self._start[0] if self._start else 0.0)
        used = {key: (ticks - start.get(key, 0)) / os.sysconf("SC_CLK_TCK") / seconds for key, ticks in now.items()}
        top = sorted(((share, key) for key, share in used.items() if share >= 0.1), reverse=True)[:count]
        return [f"{name} (pid {pid}, {share:.1f} cores)" for share, (pid, name) in top]


def busy_ticks_by_process() -> dict[tuple[int, str], int]:
    """`(pid, name)` -> processor ticks so far, of every other process."""
    ticks = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
            pid, _, name = head.partition(" (")
            fields = tail.split()
            if int(pid) != os.getpid():
                ticks[int(pid), name] = int(fields[11]) + int(fields[12])  # utime, stime
        except (OSError, ValueError, IndexError):  # it ended while we looked
            continue
    return ticks


def gpu_percent() -> list[int] | None:
    """Utilisation of each NVIDIA GPU by anyone."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [int(line) for line in answer.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def look(seconds: float = SAMPLE_SECONDS) -> dict:
    """The machine's load now, over a moment in which this process does nothing."""
    watch = OtherWork()
    time.sleep(seconds)
    return {
        "cores": os.cpu_count() or 1,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "other_cores_busy": watch.cores(),
        "busiest": watch.busiest(),
        "gpu_percent": gpu_percent(),
    }


def why_busy(load: dict) -> str | None:
    """Why a timing taken under this load would mean little; `None` on a quiet machine."""
    count = load["cores"]
    others, average, gpus = load["other_cores_busy"], load["load_average"], load["gpu_percent"]
    if others is not None and others > BUSY_SHARE * count:
        by = f": {', '.join(load['busiest'])}" if load["busiest"] else ""
        return f"other processes keep {others:.1f} of {count} cores busy{by}"
    if average is not None and average[0] > BUSY_LOAD * count:
        return f"the load average of the last minute is {average[0]:.1f} on {count} cores"
    if gpus and min(gpus) > BUSY_GPU_PERCENT:  # on a machine with several, one that is free will do
        return f"every GPU is at least {min(gpus)} % busy"
    return None


def versions() -> dict[str, str | None]:
    """Versions of what a timing depends on."""

    def installed(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None  # run from a checkout

    names = ("dspark", "torch", "transformers", "accelerate")
    return {"python": platform.python_version(), **{name: installed(name) for name in names}}


def reset_peak_memory(device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device) -> int | None:
    """Bytes: on CUDA the most allocated since `reset_peak_memory`, else the most this process ever held."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
