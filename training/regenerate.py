"""`dspark regenerate`: prompts to responses by the target itself, the data a drafter is trained on.

    dspark regenerate --target <model> --prompts prompts.jsonl --output responses.jsonl
    dspark regenerate --target <model> --prompts org/dataset --split train --output responses.jsonl --temperature 1

Only the prompts of a dataset are used: a drafter has to learn the target's distribution (paper, training data). Every
line of the output is one conversation, `messages` for people and `input_ids` with `assistant_masks` for training. A
second run with the same settings goes on behind the last complete line.
"""

import argparse
import copy
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from dspark.evaluation.inputs import DTYPES
from dspark.training.conversations import encode, prompt_ids, require_chat_template, template_text
from dspark.training.prompts import load_prompts


SORTED_BATCHES = 16  # conversations are sorted by length within so many batches: little padding, order still mixed


def settings_path(output: Path) -> Path:
    return output.with_name(output.name + ".settings.json")


def finished(output: Path, settings: dict) -> tuple[set[tuple[int, int]], float]:
    """What an earlier run left: `(prompt, sample)` pairs and CPU seconds. A line cut short is taken off the file.

    Raises:
        ValueError: when the file was made with other settings, or is none of ours.
    """
    path = settings_path(output)
    if not path.is_file():
        raise ValueError(f"`--output` {output} exists and has no {path.name} beside it: give another file.")
    earlier = json.loads(path.read_text(encoding="utf-8"))
    seconds = earlier.pop("process_seconds", 0.0)
    other = [key for key in settings if earlier.get(key) != settings[key]]
    if other:
        key = other[0]
        raise ValueError(
            f"`--output` {output} was made with {key} = {earlier.get(key)!r}, now it is {settings[key]!r}: give "
            "another file, or the settings of the first run to go on with it."
        )
    done, end = set(), 0
    with open(output, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if row is None or not line.endswith(b"\n"):
                break
            done.add((row["prompt"], row["sample"]))
            end += len(line)
    if end < output.stat().st_size:
        print(f"{output}: cut off behind line {len(done)}, the next was not complete", flush=True)
        os.truncate(output, end)
    return done, seconds


def regenerate(
    target,
    tokenizer,
    prompts: list[dict],
    output: str | os.PathLike,
    *,
    max_new_tokens: int = 1024,
    max_length: int | None = None,
    batch_size: int = 32,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    samples: int = 1,
    system: str | None = None,
    plain_text: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> dict:
    """Write the target's responses to `output`, one JSON object a line; goes on with what is there.

    Args:
        target: a causal LM, on the device it shall run on.
        prompts: `{"turns": [user messages]}` each; every turn is answered with the ones before in view.
        max_new_tokens: of each response; a response cut there has no end-of-turn token.
        max_length: prompt and response together; by default the target's positions. Longer prompts are skipped and
            counted.
        temperature: `None` takes the target's generation defaults, 0 is greedy.
        top_k, top_p: `None` takes the target's defaults; 0 and 1 switch them off.
        samples: responses to each prompt; above 1 only when sampling.
        system: a system message before every conversation.
        plain_text: continue the first turn as it stands, without a chat template.

    Returns:
        Counts: `rows`, `tokens` (written by the target), `cut` (at `max_new_tokens`), `too_long` (prompts skipped),
        `process_seconds` (CPU time of all runs for this file).

    Raises:
        ValueError: for a tokenizer without a chat template, an `output` of other settings, bad values.
    """
    from tqdm.auto import tqdm

    if not plain_text:
        require_chat_template(tokenizer)
    generation = generation_settings(target, tokenizer, max_new_tokens, temperature, top_k, top_p)
    if samples > 1 and not generation.do_sample:
        raise ValueError("`--samples` above 1 repeats the same text when decoding is greedy: give a `--temperature`.")
    limit = max_length or getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2048
    output = Path(output)
    settings = {
        "target": target.config._name_or_path,
        "prompts": f"{len(prompts)}, checksum {checksum(prompts):08x}",
        "chat_template": None if plain_text else f"checksum {checksum(template_text(tokenizer)):08x}",
        "dtype": str(target.dtype),
        "max_new_tokens": max_new_tokens,
        "max_length": limit,
        "samples": samples,
        "system": system,
        "plain_text": plain_text,
        "seed": seed,
        **{key: getattr(generation, key) for key in ("do_sample", "temperature", "top_k", "top_p")},
    }
    from dspark.candidate_generator.cost_table_dspark import write_json

    earlier_seconds, started = 0.0, time.process_time()

    def note_seconds() -> float:
        seconds = earlier_seconds + time.process_time() - started
        write_json(settings_path(output), {**settings, "process_seconds": round(seconds, 3)})
        return seconds

    output.parent.mkdir(parents=True, exist_ok=True)
    existed = output.exists() and output.stat().st_size > 0
    with open(output, "a", encoding="utf-8") as file:
        lock(file, output)
        done, earlier_seconds = finished(output, settings) if existed else (set(), 0.0)
        note_seconds()
        todo = [(p, s) for s in range(samples) for p in range(len(prompts)) if (p, s) not in done]
        random.Random(seed).shuffle(todo)
        counts = {"rows": len(done), "tokens": 0, "cut": 0, "too_long": 0}
        bar = tqdm(total=len(prompts) * samples, initial=len(done), unit="prompt", disable=not progress)
        for batch in sorted_batches(todo, [sum(map(len, p["turns"])) for p in prompts], batch_size):
            conversations = [Conversation(p, s, prompts[p]["turns"], system) for p, s in batch]
            answer(target, tokenizer, conversations, generation, limit, plain_text, seed)
            for conversation in conversations:
                if conversation.too_long:
                    counts["too_long"] += 1
                    continue
                counts["rows"] += 1
                counts["tokens"] += sum(conversation.mask)
                counts["cut"] += conversation.cut
                file.write(json.dumps(conversation.row(), ensure_ascii=False) + "\n")
            file.flush()
            note_seconds()
            bar.update(len(batch))
            bar.set_postfix(tokens=counts["tokens"])
        bar.close()
    return {**counts, "process_seconds": round(note_seconds(), 3)}


def checksum(value) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def lock(file, output: Path) -> None:
    """Hold a file for this process, where the system can; the lock goes with the process.

    Raises:
        ValueError: when another run writes to it.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"`--output` {output}: another run is writing to it.") from error


def generation_settings(target, tokenizer, max_new_tokens, temperature, top_k, top_p):
    """The target's generation defaults, with what the caller asked for in their place."""
    settings = copy.deepcopy(target.generation_config)
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    # One plain continuation a prompt, whatever else a model's defaults ask for.
    settings.num_return_sequences = settings.num_beams = 1
    settings.return_dict_in_generate = False
    settings.max_time, settings.guidance_scale = float("inf"), 1.0  # for None the host would take the model's own
    if temperature is not None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"`--temperature` is {temperature}: give 0 for greedy or a positive number.")
        settings.do_sample = temperature > 0
        settings.temperature = temperature or None
        if temperature == 0:
            top_k = top_p = settings.top_k = settings.top_p = None
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None:
            setattr(settings, name, value)
    if settings.eos_token_id is None:
        settings.eos_token_id = tokenizer.eos_token_id
    eos = settings.eos_token_id
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    if settings.pad_token_id is None:
        settings.pad_token_id = (eos[0] if isinstance(eos, list) else eos) or 0
    return settings


def sorted_batches(todo: list, lengths: list[int], batch_size: int) -> Iterable[list]:
    """Batches of near-equal length, cut from stretches of `todo`: wherever a run stops, it has a fair sample."""
    stretch = SORTED_BATCHES * batch_size
    for start in range(0, len(todo), stretch):
        part = sorted(todo[start : start + stretch], key=lambda item: -lengths[item[0]])
        for i in range(0, len(part), batch_size):
            yield part[i : i + batch_size]


class Conversation:
    """A conversation under way: turn after turn of the user's is answered."""

    def __init__(self, prompt: int, sample: int, turns: list[str], system: str | None):
        self.prompt, self.sample, self.turns = prompt, sample, turns
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.cut = self.too_long = False

    def add(self, prompt: list[int], earlier_mask: list[int], response: list[int], text: str, ended: bool) -> None:
        self.ids, self.mask = prompt + response, earlier_mask + [1] * len(response)
        self.messages.append({"role": "assistant", "content": text})
        self.cut |= not ended

    def row(self) -> dict:
        return {
            "prompt": self.prompt,
            "sample": self.sample,
            "messages": self.messages,
            "input_ids": self.ids,
            "assistant_masks": self.mask,
        }


def answer(target, tokenizer, conversations: list[Conversation], generation, limit, plain_text, seed) -> None:
    """Have the target answer every turn of a batch of conversations."""
    import torch

    eos = generation.eos_token_id
    eos = set(eos if isinstance(eos, list) else [eos])
    for turn in range(max(len(c.turns) for c in conversations)):
        active, prompts, masks = [], [], []
        for c in conversations:
            if turn >= len(c.turns) or c.too_long or (plain_text and turn):
                continue
            c.messages.append({"role": "user", "content": c.turns[turn]})
            ids = prompt_ids(tokenizer, c.messages, plain_text)
            if len(ids) >= limit:
                c.too_long = not turn  # what was answered so far is kept
                c.messages.pop()
                continue
            active.append(c)
            prompts.append(ids)
            masks.append(earlier_mask(tokenizer, c.messages, ids) if turn else [0] * len(ids))
        if not active:
            return
        # A row near the limit is answered alone: beside longer ones its answer would be cut short.
        fitting = [i for i, ids in enumerate(prompts) if len(ids) + generation.max_new_tokens <= limit]
        alone = [[i] for i in range(len(prompts)) if i not in fitting]
        for part in [fitting, *alone] if fitting else alone:
            torch.manual_seed(zlib.crc32(repr((seed, active[part[0]].prompt, active[part[0]].sample, turn)).encode()))
            for i, new in zip(part, continuations(target, [prompts[i] for i in part], generation, limit)):
                end = next((i + 1 for i, token in enumerate(new) if token in eos), None)
                response = new[:end]
                text = tokenizer.decode(response[:-1] if end else response, skip_special_tokens=True)
                active[i].add(prompts[i], masks[i], response, text, end is not None)


def continuations(target, prompts: list[list[int]], generation, limit: int) -> list[list[int]]:
    """What the target writes behind prompts, as one batch padded on the left; behind an end of text is padding."""
    import torch

    width = max(map(len, prompts))
    inputs = torch.full((len(prompts), width), generation.pad_token_id)
    attention = torch.zeros_like(inputs)
    for row, ids in enumerate(prompts):
        inputs[row, width - len(ids) :] = torch.tensor(ids)
        attention[row, width - len(ids) :] = 1
    settings = copy.deepcopy(generation)
    settings.max_new_tokens = min(generation.max_new_tokens, limit - width)
    with torch.inference_mode():
        out = target.generate(
            input_ids=inputs.to(target.device),
            attention_mask=attention.to(target.device),
            generation_config=settings,
        )
    return out[:, width:].tolist()


def earlier_mask(tokenizer, messages: list[dict], ids: list[int]) -> list[int]:
    """The mask of the assistant's earlier turns within a prompt; none of it if the template renders them otherwise."""
    try:
        earlier, mask = encode(tokenizer, messages[:-1])
    except ValueError:
        return [0] * len(ids)
    return mask + [0] * (len(ids) - len(mask)) if ids[: len(earlier)] == earlier else [0] * len(ids)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dspark regenerate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub id of the model that answers")
    add("--prompts", required=True, help='JSONL of {"turns": ["user message", ...]}, or the name of a dataset')
    add("--output", required=True, type=Path, metavar="FILE", help="JSONL; gone on with if it is there")
    add("--split", default="train", help="of a dataset")
    add("--prompt-column", metavar="NAME", help="of a dataset; by default the first usual name it has")
    add("--num-prompts", type=int, metavar="N", help="only the first N")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="of each response")
    add("--max-length", type=int, metavar="N", help="prompt and response; by default the target's positions")
    add("--batch-size", type=int, default=32, metavar="N")
    add("--temperature", type=float, help="0 is greedy; by default the target's generation defaults")
    add("--top-k", type=int, help="0 for no limit; by default the target's")
    add("--top-p", type=float, help="1 for no limit; by default the target's")
    add("--samples", type=int, default=1, metavar="N", help="responses to each prompt, when sampling")
    add("--system", metavar="TEXT", help="a system message before every conversation")
    add("--chat-template", type=Path, metavar="FILE", help="a Jinja template in place of the tokenizer's")
    add("--plain-text", action="store_true", help="continue the prompts as they stand, without a chat template")
    add("--seed", type=int, default=0)
    add("--dtype", choices=DTYPES, default="auto", help="of the target; auto: what its files say")
    add("--attn", metavar="NAME", help="attention implementation (sdpa, eager, flash_attention_2, ...)")
    add("--device", help="by default cuda where there is one, else cpu")
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_new_tokens", "max_length", "batch_size", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}: give at least 1.")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        prompts = load_prompts(args.prompts, args.split, args.prompt_column, args.num_prompts)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        if args.chat_template:
            tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
        if not args.plain_text:
            require_chat_template(tokenizer)
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        attention = {"attn_implementation": args.attn} if args.attn else {}
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype, **attention).to(device).eval()
        keys = ("max_new_tokens", "max_length", "batch_size", "temperature", "top_k", "top_p", "samples")
        counts = regenerate(
            target,
            tokenizer,
            prompts,
            args.output,
            **{key: getattr(args, key) for key in keys},
            system=args.system,
            plain_text=args.plain_text,
            seed=args.seed,
        )
    except (ValueError, OSError) as error:
        print(f"dspark regenerate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndspark regenerate: stopped; the same command goes on behind the last line written", file=sys.stderr)
        return 130
    print(
        f"{args.output}: {counts['rows']} rows; this run {counts['tokens']} tokens of the target's, {counts['cut']} "
        f"responses cut at --max-new-tokens, {counts['too_long']} prompts too long and left out"
    )
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
