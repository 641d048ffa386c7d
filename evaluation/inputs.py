"""What every command takes: a target, a drafter, prompts. Arguments, loading, and errors that say what to do."""

import argparse
import json
import os
from pathlib import Path


DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--target`, `--drafter` and how to load them."""
    add = parser.add_argument
    add("--target", required=required, help="folder or Hub id of the model that generates")
    add("--drafter", required=required, help="folder or Hub id of the DSpark drafter")
    add("--dtype", choices=DTYPES, default="auto", help="of both models; auto: what the target's files say")
    add("--attn", metavar="NAME", help="attention implementation of both models (sdpa, eager, flash_attention_2, ...)")
    add("--device", help="by default cuda where there is one, else cpu")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the drafter's repo instead of the installed package's",
    )


def load_models(args: argparse.Namespace):
    """`(target, drafter)` for the arguments of `add_model_arguments`, in evaluation mode on one device.

    Raises:
        ValueError: for a drafter that is not one or does not fit the target.
        OSError: for a folder or Hub id that is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    attention = {"attn_implementation": args.attn} if args.attn else {}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype, **attention).to(device).eval()
    drafter = load_drafter(args.drafter, args.trust_remote_code, dtype=target.dtype, **attention).to(device).eval()
    drafter.link(target)  # a drafter for another target is refused here
    return target, drafter


def load_drafter(name: str | os.PathLike, trust_remote_code: bool, **kwargs):
    """A drafter by the code in its own repo or, without trust in it, by the installed package, which also reads
    DeepSpec's files."""
    if trust_remote_code:
        from transformers import AutoModel

        drafter = AutoModel.from_pretrained(name, trust_remote_code=True, **kwargs)
        if not hasattr(drafter, "dspark_assisted_decoding"):
            raise ValueError(
                f"`--drafter` {name} holds a {type(drafter).__name__}, not a DSpark drafter with its code. If it is "
                "a DeepSpec checkpoint, drop `--trust-remote-code`."
            )
        return drafter
    from dspark.modeling_dspark import DSparkModel

    return DSparkModel.from_pretrained(name, **kwargs)


def read_prompts(path: str | os.PathLike, limit: int | None = None) -> list[dict]:
    """The objects of a JSONL file, `{"turns": ["first user message", ...], ...}` each.

    Raises:
        ValueError: naming the file, the line and what is wrong with it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'`--prompts` {path}: no such file; give a JSONL file of {{"turns": ["user message"]}}.')
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            prompt = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
        turns = prompt.get("turns") if isinstance(prompt, dict) else None
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f'{path}, line {number}: "turns" must be a list of at least one user message.')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"`--prompts` {path} holds no prompt.")
    return prompts


def tokenize(tokenizer, prompt: dict, device) -> dict:
    """Inputs of `generate` for the first turn of a prompt, through the tokenizer's chat template if it has one."""
    text = prompt["turns"][0]
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt").to(device)
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)
