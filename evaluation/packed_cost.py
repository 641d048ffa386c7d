"""What packing costs beside the work itself: a packed step against its parts.

    python -m dspark.evaluation.packed_cost --target <model> --drafter <drafter>

Two comparisons at 16 requests, each in turn within one run, medians:
- ragged blocks behind ragged contexts against a plain forward of as many tokens without context, plus bare attention
  of every request's own queries over its own keys, layer by layer;
- one token a request against a plain left-padded batch step of the host.
"""

import argparse
import json
import random
import statistics
import sys
import time

import torch

from dspark.evaluation.inputs import add_model_arguments, load_models


REQUESTS = 16
ROUNDS = 15


def blocks(rng: random.Random, widest: int) -> list[int]:
    return [rng.randint(1, widest) for _ in range(REQUESTS)]


class Bench:
    """A packed target whose slots hold contexts of given lengths, and the same work in parts."""

    def __init__(self, target, drafter, contexts: list[int]):
        from dspark.candidate_generator.packed_target_dspark import PackedTarget

        link, config = drafter.link(target), drafter.config
        self.target, self.contexts = target, contexts
        self.packed = PackedTarget(target, link.layers, config.target_layer_ids, drafter.device, drafter.dtype)
        self.rows = [self.packed.acquire() for _ in contexts]
        self.text_config = self.packed.text_config
        self.packed.slots.reserve(max(contexts) + 16)

    def packed_step(self, lengths: list[int]) -> None:
        for row, context in zip(self.rows, self.contexts):
            self.packed.slots.lengths[row] = context
        self.packed.verify(self.rows, [[7 + j for j in range(n)] for n in lengths], lengths)

    def plain_forward(self, tokens: int) -> None:
        self.target(torch.full((1, tokens), 7, device=self.target.device), use_cache=False)

    def attention(self, lengths: list[int], keys, values) -> None:
        """Bare scaled dot-product attention of every row over its own keys, for every layer."""
        heads = self.text_config.num_attention_heads
        for _ in range(self.text_config.num_hidden_layers):
            for row, (n, context) in enumerate(zip(lengths, self.contexts)):
                query = self.queries[:, :, :n]
                torch.nn.functional.scaled_dot_product_attention(
                    query,
                    keys[row : row + 1, :, : context + n],
                    values[row : row + 1, :, : context + n],
                    enable_gqa=keys.shape[1] != heads,
                )

    def storage(self):
        config = self.text_config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        make = {"dtype": self.target.dtype, "device": self.target.device}
        self.queries = torch.randn(1, config.num_attention_heads, 16, size, **make)
        return (torch.randn(len(self.contexts), kv_heads, max(self.contexts) + 16, size, **make) for _ in range(2))

    def batch_step(self, cache, length: int) -> None:
        """One token a row behind a left-padded batch, as the host decodes it."""
        from dspark.candidate_generator.cost_table_dspark import cache_argument

        mask = self.mask[:, : length + 1]
        positions = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
        self.target(
            torch.full((REQUESTS, 1), 7, device=self.target.device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(self.target): cache},
        )
        cache.crop(-1)

    def batch_cache(self):
        """The host's cache of a left-padded batch of these contexts."""
        from dspark.candidate_generator.cost_table_dspark import cache_argument

        length = max(self.contexts)
        self.mask = torch.zeros(REQUESTS, length + 1, dtype=torch.long, device=self.target.device)
        for row, context in zip(self.mask, self.contexts):
            row[length - context :] = 1
        ids = torch.full((REQUESTS, length), 7, device=self.target.device)
        positions = (self.mask[:, :length].cumsum(1) - 1).clamp(min=0)
        out = self.target(
            ids, attention_mask=self.mask[:, :length], position_ids=positions, use_cache=True, logits_to_keep=1
        )
        cache = out[cache_argument(self.target)]
        cache.activate_past_recording()
        return cache, length


def timed(run) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.no_grad()
def measure(target, drafter, contexts: tuple[int, int] = (64, 320), rounds: int = ROUNDS) -> dict:
    """Medians in seconds, and the two ratios."""
    rng = random.Random(0)
    bench = Bench(target, drafter, [rng.randint(*contexts) for _ in range(REQUESTS)])
    lengths = blocks(rng, 1 + drafter.config.block_size // 2)
    keys, values = bench.storage()
    cache, length = bench.batch_cache()
    parts = {
        "packed": lambda: bench.packed_step(lengths),
        "forward": lambda: bench.plain_forward(sum(lengths)),
        "attention": lambda: bench.attention(lengths, keys, values),
        "packed_ones": lambda: bench.packed_step([1] * REQUESTS),
        "batch_step": lambda: bench.batch_step(cache, length),
    }
    samples = {name: [] for name in parts}
    for _ in range(rounds + 1):
        for name, run in parts.items():
            samples[name].append(timed(run))
    seconds = {name: statistics.median(times[1:]) for name, times in samples.items()}
    return {
        "seconds": seconds,
        "tokens": sum(lengths),
        "contexts": bench.contexts,
        "ragged_ratio": seconds["packed"] / (seconds["forward"] + seconds["attention"]),
        "ones_ratio": seconds["packed_ones"] / seconds["batch_step"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timings of each part (default {ROUNDS})")
    args = parser.parse_args(argv)
    target, drafter = load_models(args)
    result = measure(target, drafter, rounds=args.rounds)
    ms = {name: f"{1000 * seconds:.1f}" for name, seconds in result["seconds"].items()}
    print(f"16 requests, {result['tokens']} tokens, contexts {min(result['contexts'])}-{max(result['contexts'])}")
    print(f"ragged: {ms['packed']} ms packed; {ms['forward']} ms forward + {ms['attention']} ms attention", end="")
    print(f" = ratio {result['ragged_ratio']:.3f}")
    print(f"one token each: {ms['packed_ones']} ms packed, {ms['batch_step']} ms left-padded batch", end="")
    print(f" = ratio {result['ones_ratio']:.3f}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
