"""Renews the code in a published checkpoint's folder under `model_cards/`, after a change of the package's.

    python -m dspark.evaluation.build_card     # or: make card

Weights, config and card stay as they are. `dspark publish` makes such a folder in the first place.
"""

import argparse
import sys
from pathlib import Path

from dspark.training.publish import write_repo


FOLDER = Path(__file__).resolve().parent.parent / "model_cards" / "SmolLM2-135M-Instruct-DSpark"


def main(argv: list[str] | None = None) -> int:
    from dspark.modeling_dspark import DSparkModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args(argv).folder
    write_repo(DSparkModel.from_pretrained(folder, dtype="auto"), folder)
    print(f"written: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
