"""`dspark acceptance`: accepted length by prompt set and slot: the drafter's quality, apart from any machine's speed.

    dspark acceptance --target <model> --drafter <drafter> --prompts gsm8k.jsonl mbpp.jsonl --num-prompts 64

Every prompt is decoded with the `fixed` schedule, whose rounds verify whole blocks (the paper's offline setting),
greedily and at each temperature asked for. Accepted length is tokens a drafted round, bonus token included; acceptance
by slot is given that the slots before were accepted. One JSON object as the last line.
"""

import argparse
import json
import sys
from pathlib import Path

from dspark.evaluation.benchmark import decode, generation_settings, summarize
from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize


def acceptance(target, drafter, prompts: list[dict], temperature: float, max_new_tokens: int, seed: int = 0) -> dict:
    """`rounds`, `acceptance_length`, `conditional_acceptance` and `offered_per_slot` over prompts (inputs of
    `generate`) at one sampling temperature, 0 for greedy."""
    settings = generation_settings(target, max_new_tokens, temperature)
    calls = [
        decode(target, inputs, settings, drafter, "fixed", seed + number) for number, inputs in enumerate(prompts)
    ]
    summary = summarize(calls)
    keys = ("rounds", "tokens", "acceptance_length", "conditional_acceptance", "offered_per_slot")
    return {"prompts": len(prompts), **{key: summary[key] for key in keys}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, nargs="+", help='JSONL of {"turns": ["user message", ...]}, a set each')
    add("--num-prompts", type=int, metavar="N", help="only the first N of each set")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="of sampling; 0 is greedy")
    add("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    add("--json", type=Path, metavar="FILE", help="write the JSON object here too")
    args = parser.parse_args(argv)
    try:
        sets = {Path(path).stem: read_prompts(path, args.num_prompts) for path in args.prompts}
        target, drafter = load_models(args)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.target)
        result: dict = {"max_new_tokens": args.max_new_tokens, "dtype": str(target.dtype), "sets": {}}
        for name, prompts in sets.items():
            inputs = [tokenize(tokenizer, prompt, target.device) for prompt in prompts]
            for temperature in args.temperatures:
                figures = acceptance(target, drafter, inputs, temperature, args.max_new_tokens, args.seed)
                result["sets"].setdefault(name, {})[str(temperature)] = figures
                slots = " ".join("   -" if c is None else f"{c:.2f}" for c in figures["conditional_acceptance"])
                print(
                    f"{name:<16} temperature {temperature:<4} {figures['acceptance_length'] or 0:.2f} tokens a round, "
                    f"by slot {slots}  ({figures['prompts']} prompts, {figures['rounds']} rounds)",
                    flush=True,
                )
    except (ValueError, OSError) as error:
        print(f"dspark acceptance: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
