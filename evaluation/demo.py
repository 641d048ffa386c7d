"""`dspark demo` (`make demo`): SmolLM2-135M-Instruct writes the same text with its drafter, sooner.

    dspark demo
    dspark demo --target <model> --drafter <drafter> --prompts prompts.jsonl

First, in fp32, every prompt is decoded plainly and with the drafter, each block verified whole: the text streams as it
comes, and must be the same token for token. Then, in bf16, plain and assisted decoding are timed in turn with the
default schedule. The exit code is 1 if a text differs or nothing was drafted; a slow machine is no failure.
"""

import argparse
import sys
import time
from pathlib import Path

from dspark.evaluation.benchmark import decode, generation_settings, speed, summarize
from dspark.evaluation.inputs import load_drafter, read_prompts, tokenize
from dspark.evaluation.machine import look, why_busy


ROOT = Path(__file__).resolve().parent.parent
DRAFTER = ROOT / "model_cards" / "SmolLM2-135M-Instruct-DSpark"
PROMPTS = ROOT / "evaluation" / "prompts" / "demo.jsonl"


def load(target: str | Path, drafter: str | Path, dtype: str):
    """Both models as a user loads them: the drafter brings its own code."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    return model, load_drafter(drafter, trust_remote_code=True, dtype=dtype).eval()


def same_text(target, drafter, tokenizer, prompts: list[dict], max_new_tokens: int) -> dict[int, str]:
    """Stream every prompt's assisted greedy text and compare it with plain decoding.

    Returns:
        Prompt number -> what is wrong: a differing text, or nothing drafted. Empty if all is well.
    """
    from transformers import TextStreamer

    settings = generation_settings(target, max_new_tokens)
    wrong = {}
    for number, prompt in enumerate(prompts, start=1):
        inputs = tokenize(tokenizer, prompt, target.device)
        print(f"\n[{number}/{len(prompts)}, {prompt.get('set', 'prompt')}] {' '.join(prompt['turns'][0].split())}")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assisted = decode(target, inputs, settings, drafter, "fixed", streamer=streamer)
        plain = decode(target, inputs, settings)
        call = assisted.statistics
        verdict = "the same text as plain decoding"
        if assisted.ids != plain.ids:
            position = next(
                (i for i, (a, b) in enumerate(zip(assisted.ids, plain.ids)) if a != b),
                min(len(assisted.ids), len(plain.ids)),
            )
            verdict = f"NOT the text of plain decoding: they part at new token {position}"
            wrong[number] = verdict
        elif call.drafted == 0:
            wrong[number] = verdict = "nothing was drafted"
        print(
            f"-> {verdict}; {len(assisted.ids)} tokens in {call.rounds} rounds, "
            f"accepted length {call.acceptance_length:.2f}",
            flush=True,
        )
    return wrong


def timed(target, drafter, tokenizer, prompts: list[dict], max_new_tokens: int) -> dict[str, tuple[list, list]]:
    """Time every prompt plainly and with the default schedule, in turn: set -> (plain calls, assisted calls)."""
    settings = generation_settings(target, max_new_tokens)
    inputs = [tokenize(tokenizer, prompt, target.device) for prompt in prompts]
    warm_up = generation_settings(target, 8)
    for assistant in (None, drafter):  # the cost table is measured, or read, here
        decode(target, inputs[0], warm_up, assistant)
    sets: dict[str, tuple[list, list]] = {}
    for number, (prompt, encoded) in enumerate(zip(prompts, inputs), start=1):
        plain, assisted = sets.setdefault(prompt.get("set", "all"), ([], []))
        plain.append(decode(target, encoded, settings))
        assisted.append(decode(target, encoded, settings, drafter))
        print(
            f"[{number}/{len(prompts)}] plain {plain[-1].tokens_per_second:6.2f} tokens/s, with the drafter "
            f"{assisted[-1].tokens_per_second:6.2f}, ratio "
            f"{assisted[-1].tokens_per_second / plain[-1].tokens_per_second:.2f}",
            flush=True,
        )
    return sets


def summary(sets: dict[str, tuple[list, list]]) -> str:
    """A table with one row a set. Tokens/s are medians over its prompts; their quotient is the ratio."""
    heads = ("prompts", "plain tok/s", "dspark tok/s", "ratio", "accepted length", "rests")
    lines = [f"{'set':<8}{heads[0]:>8}{heads[1]:>13}{heads[2]:>14}{heads[3]:>7}{heads[4]:>17}{heads[5]:>7}"]
    for name, (plain, assisted) in sets.items():
        before, figures = speed(plain)["tokens_per_second"], summarize(assisted)
        after = figures["tokens_per_second"]
        length = figures["acceptance_length"]
        lines.append(
            f"{name:<8}{len(plain):>8}{before:>13.2f}{after:>14.2f}{after / before:>7.2f}"
            f"{'-' if length is None else format(length, '.2f'):>17}{figures['plain_rounds']:>7}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", help="by default SmolLM2-135M-Instruct, fetched and converted once")
    add("--drafter", default=str(DRAFTER), help="folder or Hub id; the code in it is run")
    add("--prompts", default=str(PROMPTS), help='JSONL of {"set": ..., "turns": ["user message"]}')
    add("--same-tokens", type=int, default=48, metavar="N", help="new tokens of the fp32 comparison (48)")
    add("--speed-tokens", type=int, default=128, metavar="N", help="new tokens of the bf16 timing (128)")
    args = parser.parse_args(argv)
    if args.drafter == str(DRAFTER) and not DRAFTER.is_dir():
        parser.error(f"no drafter at {DRAFTER}: run from a checkout of the project, or give --target and --drafter.")
    try:
        prompts = read_prompts(args.prompts)
    except ValueError as error:
        parser.error(str(error))

    from transformers import AutoTokenizer
    from transformers.utils import logging

    from dspark.evaluation.smollm2 import smollm2

    logging.disable_progress_bar()
    started = time.perf_counter()
    path = args.target or smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)

    print(f"\n1. The same text, fp32, greedy, {args.same_tokens} new tokens a prompt, every block verified whole")
    target, drafter = load(path, args.drafter, "float32")
    wrong = same_text(target, drafter, tokenizer, prompts, args.same_tokens)
    del target, drafter

    print(f"\n2. Sooner, bf16, greedy, {args.speed_tokens} new tokens a prompt, default schedule", flush=True)
    busy = why_busy(look())
    if busy:
        print(f"note: {busy}; the times below are disturbed.")
    target, drafter = load(path, args.drafter, "bfloat16")
    sets = timed(target, drafter, tokenizer, prompts, args.speed_tokens)
    print(f"\nStatistics of the last prompt (`print(drafter.statistics)`):\n{drafter.statistics}")
    print(f"\n{summary(sets)}")
    if busy:
        print(f"note: {busy}; run again on a quiet machine for times that count.")

    same = len(prompts) - len(wrong)
    print(f"\nfp32 text identical to plain decoding on {same} of {len(prompts)} prompts")
    print(f"{time.perf_counter() - started:.0f} s in all")
    for number, problem in wrong.items():
        print(f"FAILED: prompt {number}: {problem}", file=sys.stderr)
    return 1 if wrong else 0
