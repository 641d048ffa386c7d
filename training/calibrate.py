"""`dspark calibrate`: temperatures for a drafter's confidences, from decoding held-out prompts.

    dspark calibrate --target <model> --drafter drafter --prompts held_out.jsonl

Prompts are decoded with the `fixed` schedule, greedily and at each temperature asked for: any other schedule would not
show what becomes of later slots. Half of the prompts fit the temperatures, the others measure them. The drafter's
`config.json` gets them; `calibration.json` and `calibration.png` beside it show ECE before and after and the
reliability diagram. Another sampling temperature uses the nearest regime.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from dspark.evaluation.inputs import add_model_arguments, load_models, read_prompts, tokenize
from dspark.training.calibration import Rounds, assess, fit_temperatures, reliability_diagram


def collect_rounds(
    target, drafter, prompts: list[dict], temperature: float, max_new_tokens: int, seed: int = 0, bar=None
):
    """Decode prompts with the `fixed` schedule and keep every round.

    Args:
        prompts: inputs of `generate`, one prompt each.
        temperature: of sampling, 0 for greedy.

    Returns:
        Rounds; the last of each call is left out, its acceptances may be cut by the end of the text.
    """
    import torch

    from dspark.evaluation.benchmark import generation_settings

    block = drafter.config.block_size
    settings = generation_settings(target, max_new_tokens, temperature)
    settings.dspark_schedule, settings.dspark_log = "fixed", True
    calibrated, drafter.config.confidence_temperatures = drafter.config.confidence_temperatures, None
    logits, accepted = [], []
    try:
        for number, inputs in enumerate(prompts):
            torch.manual_seed(seed + number)
            target.generate(**inputs, assistant_model=drafter, generation_config=settings)
            for _, drafts, confidences, count in drafter.statistics.log[:-1]:
                row = np.full(block, np.nan)
                c = np.clip(np.array(confidences[: len(drafts)], dtype=np.float64), 1e-9, 1 - 1e-9)
                row[: len(c)] = np.log(c) - np.log1p(-c)
                logits.append(row)
                accepted.append(count)
            if bar is not None:
                bar.update()
    finally:
        drafter.config.confidence_temperatures = calibrated
    return Rounds(np.array(logits).reshape(-1, block), np.array(accepted, dtype=int))


def calibrate(
    target,
    drafter,
    prompts: list[dict],
    temperatures=(0.0, 1.0),
    max_new_tokens: int = 256,
    seed: int = 0,
    progress=True,
) -> tuple[dict, dict[str, tuple[Rounds, list[float]]]]:
    """Fit and set `drafter.config.confidence_temperatures`, one set a regime.

    Args:
        prompts: inputs of `generate`; every other one fits, the rest measures.
        temperatures: sampling temperatures, 0 for greedy.

    Returns:
        The report by regime, and what the reliability diagram is drawn from.

    Raises:
        ValueError: without a confidence head, with fewer than two prompts, or when the rounds are too few.
    """
    from tqdm.auto import tqdm

    if drafter.confidence_head is None:
        raise ValueError("the drafter has no confidence head: there is nothing to calibrate.")
    if len(prompts) < 2:
        raise ValueError("calibration needs at least two prompts: some fit, others measure.")
    report, figures, fitted = {}, {}, {}
    with tqdm(total=len(prompts) * len(temperatures), unit="prompt", disable=not progress) as bar:
        for temperature in temperatures:
            regime = str(float(temperature))
            parts = [
                collect_rounds(target, drafter, prompts[first::2], temperature, max_new_tokens, seed, bar)
                for first in (0, 1)
            ]
            fitted[regime] = fit_temperatures(parts[0])
            report[regime] = {
                "temperatures": fitted[regime],
                "fitted_on": {"prompts": len(prompts[::2]), "rounds": len(parts[0])},
                "measured_on": {"prompts": len(prompts[1::2]), "rounds": len(parts[1])},
                **assess(parts[1], fitted[regime]),
            }
            figures[regime] = (parts[1], fitted[regime])
    drafter.config.confidence_temperatures = {**(drafter.config.confidence_temperatures or {}), **fitted}
    return report, figures


def table(report: dict) -> str:
    """The report for people."""
    lines = []
    for regime, figures in report.items():
        name = "greedy" if float(regime) == 0 else f"temperature {regime}"
        lines.append(
            f"{name}: {figures['measured_on']['rounds']} rounds of {figures['measured_on']['prompts']} prompts"
        )
        rows = (
            ("temperature", figures["temperatures"], "{:.2f}"),
            ("prefix survival", figures["survived"], "{:.3f}"),
            ("ECE before", figures["ece_before"], "{:.2%}"),
            ("ECE after", figures["ece_after"], "{:.2%}"),
            ("ECE of a perfect predictor", figures["noise_floor"], "{:.2%}"),
            ("AUC of c_k", figures["auc_after"], "{:.3f}"),
        )
        for title, values, form in rows:
            cells = "".join(f"{'-' if value is None else form.format(value):>9}" for value in values)
            lines.append(f"  {title:<28}{cells}")
    return "\n".join(lines)


def check_drafter_folder(folder: Path) -> None:
    """
    Raises:
        ValueError: when a folder is no drafter's; says which one may be meant.
    """
    if (folder / "config.json").is_file():
        return
    inside = sorted(folder.glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime)
    if inside:
        raise ValueError(f"`--drafter` {folder} holds checkpoints only: give one, such as {inside[-1].parent}.")
    raise ValueError(f"`--drafter` {folder} is no drafter's folder on this machine; download a repo of the Hub first.")


def write_temperatures(folder: Path, temperatures: dict) -> None:
    """Put the temperatures into a saved drafter's config, atomically; nothing else changes."""
    from dspark.candidate_generator.cost_table_dspark import write_json

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, dict(sorted({**config, "confidence_temperatures": temperatures}.items())))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompts", required=True, nargs="+", help='JSONL of {"turns": [...]}, not trained on')
    add("--num-prompts", type=int, metavar="N", help="only the first N of each file")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="of sampling; 0 is greedy")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder = Path(args.drafter)
    try:
        if not all(t == 0 or 0.01 <= t <= 10 for t in args.temperatures):
            raise ValueError(f"`--temperatures` {args.temperatures}: give 0 for greedy, or numbers from 0.01 to 10.")
        check_drafter_folder(folder)
        prompts = [prompt for path in args.prompts for prompt in read_prompts(path, args.num_prompts)]
        target, drafter = load_models(args)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.target)
        inputs = [tokenize(tokenizer, prompt, target.device) for prompt in prompts]
        report, figures = calibrate(target, drafter, inputs, args.temperatures, args.max_new_tokens, args.seed)
    except (ValueError, OSError, ImportError) as error:
        print(f"dspark calibrate: {error}", file=sys.stderr)
        return 1
    write_temperatures(folder, drafter.config.confidence_temperatures)
    (folder / "calibration.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    reliability_diagram(figures, folder / "calibration.png")
    print(table(report))
    for regime, figures in report.items():
        if figures["mean_ece_after"] > figures["mean_ece_before"]:
            print(
                f"note: at temperature {regime} the fitted temperatures did not lower the error on the other half of "
                "the prompts; more prompts would tell noise from fault."
            )
    print(
        json.dumps(
            {
                regime: {"ece_before": r["mean_ece_before"], "ece_after": r["mean_ece_after"]}
                for regime, r in report.items()
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
