"""`dspark <command>`: one module a command, imported only when it runs, so that `dspark --help` answers at once."""

import argparse
import importlib
import sys


COMMANDS = {
    "regenerate": ("training.regenerate", "prompts to responses by the target: the data to train a drafter on"),
    "train": ("training.train", "a drafter for your target, from its own responses"),
    "calibrate": ("training.calibrate", "temperatures for its confidences, from decoding held-out prompts"),
    "publish": ("training.publish", "a complete Hub repo of it, or the layout serving engines read"),
    "acceptance": ("evaluation.acceptance", "accepted length by prompt set and slot, apart from speed"),
    "benchmark": ("evaluation.benchmark", "time plain and assisted decoding in turn on your prompts"),
    "load": ("evaluation.load", "throughput against speed per user under load, schedule by schedule"),
    "profile": (
        "evaluation.profiling",
        "measure and print the cost table of a target and its drafter on this machine",
    ),
    "serve": ("evaluation.serve", "an OpenAI-style HTTP API in front of a target and its drafter"),
    "demo": ("evaluation.demo", "SmolLM2-135M-Instruct with its drafter: the same text, sooner"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    listing = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="dspark",
        description="DSpark speculative decoding for Hugging Face Transformers.",
        epilog=f"commands:\n{listing}\n\n`dspark <command> --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    # Only the command itself is parsed here; what follows is the command's own.
    module, _ = COMMANDS[parser.parse_args(argv[:1]).command]
    return importlib.import_module(f"dspark.{module}").main(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
