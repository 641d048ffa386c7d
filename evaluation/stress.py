"""An engine under more than it can serve: nothing lost, nothing mixed up, memory flat, clear refusals.

    python -m dspark.evaluation.stress --target <model> --drafter <drafter> --prompts gsm8k.jsonl mt-bench.jsonl

Finds the rate at which the engine just keeps up, then sends `--requests` requests at four times that rate: prompts of
many lengths, greedy and sampled, with and without stop strings; some are cancelled while they wait or write, some
readers go away, some requests have faults of their own (an empty stop string, a prompt beyond the target's positions,
a processor that raises). Every greedy text is compared with plain decoding of its prompt by itself (use fp32). Prints
the counts and, as the last line, one JSON object; the exit code is 1 if anything is wrong.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize


REQUESTS = 500
OVERLOAD = 4.0
LENGTHS = (4, 8, 16, 24)  # new tokens
KINDS = {  # shares of the requests
    "greedy": 0.5,
    "sampled": 0.15,
    "stopped": 0.1,
    "cancelled": 0.1,
    "disconnected": 0.05,
    "empty stop string": 0.03,
    "too long": 0.04,
    "raising processor": 0.03,
}
FAULTS = {"empty stop string": "stop_strings", "too long": "position", "raising processor": "a processor's own error"}


def resident_bytes() -> int | None:
    """Of this process now (Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return None


def broken_processor(input_ids, scores):
    raise RuntimeError(FAULTS["raising processor"])


class Stress:
    """Requests against an engine that runs in its own thread.

    Args:
        engine: with `max_waiting` small enough to refuse.
        tokenizer: for stop strings.
        prompts: lists of ids.
        references: the plain greedy text behind each prompt, at least as long as the longest request.
    """

    def __init__(self, engine, tokenizer, prompts: list[list[int]], references: list[list[int]], seed: int = 0):
        self.engine, self.tokenizer = engine, tokenizer
        self.prompts, self.references = prompts, references
        self.rng = random.Random(seed)
        self.outcomes, self.wrong = Counter(), []
        self.memory: list[int] = []
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []

    def sustainable_rate(self, count: int) -> float:
        """Requests a second when there are always enough of them."""
        started = time.perf_counter()
        requests = [self._submit("greedy", i) for i in range(count)]
        for request, *_ in requests:
            list(self.engine.stream(request))
        return count / (time.perf_counter() - started)

    def flood(self, count: int, rate: float) -> float:
        """Send `count` requests at `rate` a second and wait for the last; returns the seconds it took."""
        kinds = self.rng.choices(list(KINDS), weights=list(KINDS.values()), k=count)
        started = time.perf_counter()
        for i, kind in enumerate(kinds):
            time.sleep(max(0.0, started + i / rate - time.perf_counter()))
            self._send(kind, i)
            if i % 10 == 0 and (held := resident_bytes()) is not None:
                self.memory.append(held)
        for reader in self._readers:
            reader.join()
        self.memory.append(resident_bytes() or 0)
        return time.perf_counter() - started

    def _submit(self, kind: str, i: int):
        which = self.rng.randrange(len(self.prompts))
        length = self.rng.choice(LENGTHS)
        prompt, how = self.prompts[which], {"max_new_tokens": length, "do_sample": False}
        stop = None
        if kind == "sampled":
            how |= {"do_sample": True, "temperature": 0.8, "top_k": 20}
        elif kind == "stopped":
            text = self.tokenizer.decode(self.references[which][:length])
            stop = text[len(text) // 2 :][:3] or text
            how |= {"stop_strings": [stop], "tokenizer": self.tokenizer}
        elif kind == "empty stop string":
            how |= {"stop_strings": [""], "tokenizer": self.tokenizer}
        elif kind == "too long":
            how["max_new_tokens"] = 10**7
        elif kind == "raising processor":
            how["logits_processor"] = [broken_processor]
        request = self.engine.submit(prompt, seed=i if kind == "sampled" else None, **how)
        return request, which, length, stop

    def _send(self, kind: str, i: int) -> None:
        from dspark.candidate_generator import EngineFull

        try:
            sent = self._submit(kind, i)
        except EngineFull:
            self._count("refused: full")
            return
        except ValueError as error:
            right = FAULTS.get(kind, "?") in str(error)
            self._count(f"refused: {kind}" if right else f"WRONG refusal of {kind}: {error}")
            return
        reader = threading.Thread(target=self._read, args=(kind, i, *sent), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, kind: str, i: int, request, which: int, length: int, stop: str | None) -> None:
        tokens, error = [], None
        try:
            stream = self.engine.stream(request)
            for token in stream:
                tokens.append(token)
                if kind == "disconnected" and len(tokens) == 2:
                    stream.close()
                    break
                if kind == "cancelled" and len(tokens) == 1 + i % 3:
                    self.engine.cancel(request)
        except Exception as raised:
            error = raised
        self._count(self._verdict(kind, request, which, length, stop, tokens, error))

    def _verdict(self, kind, request, which, length, stop, tokens, error) -> str:
        """What became of a request; anything that starts with WRONG is a fault."""
        if kind == "raising processor":
            return f"failed: {kind}" if FAULTS[kind] in str(error) else f"WRONG: {kind} gave {error!r}"
        if error is not None:
            return f"WRONG: {kind} failed with {error!r}"
        if kind != "disconnected" and tokens != request.new_ids:
            return f"WRONG: {kind} streamed other tokens than its text"
        if kind == "sampled":
            fine = len(tokens) == length or request.finished == "stop"
            return "sampled" if fine else f"WRONG: sampled wrote {len(tokens)} of {length}"
        right = self.references[which][:length]
        if tokens != right[: len(tokens)]:
            return f"WRONG: {kind} is not its prompt's text"
        if kind in ("cancelled", "disconnected"):
            return f"{kind} early" if len(tokens) < len(right) else f"{kind} after its end"
        if kind == "stopped":
            text = self.tokenizer.decode(tokens)
            ended = stop in text or len(tokens) == len(right)
            return "stopped" if ended else f"WRONG: no {stop!r} in {text!r}"
        return "greedy" if tokens == right else f"WRONG: greedy wrote {len(tokens)} of {len(right)}"

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1


def references(target, prompts: list[list[int]]) -> list[list[int]]:
    """Plain greedy text behind each prompt, cut at its EOS."""
    import torch

    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=target.device)
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(LENGTHS), do_sample=False, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def run(target, drafter, tokenizer, prompts: list[list[int]], count: int = REQUESTS, **engine) -> dict:
    """The whole check; see the module's docstring."""
    from dspark.candidate_generator import DSparkEngine

    right = references(target, prompts)
    attention = target.config._attn_implementation
    with DSparkEngine(target, drafter, **{"max_requests": 16, "max_waiting": 48, **engine}) as engine:
        stress = Stress(engine, tokenizer, prompts, right)
        rate = stress.sustainable_rate(32)
        seconds = stress.flood(count, OVERLOAD * rate)
        slots = engine.packed.slots.taken + engine.planner.batch_drafter.cache.slots.taken
        left = len(engine.active) + len(engine.waiting)
    memory = stress.memory[len(stress.memory) // 3 :]  # storages have grown by then
    growth = (memory[-1] - memory[0]) / max(memory[0], 1)
    result = {
        "requests": count,
        "sustainable_rate": rate,
        "offered_rate": OVERLOAD * rate,
        "seconds": seconds,
        "outcomes": dict(stress.outcomes),
        "lost": count - sum(stress.outcomes.values()),
        "slots_taken": slots,
        "left_in_engine": left,
        "memory_growth": growth,
        "accepted": engine.statistics.accepted,
    }
    same_text = references(target, prompts[:1]) == right[:1]
    result["target_as_it_was"] = same_text and target.config._attn_implementation == attention
    wrong = [outcome for outcome in stress.outcomes if outcome.startswith("WRONG")]
    result["ok"] = bool(
        not wrong
        and result["lost"] == slots == left == 0
        and growth < 0.05
        and result["target_as_it_was"]
        and engine.statistics.accepted > 0
    )
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--prompts", required=True, nargs="+", help='JSONL files of {"turns": [...]}')
    parser.add_argument("--num-prompts", type=int, default=8, help="of each file (default 8)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"to send (default {REQUESTS})")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    target, drafter = load_models(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [p for path in args.prompts for p in read_prompts(path, args.num_prompts)]
    ids = [tokenize(tokenizer, prompt, "cpu")["input_ids"][0].tolist() for prompt in prompts]
    result = run(target, drafter, tokenizer, ids, args.requests)
    for outcome, count in sorted(result["outcomes"].items()):
        print(f"{count:>5}  {outcome}")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
