"""`dspark publish`: a trained drafter as a complete Hub repo in a folder, and onto the Hub.

    dspark publish --drafter drafter --output My-Target-DSpark
    dspark publish --drafter drafter --output My-Target-DSpark --push org/My-Target-DSpark
    dspark publish --drafter drafter --output serving --layout deepspec --target <model>   # for serving engines

The repo holds weights in bf16, config with calibration, all code decoding needs, and a card rendered from
`model_cards/template.md`. It has no machine's cost table and nothing of training's state. A card that was edited by
hand is left alone.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from string import Template


MARK = "<!-- dspark card: remove this line to keep your own words -->"


def publish(
    drafter_folder: str | os.PathLike,
    output: str | os.PathLike,
    *,
    dtype: str = "bfloat16",
    name: str | None = None,
    license: str | None = None,
    data: str | None = None,
    target_name: str | None = None,
) -> Path:
    """Write the Hub repo of a drafter.

    Args:
        drafter_folder: what `dspark train` wrote, calibrated or not.
        output: folder of the repo; an earlier one is renewed.
        name: title of the card, by default the folder's name.
        license: an identifier of the Hub's; data: a sentence on what it was trained on.
        target_name: Hub id of the target, where training used a local folder.

    Raises:
        ValueError: when `drafter_folder` holds no drafter, or is `output` itself.
    """
    from dspark.modeling_dspark import DSparkModel
    from dspark.training.calibrate import check_drafter_folder

    source, output = Path(drafter_folder), Path(output)
    check_drafter_folder(source)
    check_output(source, output, lambda config: config.get("model_type") == "dspark")
    drafter = DSparkModel.from_pretrained(source, dtype=dtype)
    if target_name is not None:
        drafter.config.target_name_or_path = target_name
    card = output / "README.md"
    keep_card = card.exists() and MARK not in card.read_text(encoding="utf-8")
    extras = {
        extra: (source / extra).read_bytes()
        for extra in ("calibration.json", "calibration.png")
        if (source / extra).is_file()
    }
    if not keep_card:
        extras["README.md"] = render_card(drafter, source, name or output.resolve().name, license, data).encode()
    return write_repo(drafter, output, extras)


def check_output(source: Path, output: Path, ours) -> None:
    """
    Args:
        ours: whether a `config.json` is what this command writes, so that the folder may be renewed.

    Raises:
        ValueError: when writing would overwrite anything else.
    """
    if output.exists() and output.resolve() == source.resolve():
        raise ValueError("`--output` is the drafter's own folder: give another.")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not ours(config) or (output / "trainer_state.json").exists() or any(output.glob("checkpoint-*")):
        raise ValueError(
            f"`--output` {output} is not empty and was not written by this command with this layout: give another."
        )


def write_repo(drafter, folder: Path, extras: dict[str, bytes] | None = None) -> Path:
    """Write a drafter with its code into a folder, file by file atomically, and nothing that is not named.

    Args:
        extras: further files by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and moved: the weights may be mapped from the very file that is replaced.
    with tempfile.TemporaryDirectory(prefix=".publish-", dir=folder.parent) as work:
        made = Path(work)
        drafter.save_pretrained(made)
        for extra, content in (extras or {}).items():
            (made / extra).write_bytes(content)
        for old in folder.glob("*_dspark.py"):
            if not (made / old.name).exists():
                old.unlink()  # one that the package no longer has
        for file in sorted(path for path in made.rglob("*") if path.is_file()):
            place = folder / file.relative_to(made)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
            place.chmod(0o644)
    return folder


def template_path() -> Path:
    """The card's template, wherever the package is installed."""
    from importlib.resources import files

    return Path(str(files("dspark.model_cards") / "template.md"))


def render_card(drafter, source: Path, name: str, license: str | None, data: str | None) -> str:
    """The card's text, from the config, the calibration and the last evaluation of training."""
    config = drafter.config
    target = config.target_name_or_path or "its target"
    on_hub = "/" in target and not Path(target).exists()
    attention = f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads"
    head = "none" if config.markov_rank == 0 else f"{config.markov_head_type} Markov, rank {config.markov_rank}"
    size = sum(p.numel() * p.element_size() for p in drafter.parameters())
    vocabulary = f"all {config.vocab_size:,} ids"
    if config.draft_vocab_size is not None:
        vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids"
    confidence = "none"
    if config.enable_confidence_head:
        regimes = sorted(config.confidence_temperatures or {}, key=float)
        confidence = f"calibrated for sampling temperatures {', '.join(regimes)}" if regimes else "not calibrated"
    head_lines = [f"license: {license}"] if license else []
    head_lines += [f"base_model: {target}"] if on_hub else []
    return Template(template_path().read_text(encoding="utf-8")).substitute(
        metadata="\n".join([*head_lines, "library_name: transformers", "tags:"]),
        mark=MARK,
        name=name,
        target=target,
        revision=f" at revision `{config.target_revision}`" if config.target_revision else "",
        block=config.block_size,
        backbone=f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {attention} of {config.head_dim}",
        taps=f"layers {', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}",
        mask=config.mask_token_id,
        head=head,
        confidence=confidence,
        vocabulary=vocabulary,
        weights=f"{str(drafter.dtype).removeprefix('torch.')}, {size / 1e6:.0f} MB",
        data=data or "Responses that the target wrote itself (`dspark regenerate`).",
        figures=figures(source),
    )


def figures(source: Path) -> str:
    """What training and calibration measured, as a table; a sentence when nothing was."""
    rows = []
    state = source / "trainer_state.json"
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else []
    last = next((entry for entry in reversed(history) if "eval_accepted_length" in entry), None)
    if last:
        slots = {int(key.rsplit("_", 1)[1]): last[key] for key in last if key.startswith("eval_acceptance_")}
        by_slot = " ".join(f"{slots[k]:.2f}" for k in sorted(slots))
        rows += [
            ("accepted length, teacher-forced, temperature 1", f"{last['eval_accepted_length']:.2f} tokens a round"),
            ("acceptance by slot, given the slots before", by_slot),
        ]
    calibration = source / "calibration.json"
    if calibration.is_file():
        for regime, report in json.loads(calibration.read_text(encoding="utf-8")).items():
            kind = "greedy" if float(regime) == 0 else f"temperature {regime}"
            change = f"{report['mean_ece_before']:.1%} to {report['mean_ece_after']:.1%}"
            rows.append((f"calibration error of prefix survival, {kind}", f"{change} (mean over slots)"))
    if not rows:
        return "Not measured yet: `dspark benchmark` prints accepted length and speed on your machine."
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)])


def push(folder: Path, repo: str, private: bool = False, revision: str | None = None) -> str:
    """Upload a folder as a Hub repo and return its address.

    Raises:
        ValueError: without a login, or when the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=repo, revision=revision))
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"`--push` {repo}: the Hub could not be written ({error}). The folder {folder} is complete; log in with "
            "`hf auth login` and try again."
        ) from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--drafter", required=True, help="folder of a trained drafter")
    add("--output", required=True, type=Path, help="folder to write")
    add("--layout", choices=("hub", "deepspec"), default="hub", help="deepspec: for vLLM, SGLang and llama.cpp")
    add("--target", help="the target; with `--layout deepspec` its embedding and LM head go into the file")
    add("--slim", action="store_true", help="with `--layout deepspec`: without embedding and LM head")
    add("--target-name", help="Hub id of the target, when training used a local folder")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the weights")
    add("--name", help="title of the card; by default the folder's name")
    add("--license", help="identifier of the Hub's, such as apache-2.0")
    add("--data", help="for the card: a sentence on the training data")
    add("--push", metavar="REPO", help="upload to this repo of the Hub")
    add("--private", action="store_true", help="when the repo is made")
    args = parser.parse_args(argv)
    try:
        if args.layout == "hub":
            keys = ("dtype", "name", "license", "data", "target_name")
            publish(args.drafter, args.output, **{key: getattr(args, key) for key in keys})
            print(f"written: {args.output}, complete as a Hub repo")
            named = json.loads((args.output / "config.json").read_text(encoding="utf-8"))["target_name_or_path"]
            if named and Path(named).exists():
                print(f"note: card and config name the target by its folder {named}; `--target-name` gives its Hub id")
        else:
            publish_serving(args)
        if args.push:
            print(push(args.output, args.push, args.private))
    except (ValueError, OSError) as error:
        print(f"dspark publish: {error}", file=sys.stderr)
        return 1
    return 0


def publish_serving(args) -> None:
    """The serving layout by the command's arguments; prints how to serve it."""
    from transformers import AutoModelForCausalLM

    from dspark.modeling_dspark import DSparkModel
    from dspark.training.calibrate import check_drafter_folder
    from dspark.training.serving_layout import commands, write_serving_layout

    check_drafter_folder(Path(args.drafter))
    check_output(Path(args.drafter), args.output, lambda config: config.get("architectures") == ["Qwen3DSparkModel"])
    drafter = DSparkModel.from_pretrained(args.drafter, dtype=args.dtype)
    name = args.target or drafter.config.target_name_or_path
    target = None
    if not args.slim and drafter.embed_tokens is None:
        if name is None:
            raise ValueError("`--layout deepspec` needs `--target` for embedding and LM head, or `--slim`.")
        target = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype)
        drafter.link(target)
    notes = write_serving_layout(drafter, args.output, target)
    print(f"written: {args.output}, in DeepSpec's layout\n")
    print(commands(str(args.push or args.output), args.target_name or name or "<target>", drafter.config.block_size))
    print("\n" + "\n".join(notes))


if __name__ == "__main__":
    sys.exit(main())
