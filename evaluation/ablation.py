"""What each part brings under load, apart from the others: same prompts, same engine, greedy.

    python -m dspark.evaluation.ablation --target <model> --drafter <drafter> --prompts gsm8k.jsonl mt-bench.jsonl

1. Semi-autoregression and scheduling: with the sequential head silenced (a parallel drafter) and with it, each with
   whole blocks verified and with the schedule.
2. The two-step delay of the asynchronous schedule: budgets from this step's confidences (no exact schedule may do
   that; it is here for its speed), from two steps ago and from eight, under a steady load and under bursts.
3. The context terms of the table: schedules that reckon with them and without, behind long prompts.

Times are the table's (`model`): what a step costs by its tokens, blocks and contexts, which leaves out the noise of
the machine. The wall clock's rate stands beside it. The last line is one JSON object.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterable

from dspark.evaluation.benchmark import generation_settings
from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize


def steady(count: int) -> list[int]:
    """All requests at once: the engine is never short of one."""
    return [count]


def bursts(count: int, size: int = 8, gap: int = 18) -> list[int]:
    """`size` requests at a time, with steps between in which the load falls."""
    out = []
    while count > 0:
        out += [min(size, count), *[0] * (gap - 1)]
        count -= size
    return out


def run(engine, prompts: list[list[int]], settings, arrivals: Iterable[int], costs) -> dict:
    """Decode all prompts, arriving by step as `arrivals` says, with every step priced by `costs`."""
    queue, price, started = list(prompts), 0.0, time.perf_counter()
    arrivals = iter(arrivals)
    while queue or engine.busy:
        for _ in range(next(arrivals, len(queue))):
            engine.submit(queue.pop(0), copy.deepcopy(settings))
        if engine.busy:
            engine.step()
            price += engine.last_step.price(costs)
    counts = engine.statistics
    return {
        "tokens_per_second": counts.generated / (time.perf_counter() - started),
        "model_tokens_per_second": counts.generated / price,
        "tokens_a_forward": counts.generated / counts.decoded,
        "verified": (counts.verified + counts.decoded) / counts.decoded,
        "accepted_share": counts.accepted / max(1, counts.verified),
    }


def without_sequential_head(drafter):
    """The same drafter with parallel drafts: the head's bias is zero, its confidences stay."""
    import torch

    parallel = copy.deepcopy(drafter)
    with torch.no_grad():
        parallel.markov_head.markov_w2.weight.zero_()
    parallel.cost_table = drafter.cost_table
    return parallel


def ablate(target, drafter, prompts, long_prompts, settings, concurrency: int, show) -> dict:
    """All three parts; `show(name, figures)` is called after each run."""
    import torch

    from dspark.candidate_generator import DSparkEngine, EngineCosts, GlobalScheduler
    from dspark.candidate_generator.global_schedule_dspark import Pool

    class Undelayed(GlobalScheduler):
        """The unconstrained search on this step's own confidences: lossy, the speed the delay is compared with."""

        def lengths(self, confidences, limits, load, room, ends=None):
            allowed = torch.arange(confidences.shape[1]) < torch.minimum(limits, ends)[:, None]
            pool = Pool(confidences.double(), allowed, load, self.costs)
            return pool.lengths(min(room, int(pool.theta.argmax())))

    costs = drafter.cost_table
    results: dict = {}

    def one(name, drafter, texts, arrivals, delay=None, reckoned=None, **how):
        engine = DSparkEngine(target, drafter, max_requests=concurrency, costs=reckoned or costs, **how)
        if delay is not None:
            scheduler = Undelayed if delay == 0 else GlobalScheduler
            kept = {"delay": delay} if delay else {}
            engine.planner.scheduler = scheduler("asynchronous", drafter.config.block_size, costs, **kept)
        results[name] = run(engine, texts, settings, arrivals, costs)
        show(name, results[name])

    count = len(prompts)
    parallel = without_sequential_head(drafter)
    one("no drafts", drafter, prompts, steady(count), schedule="none")
    for drafts, model in (("parallel", parallel), ("semi-autoregressive", drafter)):
        one(f"{drafts}, whole blocks", model, prompts, steady(count), schedule="fixed")
        one(f"{drafts}, scheduled", model, prompts, steady(count), schedule="throughput")
    for load, arrivals in (("steady", steady), ("bursts", bursts)):
        one(f"Algorithm 1, {load}", drafter, prompts, arrivals(count), schedule="throughput", bridging=False)
        for delay in (0, 2, 8):
            name = f"delay {delay}, {load}"
            one(name, drafter, prompts, arrivals(count), schedule="asynchronous", delay=delay)
    plain = EngineCosts(costs.verify, costs.draft)
    for name, reckoned in (("with context terms", costs), ("without context terms", plain)):
        one(f"long prompts, {name}", drafter, long_prompts, steady(len(long_prompts)), reckoned=reckoned)
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, nargs="+", help='JSONL files of {"turns": [...]}, taken from in turn')
    add("--requests", type=int, default=24, help="in each run (default 24)")
    add("--concurrency", type=int, default=12, help="at most so many at once (default 12)")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="of every request (default 48)")
    add("--long", type=int, default=700, metavar="N", help="tokens of the long prompts (default 700)")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    from dspark.candidate_generator import DSparkEngine

    target, drafter = load_models(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    files = [read_prompts(path, args.requests) for path in args.prompts]
    rows = [prompt for turn in zip(*files) for prompt in turn][: args.requests]
    prompts = [tokenize(tokenizer, row, "cpu")["input_ids"][0].tolist() for row in rows]
    text = [token for prompt in prompts for token in prompt]
    long_prompts = [(text * 8)[i : i + args.long] + prompt for i, prompt in enumerate(prompts[: args.concurrency])]
    drafter.cost_table = DSparkEngine(target, drafter, schedule="throughput").planner.costs
    print(drafter.cost_table)

    def show(name, figures):
        rates = (
            f"{figures['model_tokens_per_second']:>7.1f} model tokens/s  {figures['tokens_per_second']:>6.1f} clock"
        )
        print(f"{name:<40}{rates}  {figures['tokens_a_forward']:.2f} a forward  verified {figures['verified']:.2f}")

    settings = generation_settings(target, args.max_new_tokens)
    results = ablate(target, drafter, prompts, long_prompts, settings, args.concurrency, show)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
