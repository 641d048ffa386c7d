"""`dspark train`: a drafter for a target, from the target's own responses.

    dspark train --target <model> --train_file responses.jsonl --output_dir drafter
    dspark train config.yaml                       # the same settings in a file
    dspark train ... --resume                      # go on with an interrupted run
    accelerate launch -m dspark.training.train ... # several processes

All arguments of transformers' `TrainingArguments` work; what is here beside them are the model's and the data's.
"""

import json
import os
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerState
from transformers.utils import logging

from dspark.evaluation.inputs import DTYPES
from dspark.modeling_dspark import DSparkModel
from dspark.training.data import Rows, read_rows
from dspark.training.new_drafter import new_drafter
from dspark.training.trainer import ConversationCollator, DSparkTrainer, DSparkTrainingArguments


logger = logging.get_logger(__name__)

STATE = "trainer_state.json"  # of a checkpoint; the host's name
FEW_TOKENS = 100_000  # of the target's; a drafter trained on less is accepted little outside its training text


@dataclass
class ModelArguments:
    """Which target, and the shape of a new drafter."""

    target: str = field(metadata={"help": "Folder or Hub id of the model to draft for."})
    drafter: str | None = field(default=None, metadata={"help": "Go on from this drafter instead of a new one."})
    target_dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    num_hidden_layers: int = field(default=5, metadata={"help": "Layers of a new drafter (2 to 5 in the paper)."})
    block_size: int = field(default=7, metadata={"help": "Drafts of a round."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Keep only so many ids, the most frequent in the data: smaller and faster."}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 for none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "vanilla, gated or rnn."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped target layers."})
    mask_token_id: int | None = field(default=None, metadata={"help": "By default an unused row of the embedding."})
    warm_start: bool = field(default=True, metadata={"help": "Start layers from the target's last ones."})


@dataclass
class DataArguments:
    """What to train on."""

    train_file: list[str] = field(metadata={"help": "JSONL of `dspark regenerate`, or of conversations."})
    eval_file: list[str] | None = field(default=None, metadata={"help": "JSONL to evaluate on."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Hold out this share of the rows for evaluation."})
    max_length: int = field(default=2048, metadata={"help": "Longer rows are left out, and counted."})
    chat_template: str | None = field(default=None, metadata={"help": "A Jinja file in place of the tokenizer's."})
    resume: bool = field(default=False, metadata={"help": "Go on from the newest checkpoint in `output_dir`."})


def parse(argv: list[str] | None) -> tuple[ModelArguments, DataArguments, DSparkTrainingArguments]:
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, DSparkTrainingArguments),
        prog="dspark train",
        description=__doc__.split("\n")[0],
    )
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        if not Path(argv[0]).is_file():
            raise ValueError(f"{argv[0]}: no such file.")
        if argv[1:] not in ([], ["--resume"]):
            raise ValueError(f"beside a file of settings only `--resume` is taken, not {argv[1:]}.")
        try:
            values = parser.parse_args_into_dataclasses(read_settings(Path(argv[0])), look_for_args_file=False)
        except ValueError as error:
            raise ValueError(f"{argv[0]}: {error}") from error
        values[1].resume |= argv[1:] == ["--resume"]
        return values
    return parser.parse_args_into_dataclasses(argv)


def read_settings(path: Path) -> list[str]:
    """The settings in a YAML or JSON file as the flags they stand for, so that both are read and refused alike."""
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML ({error}).") from error
    if not isinstance(settings, dict):
        raise ValueError("not a list of `name: value`.")
    flags = []
    for key, value in settings.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        flags += [f"--{key}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return flags


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: a killed run may leave one without its state, which the host writes last."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[-1].isdigit()]
    for path in sorted(found, key=lambda path: -int(path.name.split("-")[-1])):
        if is_complete(path):
            return path
        logger.warning(f"{path} is not complete and is passed over.")
    return None


def is_complete(checkpoint: Path) -> bool:
    """Whether weights, optimiser, schedule and state are all there and whole."""
    from safetensors import SafetensorError, safe_open

    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        for weights in checkpoint.glob("*.safetensors"):
            with safe_open(weights, "pt") as file:
                file.keys()
    except (OSError, ValueError, SafetensorError):
        return False
    parts = [checkpoint / name for name in ("optimizer.pt", "scheduler.pt", *rng_files(checkpoint))]
    weighted = any(checkpoint.glob("*.safetensors"))
    return weighted and "global_step" in (state or {}) and all(zipfile.is_zipfile(part) for part in parts)


def rng_files(checkpoint: Path) -> list[str]:
    return [path.name for path in checkpoint.glob("rng_state*.pth")] or ["rng_state.pth"]


def run_settings(drafter: DSparkModel, rows: Rows, args: DSparkTrainingArguments) -> dict:
    """What has to stay as it is over a resume: the drafter's config, the data, the anchors."""
    config = drafter.config.to_dict()
    keys = ("block_size", "draft_vocab_size", "hidden_size", "num_hidden_layers", "target_layer_ids", "mask_token_id")
    keys += ("markov_rank", "markov_head_type", "target_fingerprint")
    return {
        **{key: config[key] for key in keys},
        "training rows": rows.checksum,
        "num_anchors": args.num_anchors,
        "seed": args.seed,
    }


def check_same_run(folder: Path, settings: dict, resumed: bool) -> None:
    """Note a run's settings in its folder, or compare with those noted.

    Raises:
        ValueError: when a resumed run differs; names what.
    """
    path = folder / "dspark_run.json"
    if resumed and path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if earlier.get(key) != value:
                raise ValueError(
                    f"`--resume`: {key} was {earlier.get(key)!r} when the run in {folder} began, now it is {value!r}. "
                    "Resume with the same, or start in another folder (`--drafter` takes the checkpoint's weights)."
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def resume_point(args: DSparkTrainingArguments, resume: bool) -> Path | str | None:
    """Where to go on.

    Raises:
        ValueError: when the folder holds an earlier run and nobody said what to do with it, or holds none to resume.
    """
    if args.resume_from_checkpoint and args.resume_from_checkpoint not in (True, "True", "true"):
        if not is_complete(Path(args.resume_from_checkpoint)):
            raise ValueError(f"`--resume_from_checkpoint` {args.resume_from_checkpoint} is no complete checkpoint.")
        return args.resume_from_checkpoint
    folder = Path(args.output_dir)
    newest = newest_checkpoint(folder) if folder.is_dir() else None
    if resume or args.resume_from_checkpoint:
        if newest is None:
            raise ValueError(
                f"`--resume`: {folder} holds no complete checkpoint. Empty the folder, or give another, and start "
                "without `--resume`."
            )
        return newest
    if newest is not None:
        raise ValueError(f"`--output_dir` {folder} holds an earlier run: pass `--resume`, or give another folder.")
    if (folder / "config.json").exists() or any(folder.glob("checkpoint-*")):
        raise ValueError(
            f"`--output_dir` {folder} holds an earlier run without a complete checkpoint: empty it, or give another."
        )
    return None


def train(
    model_args: ModelArguments, data_args: DataArguments, args: DSparkTrainingArguments, callbacks: list | None = None
) -> DSparkTrainer:
    """Train a drafter and save it in `args.output_dir`, complete as a Hub repo.

    Raises:
        ValueError: for bad settings or data, before the first step.
    """
    if args.fsdp or args.deepspeed:
        raise ValueError("`--fsdp` and `--deepspeed` are not supported: a drafter is small, plain processes do.")
    checkpoint = resume_point(args, data_args.resume)
    tokenizer = AutoTokenizer.from_pretrained(model_args.target)
    if data_args.chat_template:
        tokenizer.chat_template = Path(data_args.chat_template).read_text(encoding="utf-8")
    if model_args.target_dtype not in DTYPES:
        raise ValueError(f"`--target_dtype` is {model_args.target_dtype!r}: choose one of {DTYPES}.")
    target = AutoModelForCausalLM.from_pretrained(model_args.target, dtype=model_args.target_dtype).to(args.device)
    if not 0 <= data_args.eval_fraction < 1:
        raise ValueError(f"`--eval_fraction` is {data_args.eval_fraction}: give a share from 0 to below 1.")
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    rows = read_rows(data_args.train_file, tokenizer, vocab_size, data_args.max_length)
    held_out = None
    if data_args.eval_file:
        held_out = read_rows(data_args.eval_file, tokenizer, vocab_size, data_args.max_length)
    elif data_args.eval_fraction > 0:
        rows, held_out = rows.split(data_args.eval_fraction, args.seed)
    elif args.eval_strategy != "no":
        raise ValueError("`--eval_strategy` needs rows to evaluate on: give `--eval_file` or `--eval_fraction`.")
    say_what_is_read(rows, held_out, args)
    drafter = build_drafter(model_args, target, tokenizer, rows, args)
    if args.process_index == 0:
        size = sum(p.numel() for p in drafter.parameters())
        print(f"drafter: {size / 1e6:.1f} M parameters, vocabulary {drafter.config.output_vocab_size}", flush=True)
    if args.process_index == 0:
        check_same_run(Path(args.output_dir), run_settings(drafter, rows, args), checkpoint is not None)
    trainer = DSparkTrainer(
        model=drafter,
        args=args,
        target=target,
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=ConversationCollator(tokenizer.pad_token_id or 0),
        callbacks=callbacks,
    )
    started = time.process_time()
    reached = None if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint) / STATE))
    if reached is not None and 0 < args.max_steps <= reached.global_step:  # the host would take a step beyond
        drafter.load_state_dict(DSparkModel.from_pretrained(checkpoint, dtype="float32").state_dict())
        trainer.state = reached
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.log({"process_seconds": round(time.process_time() - started, 1)})
    trainer.save_state()
    trainer.save_model()
    if args.process_index == 0:
        print(f"the drafter is in {args.output_dir}; next: dspark calibrate, dspark publish", flush=True)
    return trainer


def say_what_is_read(rows: Rows, held_out: Rows | None, args) -> None:
    if args.process_index:
        return
    tokens = rows.supervised_tokens
    print(f"training rows: {len(rows)}, {tokens} tokens of the target's", flush=True)
    for name, part in (("training", rows), ("evaluation", held_out)):
        if part is not None and part.skipped.counts:
            print(f"{name} rows left out: {part.skipped}", flush=True)
    if tokens < FEW_TOKENS:
        logger.warning(
            f"{tokens} tokens are few: below about {FEW_TOKENS} a drafter learns its training text by heart and "
            "little else. Regenerate more prompts."
        )


def build_drafter(model_args: ModelArguments, target, tokenizer, rows: Rows, args) -> DSparkModel:
    """The drafter to train, in fp32: its optimiser needs the digits."""
    if model_args.drafter is not None:
        drafter = DSparkModel.from_pretrained(model_args.drafter, dtype="float32")
        for key in ("num_hidden_layers", "block_size", "draft_vocab_size", "markov_rank", "markov_head_type"):
            given, default = getattr(model_args, key), ModelArguments.__dataclass_fields__[key].default
            if given not in (default, getattr(drafter.config, key)):
                raise ValueError(
                    f"`--{key}` {given}: `--drafter` {model_args.drafter} has {getattr(drafter.config, key)}, and the "
                    "shape of a trained drafter does not change. Leave it out, or start a new one."
                )
        return drafter
    optional = {
        key: getattr(model_args, key)
        for key in ("target_layer_ids", "mask_token_id")
        if getattr(model_args, key) is not None
    }
    counts = rows.token_counts(target.config.get_text_config(decoder=True).vocab_size)
    kept = model_args.draft_vocab_size
    if kept is not None:
        covered = counts.sort(descending=True).values[:kept].sum() / counts.sum()
        print(f"draft vocabulary: {kept} ids, {covered:.2%} of the training tokens", flush=True)
    return new_drafter(
        target,
        tokenizer,
        warm_start=model_args.warm_start,
        token_counts=counts,
        seed=args.seed,
        num_hidden_layers=model_args.num_hidden_layers,
        block_size=model_args.block_size,
        draft_vocab_size=kept,
        markov_rank=model_args.markov_rank,
        markov_head_type=model_args.markov_head_type,
        **optional,
    )


def main(argv: list[str] | None = None) -> int:
    try:
        train(*parse(argv))
    except (ValueError, OSError) as error:
        if os.environ.get("DSPARK_TRACEBACK"):
            raise
        print(f"dspark train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dspark train: stopped; `--resume` goes on from the newest checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
