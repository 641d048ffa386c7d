"""What a training step costs, in time and memory, against the forwards it cannot do without.

    python -m dspark.training.step_cost --target <model>                       # time, at contexts 256 and 1,024
    python -m dspark.training.step_cost --target <model> --memory --anchors 512  # peak memory of one step

Three things are timed in turn, each alone: the target's forward (taps, states, LM head at the labels' positions), the
drafter's forward (backbone, heads, draft logits of all supervised slots, in chunks) and the whole step (both, loss,
backward). The bound is `target + 3 * drafter`: a backward pass costs two forwards. One JSON object as the last line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import torch


def random_batch(vocab_size: int, batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random ids; all but the first eighth count as the target's words."""
    ids = torch.randint(3, vocab_size, (batch, length), generator=generator)
    masks = torch.ones_like(ids)
    masks[:, : length // 8] = 0
    return {"input_ids": ids, "assistant_masks": masks, "lengths": torch.full((batch,), length)}


def make_trainer(target, anchors: int, bf16: bool, **drafter):
    from dspark.training.new_drafter import new_drafter
    from dspark.training.trainer import DSparkTrainer, DSparkTrainingArguments

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    counts = torch.arange(vocab_size, 0, -1)
    args = DSparkTrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_anchors=anchors,
        report_to=[],
        bf16=bf16,
        use_cpu=target.device.type == "cpu",
    )
    return DSparkTrainer(new_drafter(target, token_counts=counts, **drafter), args, target=target)


class StepCost:
    """The three timed calls on one batch."""

    def __init__(self, trainer, batch: dict[str, torch.Tensor]):
        self.trainer = trainer
        self.ids = batch["input_ids"].to(trainer.drafter.device)
        self.blocks = trainer.blocks_of(batch, 0).to(self.ids.device)
        self.denominators = trainer.denominators(self.blocks, self.ids)
        self.label_rows = self.blocks.rows(self.ids.shape[1])[self.blocks.supervised].unique()
        self.features, _ = trainer.frozen.run(self.ids, self.ids.device)
        self.chunk = max(1, 2**22 // trainer.drafter.config.output_vocab_size)

    @property
    def anchors(self) -> int:
        return int(self.blocks.supervised[..., 0].sum())

    @torch.no_grad()
    def target(self) -> None:
        _, states = self.trainer.frozen.run(self.ids, self.ids.device)
        states = states.flatten(0, 1)
        for rows in self.label_rows.split(self.chunk):
            self.trainer.frozen.link.target_logits(states[rows])

    @torch.no_grad()
    def drafter(self) -> None:
        from dspark.training.trainer import draft_hidden, head_outputs

        trainer, link = self.trainer, self.trainer.frozen.link
        with trainer.accelerator.autocast():
            hidden = draft_hidden(trainer.drafter, trainer.drafter, link, self.features, self.ids, self.blocks)
            features, _ = head_outputs(trainer.drafter, hidden, self.blocks.tokens(self.ids, 0))
            chosen = self.blocks.supervised.flatten().nonzero().squeeze(1)
            for rows in chosen.split(self.chunk):
                trainer._draft_logits(
                    hidden.flatten(0, 2)[rows], None if features is None else features.flatten(0, 2)[rows]
                )

    def step(self) -> None:
        from dspark.training.metrics import Metrics

        with self.trainer.accelerator.autocast():
            loss = self.trainer.loss_of(self.trainer.drafter, self.ids, self.blocks, self.denominators, Metrics())
        loss.backward()
        self.trainer.drafter.zero_grad()

    def times(self, repeats: int) -> dict[str, float]:
        """Median seconds of each, taken in turn."""
        seconds: dict[str, list[float]] = {"target": [], "drafter": [], "step": []}
        for repeat in range(repeats + 1):
            for name, taken in seconds.items():
                started = time.perf_counter()
                getattr(self, name)()
                if self.ids.device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat:  # the first is a warm-up
                    taken.append(time.perf_counter() - started)
        return {name: statistics.median(taken) for name, taken in seconds.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub id")
    add("--contexts", type=int, nargs="+", default=[256, 1024])
    add("--batch-size", type=int, default=8, help="at the first context; the others have as many tokens")
    add("--anchors", type=int, default=64, help="of each sequence")
    add("--num-hidden-layers", type=int, default=3)
    add("--draft-vocab-size", type=int)
    add("--markov-rank", type=int, default=64)
    add("--bf16", action="store_true")
    add("--repeats", type=int, default=5)
    add("--memory", action="store_true", help="one step at the first context; prints the process's peak resident size")
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from dspark.evaluation.machine import peak_memory

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device)
    shape = {key: getattr(args, key) for key in ("num_hidden_layers", "draft_vocab_size", "markov_rank")}
    trainer = make_trainer(target, args.anchors, args.bf16, **shape)
    generator = torch.Generator().manual_seed(0)
    results = []
    for context in args.contexts[: 1 if args.memory else None]:
        batch = max(1, args.batch_size * args.contexts[0] // context)
        cost = StepCost(trainer, random_batch(trainer.drafter.config.vocab_size, batch, context, generator))
        result = {"context": context, "batch": batch, "anchors": cost.anchors}
        if args.memory:
            cost.step()
            result["peak_bytes"] = peak_memory(target.device)
            print(f"context {context}, {cost.anchors} anchors: peak {result['peak_bytes'] / 2**20:.0f} MiB")
        else:
            seconds = cost.times(args.repeats)
            bound = seconds["target"] + 3 * seconds["drafter"]
            result |= {
                **seconds,
                "ratio": seconds["step"] / bound,
                "anchors_per_second": cost.anchors / seconds["step"],
            }
            print(
                f"context {context}, batch {batch}, {cost.anchors} anchors: target {seconds['target']:.3f} s, drafter "
                f"{seconds['drafter']:.3f} s, step {seconds['step']:.3f} s = {result['ratio']:.2f} x bound; "
                f"{result['anchors_per_second']:.0f} anchors/s",
                flush=True,
            )
        results.append(result)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
