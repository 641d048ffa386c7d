"""`dspark benchmark`: plain and assisted decoding in turn, in one process, on your prompts.

    dspark benchmark --target <model> --drafter <drafter> --prompts prompts.jsonl
    dspark benchmark --target <model> --drafter <drafter> --prompts prompts.jsonl --num-prompts 3 --max-new-tokens 32

For every prompt: plain decoding, the chosen schedule, and the `fixed` schedule, whose every round verifies the whole
block, so that acceptance by slot is counted for all slots alike. Prints a table and, as the last line, one JSON
object.

What the figures mean:
- tokens/s: new tokens over the wall time of the `generate` call, prompt included; the median over prompts. `ratio` is
  the quotient of the two medians.
- accepted length: tokens per drafted round, bonus token included (tau of eq. 1).
- bound: `tau / (T_draft + T_verify)`, tokens/s behind the prompt if everything outside the two models' forwards took
  no time; here tau counts all rounds, those that rested included. `share` is the part of it that was reached.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize
from dspark.evaluation.machine import OtherWork, look, peak_memory, reset_peak_memory, versions, why_busy


WARM_UP_TOKENS = 16


@dataclass
class Call:
    """One `generate` call: new ids, wall seconds, and the drafter's statistics if it was assisted."""

    ids: list[int]
    seconds: float
    statistics: object | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


def generation_settings(target, max_new_tokens: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0):
    """The target's own generation config with the benchmark's settings in place of its own."""
    settings = copy.deepcopy(target.generation_config)
    sampled = temperature > 0
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if sampled else {}
    others = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    for name in others:  # a model's own sampling settings would be in force, or warned about, unseen
        setattr(settings, name, values.get(name))
    settings.do_sample = sampled
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    if settings.pad_token_id is None:
        eos = settings.eos_token_id
        settings.pad_token_id = (eos[0] if isinstance(eos, list) else eos) or 0
    return settings


def decode(target, inputs, settings, drafter=None, schedule: str | None = None, seed: int = 0, **kwargs) -> Call:
    """One timed call; plain without a drafter. `kwargs` go to `generate`."""
    import torch

    settings = copy.deepcopy(settings)
    if drafter is not None:
        settings.dspark_schedule = schedule
    torch.manual_seed(seed)
    synchronize(target.device)
    started = time.perf_counter()
    out = target.generate(**inputs, generation_config=settings, assistant_model=drafter, **kwargs)
    synchronize(target.device)
    seconds = time.perf_counter() - started
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    return Call(ids, seconds, None if drafter is None else drafter.statistics)


def synchronize(device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def speed(calls: list[Call]) -> dict:
    """Tokens/s (median over calls) and the sums behind it."""
    return {
        "tokens_per_second": statistics.median(call.tokens_per_second for call in calls),
        "tokens": sum(len(call.ids) for call in calls),
        "seconds": sum(call.seconds for call in calls),
    }


def summarize(calls: list[Call]) -> dict:
    """`speed` of assisted calls with what their statistics add: acceptance, time split, bound."""
    stats = [call.statistics for call in calls]

    def total(name):
        return sum(getattr(s, name) for s in stats)

    counts = {name: total(name) for name in ("rounds", "plain_rounds", "drafted", "verified", "accepted")}
    offered, accepted = (
        [sum(slot) for slot in zip(*(getattr(s, name) for s in stats))]
        for name in ("offered_per_slot", "accepted_per_slot")
    )
    prefill = total("prefill_seconds")
    draft, verify = total("draft_seconds"), total("verify_seconds") - prefill
    result = speed(calls)
    host = max(0.0, result["seconds"] - total("profile_seconds") - prefill - draft - verify)
    rounds = counts["rounds"] + counts["plain_rounds"]
    tokens = result["tokens"] - len(calls)  # the prompt's forward brings one token a call
    lengths: dict[int, int] = {}
    for s in stats:
        for length, count in s.lengths.items():
            lengths[length] = lengths.get(length, 0) + count
    result |= {
        "schedule": stats[0].schedule,
        **counts,
        "acceptance_length": counts["accepted"] / counts["rounds"] + 1 if counts["rounds"] else None,
        "conditional_acceptance": [a / o if o else None for a, o in zip(accepted, offered)],
        "offered_per_slot": offered,
        "lengths": {str(length): count for length, count in sorted(lengths.items())},
        "time": {
            "prefill_seconds": prefill,
            "draft_seconds": draft,
            "verify_seconds": verify,
            "host_seconds": host,
            "host_seconds_per_round": host / rounds if rounds else None,
        },
        "bound": None,
    }
    if rounds and tokens > 0:
        tau, t_draft, t_verify = tokens / rounds, draft / rounds, verify / rounds
        bound = tau / (t_draft + t_verify)
        reached = tokens / (draft + verify + host)
        result["bound"] = {
            "tokens_per_round": tau,
            "t_draft": t_draft,
            "t_verify": t_verify,
            "tokens_per_second": bound,
            "reached_tokens_per_second": reached,
            "share": reached / bound,
        }
    return result


def compare(target, drafter, prompts: list[dict], settings, schedule: str = "throughput", seed: int = 0, show=None):
    """Decode every prompt plainly, with `schedule`, and with `fixed` unless that is the schedule.

    Args:
        prompts: inputs of `generate`, one prompt each.
        show: called with `(index, calls)` after each prompt.

    Returns:
        The result's `plain`, `assisted`, `fixed`, `ratio`, `same_text`, `memory` and `per_prompt`.
    """
    modes = {"plain": None, "assisted": schedule, **({} if schedule == "fixed" else {"fixed": "fixed"})}

    def run(mode, inputs, settings, seed):
        drafts = None if mode == "plain" else drafter
        return decode(target, inputs, settings, drafts, modes[mode], seed)

    warm_up = copy.deepcopy(settings)
    warm_up.max_new_tokens = min(WARM_UP_TOKENS, settings.max_new_tokens)
    for mode in modes:
        run(mode, prompts[0], warm_up, seed)

    calls: dict[str, list[Call]] = {mode: [] for mode in modes}
    peaks: dict[str, int] = {}
    for index, inputs in enumerate(prompts):
        for mode in modes:
            reset_peak_memory(target.device)
            calls[mode].append(run(mode, inputs, settings, seed + index))
            peaks[mode] = max(peaks.get(mode, 0), peak_memory(target.device) or 0)
        if show is not None:
            show(index, {mode: done[-1] for mode, done in calls.items()})

    plain, assisted = speed(calls["plain"]), summarize(calls["assisted"])
    feature_bytes = max(call.statistics.feature_bytes for call in calls["assisted"])
    return {
        "plain": plain,
        "assisted": assisted,
        "fixed": summarize(calls["fixed"]) if "fixed" in calls else assisted,
        "ratio": assisted["tokens_per_second"] / plain["tokens_per_second"],
        "same_text": sum(p.ids == a.ids for p, a in zip(calls["plain"], calls["assisted"])),
        "memory": {
            "peak_bytes": peaks,
            "what": "allocated on the device" if target.device.type == "cuda" else "resident size of the process",
            "target_bytes": parameter_bytes(target),
            "drafter_bytes": parameter_bytes(drafter),
            "feature_bytes": feature_bytes,
        },
        "per_prompt": [
            {
                "prompt_tokens": inputs["input_ids"].shape[1],
                "plain_tokens": len(p.ids),
                "assisted_tokens": len(a.ids),
                "plain_tokens_per_second": p.tokens_per_second,
                "assisted_tokens_per_second": a.tokens_per_second,
                "ratio": a.tokens_per_second / p.tokens_per_second,
                "rounds": a.statistics.rounds,
                "accepted": a.statistics.accepted,
                "same_text": p.ids == a.ids,
            }
            for inputs, p, a in zip(prompts, calls["plain"], calls["assisted"])
        ],
    }


def parameter_bytes(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def table(result: dict) -> str:
    """The result for people."""
    plain, assisted, fixed = result["plain"], result["assisted"], result["fixed"]
    lines = []

    def row(name, value):
        lines.append(f"{name:<30}{value}")

    def number(value, form=".2f"):
        return "-" if value is None else format(value, form)

    settings, machine = result["settings"], result["machine"]
    row("device", f"{machine['device']}, {settings['threads']} threads")
    row("dtype, attention", f"{settings['dtype']}, {settings['attention']}")
    sampling = "greedy"
    if settings["temperature"]:
        sampling = "temperature {temperature}, top-k {top_k}, top-p {top_p}".format(**settings)
    row("prompts, new tokens", f"{settings['num_prompts']}, at most {settings['max_new_tokens']} each, {sampling}")
    row("plain", f"{plain['tokens_per_second']:.2f} tokens/s")
    row(f"dspark ({assisted['schedule']})", f"{assisted['tokens_per_second']:.2f} tokens/s")
    row("ratio", f"{result['ratio']:.2f}")
    if not settings["temperature"]:
        ties = "" if settings["dtype"] == "float32" else " (near-ties can part in this dtype)"
        row("same text", f"{result['same_text']} of {settings['num_prompts']} prompts{ties}")
    by_slot = " ".join(number(c) for c in fixed["conditional_acceptance"])
    row("accepted length (fixed)", f"{number(fixed['acceptance_length'])} tokens a round, bonus token included")
    row("acceptance by slot (fixed)", f"{by_slot}  (given the slots before)")
    row(f"verified lengths ({assisted['schedule']})", ", ".join(f"{k}: {v}" for k, v in assisted["lengths"].items()))
    row("rounds drafted / plain", f"{assisted['rounds']} / {assisted['plain_rounds']}")
    split = assisted["time"]
    seconds = " / ".join(f"{split[f'{part}_seconds']:.2f}" for part in ("prefill", "draft", "verify", "host"))
    row(
        "s prefill/draft/verify/host",
        f"{seconds}, host {1000 * (split['host_seconds_per_round'] or 0):.2f} ms a round",
    )
    runs = {"bound": assisted} | ({} if fixed is assisted else {"bound (fixed)": fixed})
    for name, bound in ((name, run["bound"]) for name, run in runs.items()):
        if bound is not None:
            row(
                name,
                f"{bound['tokens_per_second']:.2f} tokens/s = {bound['tokens_per_round']:.2f} / "
                f"({1000 * bound['t_draft']:.2f} + {1000 * bound['t_verify']:.2f} ms), {bound['share']:.0%} reached",
            )
    peaks = ", ".join(f"{mode} {peak / 2**20:.0f} MiB" for mode, peak in result["memory"]["peak_bytes"].items())
    row("peak memory", f"{peaks} ({result['memory']['what']})")
    row("other work meanwhile", f"{number(machine['other_cores_busy_meanwhile'])} of {machine['cores']} cores")
    row("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version))
    return "\n".join(lines)


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="dspark benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, help='JSONL of {"turns": ["user message", ...]}; the first turn is used')
    add("--num-prompts", type=int, metavar="N", help="only the first N")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    add("--top-k", type=int, default=0, help="when sampling; 0 (the default) for no limit")
    add("--top-p", type=float, default=1.0, help="when sampling; 1 (the default) for no limit")
    add("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    add("--schedule", choices=("throughput", "fixed", "threshold"), default="throughput", help="of the timed runs")
    add("--cost-table", metavar="FILE", help="schedule with this table (dspark profile --output FILE)")
    add("--json", type=Path, metavar="FILE", help="write the JSON object here too")
    add("--force", action="store_true", help="time even though the machine is busy")
    args = parser.parse_args(argv)
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("temperature", 0), ("top_k", 0), ("top_p", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}: give at least {least}.")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    try:
        prompts = read_prompts(args.prompts, args.num_prompts)
    except ValueError as error:
        parser.error(str(error))
    load = look()
    busy = why_busy(load)
    if busy and not args.force:
        print(
            f"dspark benchmark: {busy}. Timings taken now would mean little: wait, or give --force.", file=sys.stderr
        )
        return 3

    import torch
    from transformers import AutoTokenizer

    from dspark.candidate_generator.cost_table_dspark import CostTable, cost_table_for, table_key

    try:
        target, drafter = load_models(args)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        if args.cost_table:
            drafter.cost_table = CostTable.load(args.cost_table)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # One frozen table for all calls, and the one that is reported.
    drafter.cost_table = cost_table_for(drafter, target)
    inputs = [tokenize(tokenizer, prompt, target.device) for prompt in prompts]
    settings = generation_settings(target, args.max_new_tokens, args.temperature, args.top_k, args.top_p)

    def show(index, calls):
        speeds = ", ".join(f"{mode} {call.tokens_per_second:.2f}" for mode, call in calls.items())
        print(f"prompt {index + 1} of {len(inputs)}: {speeds} tokens/s", flush=True)

    watch = OtherWork()
    result = compare(target, drafter, inputs, settings, args.schedule, args.seed, show)
    key = table_key(drafter, target)
    result |= {
        "machine": {
            **load,
            "device": key["device"],
            "other_cores_busy_meanwhile": watch.cores(),
            "forced": args.force,
        },
        "versions": versions(),
        "settings": {
            "target": args.target,
            "drafter": args.drafter,
            "trust_remote_code": args.trust_remote_code,
            "prompts": args.prompts,
            "num_prompts": len(prompts),
            "chat_template": tokenizer.chat_template is not None,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "top_k": args.top_k if args.temperature else None,
            "top_p": args.top_p if args.temperature else None,
            "seed": args.seed,
            "dtype": str(target.dtype).removeprefix("torch."),
            "drafter_dtype": str(drafter.dtype).removeprefix("torch."),
            "attention": target.config._attn_implementation,
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "block_size": drafter.config.block_size,
            "generation_config": settings.to_diff_dict(),
        },
        "cost_table": {"verify": drafter.cost_table.verify, "draft": drafter.cost_table.draft},
    }
    print()
    print(table(result))
    others = result["machine"]["other_cores_busy_meanwhile"]
    if why_busy({**load, "other_cores_busy": others, "busiest": watch.busiest()}):
        print("warning: the machine was busy with other things while this was timed.")
    line = json.dumps(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0
