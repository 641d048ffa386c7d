"""What a useless drafter costs: a real target with a drafter whose every draft is wrong, against plain decoding.

    python -m dspark.evaluation.worst_case --target <model> --drafter <drafter> [--prompt-tokens 2000]

The drafter's base logits are negated, so it drafts its least likely tokens with its ordinary confidence, at its
ordinary cost. Reported: drafted rounds, the extra time by the cost table the scheduler used, and the wall-clock ratio
of interleaved pairs.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dspark.candidate_generator.cost_table_dspark import cost_table_for
from dspark.modeling_dspark import DSparkModel


def never_hitting(drafter, target):
    """Make a drafter draft what it believes in least."""
    link = drafter.link(target)
    base_logits = link.base_logits
    link.base_logits = lambda drafter, hidden: -base_logits(drafter, hidden)
    return drafter


def run(target, prompt: torch.LongTensor, tokens: int, drafter=None) -> tuple[float, torch.LongTensor]:
    """Seconds and ids of one greedy call of exactly `tokens` new tokens."""
    config = GenerationConfig(do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0)
    started = time.perf_counter()
    out = target.generate(prompt, generation_config=config, assistant_model=drafter)
    return time.perf_counter() - started, out


def measure(target, drafter, prompt_tokens: int, new_tokens: int, pairs: int) -> dict:
    """Extra cost of a never-hitting drafter, by the table (statistics) and by the clock."""
    table = cost_table_for(drafter, target)
    prompt = torch.arange(prompt_tokens)[None] % (target.config.vocab_size - 100) + 50
    run(target, prompt, 8), run(target, prompt, 8, drafter)
    walls = []
    for _ in range(pairs):
        plain, expected = run(target, prompt, new_tokens)
        assisted, out = run(target, prompt, new_tokens, drafter)
        walls.append(assisted / plain)
    call = drafter.statistics
    extra = 0.0  # seconds by the table: every drafted round's draft and wider forward
    for length, rounds in call.lengths.items():
        wider = table.verify_seconds(1 + length, prompt_tokens) - table.verify_seconds(1, prompt_tokens)
        extra += rounds * (table.draft_seconds(prompt_tokens) + wider)
    useful = new_tokens * table.verify_seconds(1, prompt_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "drafted_rounds": call.rounds,
        "accepted": call.accepted,
        "same_text": torch.equal(out, expected),
        "extra_of_decoding_by_table": extra / useful,
        "extra_of_call_by_table": extra / (useful + call.prefill_seconds),
        "draft_seconds": call.draft_seconds,
        "wall_clock_ratio_median": statistics.median(walls),
        "wall_clock_ratios": walls,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args(argv)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype)
    drafter = never_hitting(DSparkModel.from_pretrained(arguments.drafter, dtype=arguments.dtype), target)
    print(json.dumps(measure(target, drafter, arguments.prompt_tokens, arguments.new_tokens, arguments.pairs)))


if __name__ == "__main__":
    main()
