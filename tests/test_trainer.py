"""`DSparkTrainer`: anchors, accumulation, processes, resuming, checkpoints, and that training and decoding agree."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from test_loss import make_trainer, random_rows
from transformers import Trainer, TrainerCallback

from dspark.candidate_generator.draft_chain_dspark import DraftChain
from dspark.candidate_generator.taps_dspark import FeatureTaps
from dspark.modeling_dspark import DSparkModel
from dspark.training import Blocks, ConversationCollator, DSparkTrainer, DSparkTrainingArguments, Rows, new_drafter
from dspark.training.blocks import sample_anchors
from dspark.training.trainer import draft_hidden


def text_rows(count: int = 16, length: int = 20, seed: int = 0) -> Rows:
    """Rows of differing length; the first five tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        size = length - i % 7
        rows.append((torch.randint(3, 64, (size,), generator=generator).tolist(), [0] * 5 + [1] * (size - 5)))
    return Rows(rows)


class Seen(TrainerCallback):
    """Losses and learning rates of every step."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append({"step": state.global_step, **logs})


class Watched(DSparkTrainer):
    """Remembers the anchors of every batch."""

    def blocks_of(self, inputs, epoch):
        blocks = super().blocks_of(inputs, epoch)
        self.__dict__.setdefault("anchors_seen", []).append(blocks.anchors.tolist())
        return blocks


def fit(folder, steps: int = 6, resume=None, target=None, cls=Watched, rows=None, **args):
    """A short run on a tiny target; returns the trainer and what was logged."""
    target = target or make_target()
    settings = {"num_anchors": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3, **args}
    arguments = DSparkTrainingArguments(
        output_dir=str(folder), max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )
    seen = Seen()
    trainer = cls(make_drafter(target), arguments, target=target, train_dataset=rows or text_rows(), callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen.logs


def same_weights(a, b, atol=1e-6) -> None:
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters()):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-5, msg=name)


# ---- anchors and blocks ------------------------------------------------------------------------------------------


def test_anchors_depend_on_seed_epoch_and_sequence_only():
    ids = np.arange(100)
    mask = np.r_[np.zeros(10, int), np.ones(90, int)]
    first = sample_anchors(ids, mask, 8, seed=1, epoch=0)
    assert len(set(first.tolist())) == 8 and (np.diff(first) > 0).all()
    assert (first == sample_anchors(ids, mask, 8, 1, 0)).all()
    for other in ((2, 0), (1, 1)):
        assert (first != sample_anchors(ids, mask, 8, *other)).any()
    assert (first != sample_anchors(ids + 1, mask, 8, 1, 0)).any()
    assert sample_anchors(ids, mask, 500, 1, 0).tolist() == list(range(10, 99))  # the last token has none behind it


def test_anchors_stay_inside_the_targets_turns():
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1])
    assert sample_anchors(np.arange(9), mask, 99, 0, 0).tolist() == [6, 7]  # position 0 has no context, 1 and 3 end


def test_blocks_example():
    """The example in the module's head, and a turn that ends inside a block."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    blocks = Blocks.of(torch.ones_like(ids), [np.array([2, 4])], 3)
    assert blocks.slots.tolist() == [[[2, 3, 4], [4, 5, 6]]]
    assert blocks.inputs(ids, 63).tolist() == [[[12, 63, 63], [14, 63, 63]]]
    assert blocks.tokens(ids, 0)[0, 0].tolist() == [12, 13, 14]
    assert blocks.tokens(ids, 1)[0, 0].tolist() == [13, 14, 15]
    assert blocks.supervised.tolist() == [[[True] * 3, [True, False, False]]]
    gap = Blocks.of(torch.tensor([[1, 1, 1, 0, 1, 1]]), [np.array([1])], 4)
    assert gap.supervised.tolist() == [[[True, False, False, False]]]


@pytest.mark.parametrize(
    "shape",
    [{}, {"is_causal": True}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}, {"block_size": 40}],
    ids=["bidirectional", "causal", "sliding", "long blocks"],
)
def test_training_and_decoding_compute_the_same_block(shape):
    """Hidden states of every block in one training pass equal those of the decoding path at that anchor alone."""
    target = make_target()
    drafter = make_drafter(target, **shape)
    link = drafter.link(target)
    ids, _ = random_rows(length=60)
    anchors = [np.array([3, 4, 17, 30]), np.array([8]), np.arange(1, 60, 2)]
    size = drafter.config.block_size
    blocks = Blocks.of(torch.ones_like(ids), anchors, size)
    with torch.no_grad():
        with FeatureTaps(link.layers, drafter.config.target_layer_ids, "cpu", drafter.dtype) as taps:
            target(ids)
            features = taps.take()
        hidden = draft_hidden(drafter, drafter, link, features, ids, blocks)
        for row, own in enumerate(anchors):
            for place, p in enumerate(own.tolist()):
                alone = DraftChain(drafter, link, ids[row : row + 1, p : p + 1], features[row : row + 1, :p], None)
                torch.testing.assert_close(hidden[row, place], alone.hidden[0], atol=2e-5, rtol=1e-4)


def test_position_shift():
    """The same block behind the same context, 500 positions on, gives the same hidden states: rope is relative."""
    target = make_target(max_position_embeddings=1024)
    drafter = make_drafter(target)
    link = drafter.link(target)
    features = torch.randn(1, 20, 64)
    anchor = torch.tensor([[7]])

    def hidden(offset):
        positions = torch.arange(20)[None] + offset
        block = torch.arange(20, 27)[None] + offset
        with torch.no_grad():
            return DraftChain(drafter, link, anchor, features, None, positions, block).hidden

    torch.testing.assert_close(hidden(0), hidden(500), atol=1e-4, rtol=1e-4)


# ---- the loop ----------------------------------------------------------------------------------------------------


def test_accumulation_equals_a_large_batch(tmp_path):
    small, logs = fit(tmp_path / "a", 4, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    large, others = fit(tmp_path / "b", 4, per_device_train_batch_size=8)
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in others], abs=1e-5)
    same_weights(small.model, large.model, atol=2e-5)
    assert [log["loss_tv"] for log in logs] == pytest.approx([log["loss_tv"] for log in others], abs=1e-5)


def test_six_steps_are_three_and_a_resume(tmp_path):
    straight, logs = fit(tmp_path / "a", lr_scheduler_type="cosine", num_train_epochs=3)
    fit(tmp_path / "b", lr_scheduler_type="cosine", save_steps=3)
    (tmp_path / "b" / "checkpoint-6" / "trainer_state.json").unlink()
    resumed, rest = fit(
        tmp_path / "b", lr_scheduler_type="cosine", save_steps=100, resume=str(tmp_path / "b" / "checkpoint-3")
    )
    assert [log["step"] for log in rest] == [4, 5, 6]
    for key in ("loss", "learning_rate", "grad_norm", "accepted_length"):
        assert [log[key] for log in rest] == pytest.approx([log[key] for log in logs[3:]], abs=1e-6), key
    assert resumed.anchors_seen == straight.anchors_seen[3:]
    assert straight.anchors_seen[0] != straight.anchors_seen[2]  # 16 rows, 8 a step: the next epoch has others
    same_weights(resumed.model, straight.model)


def test_resume_keeps_the_optimiser(tmp_path):
    trainer, _ = fit(tmp_path, 3, save_steps=3)
    state = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)["state"]
    assert len(state) == sum(1 for _ in trainer.model.parameters())
    assert all(entry["exp_avg"].abs().sum() > 0 for entry in state.values())


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"bf16": True}, {"torch_compile": True}])
def test_usual_flags(settings, tmp_path):
    """Checkpointed gradients are the same; bf16 stays near; compiled too (where a compiler is there)."""
    if "torch_compile" in settings:
        settings = {**settings, "torch_compile_backend": "eager"}  # traced; no C++ compiler needed
    plain, logs = fit(tmp_path / "a", 3)
    other, others = fit(tmp_path / "b", 3, **settings)
    tolerance = 0.05 if "bf16" in settings else 1e-5
    assert [log["loss"] for log in others] == pytest.approx([log["loss"] for log in logs], abs=tolerance)
    assert all(p.dtype == torch.float32 for p in other.drafter.parameters())


WORKER = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_trainer import fit, text_rows
trainer, logs = fit({folder!r}, 3, per_device_train_batch_size={batch}, lr_scheduler_type="constant", optim="sgd",
                    rows=text_rows(16, 20), accelerator_config={{"even_batches": True}}, save_strategy="no")
if trainer.args.process_index == 0:
    torch.save({{"logs": logs, "weights": trainer.drafter.state_dict(), "world": trainer.args.world_size}}, {out!r})
"""


def run_processes(tmp_path, count: int, batch: int) -> dict:
    out, script = tmp_path / f"{count}.pt", tmp_path / f"worker{count}.py"
    tests = str(Path(__file__).parent)
    script.write_text(WORKER.format(tests=tests, folder=str(tmp_path / str(count)), batch=batch, out=str(out)))
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--standalone"]
    done = subprocess.run([sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


def test_two_processes_equal_one(tmp_path):
    """Gloo, each with half of the batch: same losses, metrics and weights."""
    one, two = run_processes(tmp_path, 1, 8), run_processes(tmp_path, 2, 4)
    assert (one["world"], two["world"]) == (1, 2)
    for key in ("loss", "loss_ce", "accepted_length", "confidence_auc"):
        ours, theirs = [[log[key] for log in run["logs"]] for run in (two, one)]
        assert ours == pytest.approx(theirs, abs=1e-5), key
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_overfit_then_decode(tmp_path, monkeypatch):
    """A drafter that learned the target's own text by heart has nearly every draft accepted on it, through save and
    load and `generate`: what is trained is what is decoded."""
    target = make_target("llama", 5, 6.0)
    with torch.no_grad():
        target.lm_head.weight.mul_(4)  # the same greedy text, with little doubt
    prompts = torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(0))
    text = target.generate(prompts, do_sample=False, max_new_tokens=40)
    rows = Rows([(row.tolist(), [0] * 9 + [1] * 40) for row in text])
    torch.manual_seed(0)
    drafter = new_drafter(target, num_hidden_layers=2, target_layer_ids=[0, 1, 2], markov_rank=16, block_size=4)
    args = DSparkTrainingArguments(
        output_dir=str(tmp_path), max_steps=500, per_device_train_batch_size=4, learning_rate=3e-3, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=100, save_strategy="no", lr_scheduler_type="cosine",
        eval_strategy="no",
    )  # fmt: skip
    trainer = DSparkTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    loaded = DSparkModel.from_pretrained(tmp_path)
    from conftest import FLAT_COSTS, config

    loaded.cost_table = FLAT_COSTS
    for prompt, whole in zip(prompts, text):
        settings = config(max_new_tokens=40, dspark_schedule="fixed")
        out = target.generate(prompt[None], assistant_model=loaded, generation_config=settings)
        assert torch.equal(out[0], whole)
        assert loaded.statistics.acceptance_rate > 0.95
    assert metrics["eval_accepted_length_greedy"] > 4.8
    assert metrics["eval_confidence_ece"] < 0.1


# ---- metrics -----------------------------------------------------------------------------------------------------


def test_evaluation_does_not_depend_on_the_batch(tmp_path):
    target = make_target()
    results = []
    for batch in (1, 5):
        args = DSparkTrainingArguments(
            output_dir=str(tmp_path), per_device_eval_batch_size=batch, report_to=[], use_cpu=True, num_anchors=4
        )
        trainer = DSparkTrainer(make_drafter(target), args, target=target, eval_dataset=text_rows(11))
        results.append(trainer.evaluate())
    keys = [key for key in results[0] if not re.search("runtime|per_second|preparation", key)]
    assert {"eval_loss", "eval_accepted_length", "eval_acceptance_7", "eval_confidence_ece"} <= set(keys)
    for key in keys:
        assert results[0][key] == pytest.approx(results[1][key], abs=1e-5), key


def test_metrics_by_hand(tmp_path):
    """Accepted length and AUC against their definitions."""
    from sklearn.metrics import roc_auc_score

    from dspark.training.metrics import Metrics, block_metrics, confidence_metrics, flatten

    trainer = make_trainer(make_drafter(make_target()), make_target(), tmp_path)
    metrics = Metrics()
    acceptance = torch.tensor([[[0.5, 0.8], [0.9, 0.1], [1.0, 1.0]]])
    match = torch.tensor([[[True, False], [False, True], [True, True]]])
    supervised = torch.tensor([[[True, True], [True, True], [True, False]]])  # the last block is not full
    block_metrics(metrics, acceptance, match, supervised)
    generator = torch.Generator().manual_seed(0)
    c = torch.rand(4000, generator=generator)
    event = (torch.rand(4000, generator=generator) < c**2).float()
    confidence_metrics(metrics, c, event)
    seen = flatten(metrics.reduce(trainer.accelerator))
    assert seen["accepted_length"] == pytest.approx(1 + (0.5 + 0.4 + 0.9 + 0.09) / 2)
    assert seen["accepted_length_greedy"] == pytest.approx(1.5)
    assert seen["acceptance_1"] == pytest.approx(0.7) and seen["acceptance_2"] == pytest.approx(0.49 / 1.4)
    assert seen["confidence_auc"] == pytest.approx(roc_auc_score(event, c), abs=1e-3)
    assert seen["confidence_ece"] == pytest.approx(1 / 6, abs=0.02)  # mean of c - c^2


# ---- checkpoints and refusals --------------------------------------------------------------------------------------


def test_every_checkpoint_is_a_drafter(tmp_path):
    """Loads offline with `AutoModel` and remote code in another interpreter; holds the drafter's tensors only."""
    trainer, _ = fit(tmp_path, 2, save_steps=2)
    folder = tmp_path / "checkpoint-2"
    code = (
        "from transformers import AutoModel; "
        f"d = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True); print(type(d).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.stdout.strip() == "DSparkModel", done.stderr[-2000:]
    from safetensors.torch import load_file

    held = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert held == sum(p.numel() for p in trainer.drafter.parameters())


def test_full_disk_in_mid_checkpoint(tmp_path, monkeypatch):
    """The half-written checkpoint goes, the one before stays and resumes."""

    class Full(Watched):
        def _save_optimizer_and_scheduler(self, folder):
            if folder.endswith("checkpoint-4"):
                raise OSError(28, "No space left on device")
            super()._save_optimizer_and_scheduler(folder)

    with pytest.raises(OSError, match="earlier ones are intact"):
        fit(tmp_path, save_steps=2, cls=Full)
    assert not (tmp_path / "checkpoint-4").exists()
    resumed, rest = fit(tmp_path, save_steps=50, resume=str(tmp_path / "checkpoint-2"))
    assert [log["step"] for log in rest] == [3, 4, 5, 6]


def test_columns_reach_the_loss(tmp_path):
    """A `datasets` table with an extra column, whatever `remove_unused_columns` is; the mask changes the loss."""
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": list(range(3, 23)), "assistant_masks": [0] * 5 + [1] * 15, "note": "x"} for _ in range(8)]
    losses = {}
    for remove in (False, True):
        _, logs = fit(tmp_path / str(remove), 1, rows=datasets.Dataset.from_list(rows), remove_unused_columns=remove)
        losses[remove] = logs[0]["loss"]
    assert losses[True] == losses[False]
    for row in rows:
        row["assistant_masks"] = [0] * 12 + [1] * 8
    _, logs = fit(tmp_path / "mask", 1, rows=datasets.Dataset.from_list(rows))
    assert logs[0]["loss"] != pytest.approx(losses[False], abs=1e-4)


def test_lora_on_the_drafter(tmp_path):
    from peft import LoraConfig, get_peft_model

    target = make_target()
    drafter = make_drafter(target)
    wrapped = get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    args = DSparkTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.1
    )
    before = {n: p.clone() for n, p in wrapped.named_parameters()}
    DSparkTrainer(wrapped, args, target=target, train_dataset=text_rows()).train()
    changed = {n for n, p in wrapped.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)


def test_refusals(tmp_path):
    target = make_target()
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="num_anchors"):
        DSparkTrainingArguments(output_dir=str(tmp_path), num_anchors=0)
    with pytest.raises(ValueError, match="loss_weight_tv"):
        DSparkTrainingArguments(output_dir=str(tmp_path), loss_weight_tv=-1)
    from transformers import TrainingArguments

    with pytest.raises(TypeError, match="DSparkTrainingArguments"):
        DSparkTrainer(drafter, TrainingArguments(output_dir=str(tmp_path), use_cpu=True), target=target)
    with pytest.raises(ValueError, match="hidden_size"):
        make_trainer(drafter, make_target(hidden_size=48), tmp_path)
    trainer = make_trainer(drafter, target, tmp_path)
    with pytest.raises(ValueError, match="assistant_masks"):
        trainer.compute_loss(drafter, {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    with pytest.raises(ValueError, match="DSparkTrainer"):
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, remove_unused_columns=False
        )
        collator = ConversationCollator()
        Trainer(drafter, args, train_dataset=text_rows(), data_collator=collator).train()


@pytest.mark.slow
def test_memory_of_a_step_does_not_hold_the_logits(tmp_path):
    """512 anchors at a vocabulary of 49,152 and block 7 against one anchor, each in a fresh process: the fp32 logits
    alone would be 0.7 GB a copy and a dozen copies are common; the whole difference stays under 1.5 GiB."""
    make_target(vocab_size=49152, hidden_size=64, max_position_embeddings=1024).save_pretrained(tmp_path)
    peaks = []
    for anchors in (1, 512):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "dspark.training.step_cost", "--target", str(tmp_path), "--memory"),
                *("--contexts", "768", "--batch-size", "1", "--anchors", str(anchors)),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (result,) = json.loads(done.stdout.splitlines()[-1])
        assert result["anchors"] == anchors
        peaks.append(result["peak_bytes"])
    assert peaks[1] - peaks[0] < 1.5 * 2**30


def test_killed_and_resumed(tmp_path):
    """`dspark train` killed without warning at a random moment goes on from its newest complete checkpoint."""
    from test_train import arguments

    command = [sys.executable, "-m", "dspark.training.train", *arguments(tmp_path, max_steps=40, save_steps=2)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "out"
    deadline = time.time() + 200
    while not (folder / "checkpoint-4").exists() and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "--resume" in again.stderr
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 40
    assert isinstance(DSparkModel.from_pretrained(folder), DSparkModel)
