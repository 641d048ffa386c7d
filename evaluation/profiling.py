"""`dspark profile`: what a draft and a verification cost on this machine, for the schedule.

    dspark profile --target <model> --drafter <drafter>

Decoding does this by itself on first use, in at most five seconds. Profiling by hand, on a quiet machine and for
longer, replaces the table that was kept; `--output` writes it elsewhere, to be loaded with
`drafter.cost_table = CostTable.load(file)` or given to `dspark benchmark --cost-table`. `--engine` measures what steps
of many requests cost instead, for batches, `DSparkEngine` and `dspark serve` (`EngineCosts.load(file)`).
"""

import argparse
import sys
from pathlib import Path

from dspark.evaluation.inputs import add_model_arguments, load_models
from dspark.evaluation.machine import look, why_busy


def profile_many(drafter, target, seconds: float):
    """What `DSparkEngine` measures on first use."""
    from dspark.candidate_generator.batch_drafter_dspark import BatchDrafter
    from dspark.candidate_generator.engine_costs_dspark import profile_engine
    from dspark.candidate_generator.packed_target_dspark import PackedTarget

    link = drafter.link(target)
    packed = PackedTarget(target, link.layers, drafter.config.target_layer_ids, drafter.device, drafter.dtype)
    return profile_engine(packed, BatchDrafter(drafter, link), seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--output", type=Path, help="write the table here instead of where decoding looks for it")
    parser.add_argument("--force", action="store_true", help="replace the kept table even on a busy machine")
    parser.add_argument("--seconds", type=float, default=15.0, help="time to stay within, roughly (15)")
    parser.add_argument("--engine", action="store_true", help="the costs of many requests at once")
    args = parser.parse_args(argv)
    if args.seconds <= 0:
        parser.error(f"--seconds is {args.seconds}: give a positive number.")
    busy = why_busy(look())
    if busy and not (args.output or args.force):
        print(
            f"dspark profile: {busy}. A table measured now would mislead the schedule: wait, or give --force.",
            file=sys.stderr,
        )
        return 3
    if busy:
        print(f"warning: {busy}; profile again when the machine is quiet.")

    from dspark.candidate_generator.cost_table_dspark import profile, table_path
    from dspark.candidate_generator.engine_costs_dspark import engine_costs_path

    try:
        target, drafter = load_models(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    table = profile_many(drafter, target, args.seconds) if args.engine else profile(drafter, target, args.seconds)
    path = args.output or (engine_costs_path if args.engine else table_path)(table.key)
    table.save(path)
    print(table)
    print(f"written to {path}")
    return 0
