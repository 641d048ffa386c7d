"""`dspark load`: throughput against speed per user under load, schedule by schedule, against plain decoding.

    dspark load --target <model> --drafter <drafter> --prompts gsm8k.jsonl mbpp.jsonl --plot load.png --json load.json

For every concurrency `C` the same prompts are answered in turn, in one process, by: plain `generate` on left-padded
batches of `C`; the host's continuous batching (`generate_batch`) with `C` requests at a time; the engine with at most
`C` requests under every schedule. Greedy, prompts included in the time. Prints one line a run and, as the last line,
one JSON object.

What the figures mean:
- tokens/s: new tokens of all requests over the wall time, prompts included.
- tokens/s/user: the mean over requests of its new tokens over the time from its admission to its end.
- verified: tokens a request has in a forward, on the mean over its decoding forwards (1 is plain decoding).
- model tokens/s: the same decoding with every step at its price in the table, so without the machine's noise.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

from dspark.evaluation.benchmark import generation_settings
from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize
from dspark.evaluation.machine import OtherWork, look, versions, why_busy


CONCURRENCIES = (1, 2, 4, 8, 16, 32)
WAVES, MOST_REQUESTS = 3, 32  # requests are `C` times up to three, and not more than 32 where that is less
ENGINE_MODES = {
    "none": {"schedule": "none"},
    "fixed 1": {"schedule": "fixed", "fixed_length": 1},
    "fixed 3": {"schedule": "fixed", "fixed_length": 3},
    "fixed 5": {"schedule": "fixed", "fixed_length": 5},
    "fixed 7": {"schedule": "fixed", "fixed_length": 7},
    "threshold": {"schedule": "threshold", "threshold": 0.6},
    "algorithm 1": {"schedule": "throughput", "bridging": False},
    "bridging": {"schedule": "throughput"},
    "asynchronous": {"schedule": "asynchronous"},
}
MODES = ("plain", "generate_batch", *ENGINE_MODES)


def request_count(concurrency: int) -> int:
    """Full waves, so that no mode ends on a part of one."""
    return concurrency * max(1, min(WAVES, MOST_REQUESTS // concurrency))


def run_plain(target, prompts: list[list[int]], concurrency: int, settings) -> dict:
    """Left-padded batches, one behind the other."""
    import torch

    eos = settings.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    tokens, speeds, texts = 0, [], []
    started = time.perf_counter()
    for first in range(0, len(prompts), concurrency):
        part = prompts[first : first + concurrency]
        length = max(map(len, part))
        ids = torch.full((len(part), length), settings.pad_token_id, device=target.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(part):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        began = time.perf_counter()
        out = target.generate(ids, attention_mask=mask, generation_config=copy.deepcopy(settings))
        took = time.perf_counter() - began
        for row in out[:, length:].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            tokens += end
            speeds.append(end / took)
            texts.append(row[:end])
    return {"seconds": time.perf_counter() - started, "tokens": tokens, "user": speeds, "texts": texts}


def run_continuous(target, prompts: list[list[int]], concurrency: int, settings) -> dict:
    """The host's own continuous batching."""
    from transformers import ContinuousBatchingConfig

    pages = max(map(len, prompts)) // 256 + 2
    how = ContinuousBatchingConfig(
        num_blocks=pages * (concurrency + 1), max_batch_tokens=512, max_requests_per_batch=concurrency
    )
    started = time.perf_counter()
    out = target.generate_batch(
        prompts, generation_config=copy.deepcopy(settings), continuous_batching_config=how, warmup=False
    )
    texts = [out[key].generated_tokens for key in sorted(out, key=lambda key: int(key.rsplit("_", 1)[-1]))]
    return {"seconds": time.perf_counter() - started, "tokens": sum(map(len, texts)), "user": [], "texts": texts}


def run_engine(target, drafter, prompts: list[list[int]], concurrency: int, settings, **how) -> dict:
    """The engine with all prompts queued at once."""
    from dspark.candidate_generator import DSparkEngine, EngineCosts

    engine = DSparkEngine(target, drafter, max_requests=concurrency, max_step_tokens=max(512, 9 * concurrency), **how)
    costs = drafter.cost_table if isinstance(drafter.cost_table, EngineCosts) else None
    requests = [engine.submit(prompt, copy.deepcopy(settings)) for prompt in prompts]
    started = time.perf_counter()
    price = 0.0
    while engine.busy:
        engine.step()
        price += engine.last_step.price(costs) if costs else 0.0
    seconds = time.perf_counter() - started
    counts = engine.statistics
    return {
        "seconds": seconds,
        "tokens": counts.generated,
        "user": [len(r.new_ids) / (r.times["ended"] - r.times["admitted"]) for r in requests],
        "texts": [r.new_ids for r in requests],
        **({"model_seconds": price} if costs else {}),
        "verified": (counts.decoded + counts.verified) / counts.decoded,
        "tokens_a_forward": counts.generated / counts.decoded,
        "accepted": counts.accepted,
        "drafted_share": counts.drafted / counts.decoded,
        "draft_seconds": counts.draft_seconds,
        "verify_seconds": counts.verify_seconds,
        "host_seconds": counts.host_seconds,
        "steps": counts.steps,
    }


def measure(target, drafter, prompts: list[list[int]], settings, concurrencies, modes, repeats: int = 1, show=None):
    """Every mode at every concurrency, in turn.

    Returns:
        One dict a run: `mode`, `concurrency`, `repeat`, the figures above, and `same_text`, the share of requests with
        the text of plain decoding.
    """
    warm_up = copy.deepcopy(settings)
    warm_up.max_new_tokens = 4
    runs = []

    def one(mode, part, concurrency, settings):
        if mode == "plain":
            return run_plain(target, part, concurrency, settings)
        if mode == "generate_batch":
            return run_continuous(target, part, concurrency, settings)
        return run_engine(target, drafter, part, concurrency, settings, **ENGINE_MODES[mode])

    for mode in modes:
        one(mode, prompts[:2], 2, warm_up)
    for concurrency in concurrencies:
        part = prompts[: request_count(concurrency)]
        for repeat in range(repeats):
            plain = None
            for mode in modes:
                run = one(mode, part, concurrency, settings)
                texts, user = run.pop("texts"), run.pop("user")
                plain = texts if mode == "plain" else plain
                run |= {"mode": mode, "concurrency": concurrency, "repeat": repeat}
                run["tokens_per_second"] = run["tokens"] / run["seconds"]
                run["user_tokens_per_second"] = statistics.mean(user) if user else None
                if "model_seconds" in run:
                    run["model_tokens_per_second"] = run["tokens"] / run["model_seconds"]
                if plain is not None:
                    run["same_text"] = sum(a == b for a, b in zip(texts, plain)) / len(plain)
                runs.append(run)
                if show is not None:
                    show(run)
    return runs


def line(run: dict) -> str:
    def number(name, form):
        return format(run[name], form) if run.get(name) is not None else "-"

    return (
        f"C {run['concurrency']:>3}  {run['mode']:<15}{run['tokens_per_second']:>7.1f} tokens/s  "
        f"user {number('user_tokens_per_second', '6.2f'):>6}  verified {number('verified', '.2f'):>5}  "
        f"a forward {number('tokens_a_forward', '.2f'):>5}  "
        f"model {number('model_tokens_per_second', '.1f'):>6} tokens/s  same text {number('same_text', '.0%'):>5}"
    )


def medians(runs: list[dict]) -> dict:
    """`mode -> concurrency -> figure -> median over repeats`."""
    out: dict = {}
    for name in ("tokens_per_second", "user_tokens_per_second", "verified", "model_tokens_per_second"):
        for run in runs:
            if run.get(name) is not None:
                values = [r[name] for r in runs if (r["mode"], r["concurrency"]) == (run["mode"], run["concurrency"])]
                out.setdefault(run["mode"], {}).setdefault(run["concurrency"], {})[name] = statistics.median(values)
    return out


def plot(runs: list[dict], path: Path) -> None:
    """The frontier (the paper's Fig. 7), throughput and verified tokens by load (Fig. 8)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = medians(runs)
    figure, (frontier, load, verified) = pyplot.subplots(1, 3, figsize=(17, 5))
    for mode, row in table.items():
        at = sorted(row)
        style = {"marker": "o", "label": mode, "linestyle": "-" if mode in ENGINE_MODES else "--", "markersize": 3}
        load.plot(at, [row[c]["tokens_per_second"] for c in at], **style)
        users = [c for c in at if "user_tokens_per_second" in row[c]]
        if users:
            x = [row[c]["user_tokens_per_second"] for c in users]
            frontier.plot(x, [row[c]["tokens_per_second"] for c in users], **style)
        if all("verified" in row[c] for c in at):
            verified.plot(at, [row[c]["verified"] for c in at], **style)
    frontier.set(xlabel="tokens/s/user", ylabel="tokens/s", title="frontier")
    load.set(xlabel="requests at once", ylabel="tokens/s", title="throughput", xscale="log")
    verified.set(xlabel="requests at once", ylabel="tokens", title="verified a request and forward", xscale="log")
    for axes in (load, verified):
        ticks = sorted({run["concurrency"] for run in runs})
        axes.set_xticks(ticks, [str(c) for c in ticks])
        axes.minorticks_off()
    load.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="dspark load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, nargs="+", help='JSONL files of {"turns": [...]}, taken from in turn')
    add("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES), help="default 1 2 4 8 16 32")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=f"of {', '.join(MODES)}")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="of every request (default 64)")
    add("--repeats", type=int, default=1, help="of everything; medians are plotted (default 1)")
    add("--json", type=Path, metavar="FILE", help="write the JSON object here too")
    add("--plot", type=Path, metavar="FILE", help="draw the curves (needs matplotlib)")
    add("--force", action="store_true", help="time even though the machine is busy")
    args = parser.parse_args(argv)
    if min(args.concurrency) < 1 or args.max_new_tokens < 2 or args.repeats < 1:
        parser.error("--concurrency and --repeats start at 1, --max-new-tokens at 2.")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    count = max(map(request_count, args.concurrency))
    try:
        files = [read_prompts(path, count) for path in args.prompts]
    except ValueError as error:
        parser.error(str(error))
    prompts = [prompt for turn in zip(*files) for prompt in turn]
    if len(prompts) < count:
        parser.error(f"--prompts hold {len(prompts)} prompts (files are taken from in turn); {count} are needed.")
    busy = why_busy(look())
    if busy and not args.force:
        print(f"dspark load: {busy}. Timings taken now would mean little: wait, or give --force.", file=sys.stderr)
        return 3

    import torch
    from transformers import AutoTokenizer

    from dspark.candidate_generator import DSparkEngine

    try:
        target, drafter = load_models(args)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    ids = [tokenize(tokenizer, prompt, "cpu")["input_ids"][0].tolist() for prompt in prompts[:count]]
    settings = generation_settings(target, args.max_new_tokens)
    drafter.cost_table = DSparkEngine(target, drafter, schedule="throughput").planner.costs  # one table for all
    print(drafter.cost_table, flush=True)
    watch = OtherWork()

    def show(run):
        print(line(run), flush=True)

    runs = measure(target, drafter, ids, settings, args.concurrency, args.modes, args.repeats, show)
    result = {
        "settings": {
            "dtype": str(target.dtype),
            "max_new_tokens": args.max_new_tokens,
            "threads": torch.get_num_threads(),
            "prompts": [Path(path).name for path in args.prompts],
            "prompt_tokens": [len(prompt) for prompt in ids],
        },
        "costs": {"verify": drafter.cost_table.verify, "draft": drafter.cost_table.draft},
        "medians": medians(runs),
        "runs": runs,
        "other_cores_busy": watch.cores(),
        "versions": versions(),
    }
    if args.plot:
        plot(runs, args.plot)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
