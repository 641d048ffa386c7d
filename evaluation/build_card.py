"""Writes a published checkpoint's folder under `model_cards/`, as it is pushed: weights, config, the package's code.

    python -m dspark.evaluation.build_card --drafter <trained drafter> --target <its target> --name <the target's name>
    python -m dspark.evaluation.build_card     # after a change of the code: writes the folder anew from itself

The README in the folder is written by hand and left alone.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path


FOLDER = Path(__file__).resolve().parent.parent / "model_cards" / "SmolLM2-135M-Instruct-DSpark"


def build_card(folder: Path, drafter: str | Path, target: str | Path | None = None, name: str | None = None) -> None:
    """Save a drafter as a complete Hub repo in `folder`.

    Args:
        drafter: folder or Hub id of the weights, DeepSpec's files included; `folder` itself to renew its code.
        target: the model it was trained for; names it by `name` and by the fingerprint of its weights. `None` keeps
            what the drafter says.
    """
    from transformers import AutoModelForCausalLM

    from dspark.modeling_dspark import DSparkModel
    from dspark.modeling_dspark.target_dspark import target_fingerprint

    model = DSparkModel.from_pretrained(drafter, dtype="auto")
    if target is not None:
        loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        model.config.target_fingerprint = target_fingerprint(loaded)
        model.config.target_name_or_path = name or str(target)
    # The weights may be mapped from the very file that is written, so they go through a folder beside it.
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".card-", dir=folder.parent) as work:
        model.save_pretrained(work)
        written = sorted(path for path in Path(work).rglob("*") if path.is_file())
        for old in folder.glob("*_dspark.py"):
            old.unlink()  # one that the package no longer has
        for path in written:
            place = folder / path.relative_to(work)
            place.parent.mkdir(exist_ok=True)
            os.replace(path, place)
            place.chmod(0o644)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--drafter", help="by default the folder itself")
    parser.add_argument("--target", help="by default what the drafter's config says is kept")
    parser.add_argument("--name", help="what to call the target in the config")
    args = parser.parse_args(argv)
    build_card(args.folder, args.drafter or args.folder, args.target, args.name)
    print(f"written: {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
