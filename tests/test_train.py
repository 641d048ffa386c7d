"""`dspark regenerate` and `dspark train`: data, masks, bad rows, settings, and the whole way on a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from test_readme import write_tokenizer
from transformers import AutoTokenizer

from dspark.evaluation import cli
from dspark.modeling_dspark import DSparkModel
from dspark.training import conversations, read_rows
from dspark.training import regenerate as regenerate_function
from dspark.training.conversations import encode
from dspark.training.data import Rows
from dspark.training.new_drafter import draft_vocabulary, new_drafter
from dspark.training.regenerate import lock
from dspark.training.train import newest_checkpoint


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A {% generation %}{{ m['content'] }}.{% endgeneration %}"
    "{% else %}U {{ m['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}A {% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "ok"},
]


def tiny(folder: Path, template: str | None = UNMARKED) -> Path:
    """A tiny target with its tokenizer, saved."""
    make_target(eos_token_id=2).save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = template
    for name in ("chat_template.jinja",):
        (folder / "target" / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder / "target")
    return folder / "target"


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments(folder: Path, **more) -> list[str]:
    """Arguments of `dspark train` for a tiny target with 24 rows made up."""
    target = tiny(folder)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "input_ids": torch.randint(3, 60, (24,), generator=generator).tolist(),
            "assistant_masks": [0] * 6 + [1] * 18,
        }
        for _ in range(24)
    ]
    values = {
        "target": target,
        "train_file": write_lines(folder / "rows.jsonl", rows),
        "output_dir": folder / "out",
        "num_hidden_layers": 1,
        "markov_rank": 4,
        "num_anchors": 4,
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 4,
        **more,
    }
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


# ---- masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "fallback"])
def test_mask(template, tmp_path):
    """The template's own mask, and the fallback for templates without marks: the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny(tmp_path, template))
    ids, mask = encode(tokenizer, TALK)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "U hi A yes.U no A ok."
    chosen = [i for i, m in zip(ids, mask) if m]
    assert "".join(tokenizer.convert_ids_to_tokens(chosen)) == "yes.ok."


def test_template_that_rewrites_earlier_turns(tmp_path):
    """Some templates drop earlier reasoning; such rows are refused, never masked wrongly."""
    rewriting = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny(tmp_path, rewriting))
    with pytest.raises(conversations.ConversationError, match="rewrites"):
        encode(tokenizer, TALK)


# ---- regenerate --------------------------------------------------------------------------------------------------


PROMPTS = [{"turns": [text]} for text in ("hello there", "a", "what is it?", "no", "seven of nine", "b c", "d e f")]


def test_regenerate_is_the_targets_text(tmp_path):
    """Every row is what the target says alone, whatever batch it was in; the mask is on its words."""
    folder = tiny(tmp_path)
    prompts = write_lines(tmp_path / "p.jsonl", PROMPTS)
    out = tmp_path / "out.jsonl"
    options = ["--target", str(folder), "--prompts", str(prompts), "--output", str(out), "--batch-size", "3"]
    assert cli.main(["regenerate", *options, "--max-new-tokens", "12", "--temperature", "0"]) == 0
    from transformers import AutoModelForCausalLM

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = rows_of(out)
    assert sorted(row["prompt"] for row in rows) == list(range(7))
    for row in rows:
        text = f"U {PROMPTS[row['prompt']]['turns'][0]} A "
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        alone = target.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=2)[0].tolist()
        assert row["input_ids"] == alone
        assert row["assistant_masks"] == [0] * prompt.shape[1] + [1] * (len(alone) - prompt.shape[1])
    usable = read_rows(out, tokenizer, 64, 200)
    assert len(usable) + sum(usable.skipped.counts.values()) == 7 and usable.supervised_tokens > 30


def test_regenerate_resumes_at_any_byte(tmp_path):
    """Cut anywhere, a second run completes the file: same rows, none twice."""
    folder = tiny(tmp_path)
    from transformers import AutoModelForCausalLM

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    out = tmp_path / "out.jsonl"
    settings = {"max_new_tokens": 6, "batch_size": 2, "temperature": 0.0, "progress": False}
    regenerate_function(target, tokenizer, PROMPTS, out, **settings)
    whole = out.read_bytes()
    expected = sorted(whole.splitlines())
    for cut in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:cut])
        counts = regenerate_function(target, tokenizer, PROMPTS, out, **settings)
        assert sorted(out.read_bytes().splitlines()) == expected
        assert counts["rows"] == 7
    with pytest.raises(ValueError, match="max_new_tokens"):
        regenerate_function(target, tokenizer, PROMPTS, out, **{**settings, "max_new_tokens": 7})


def test_regenerate_is_one_plain_answer_a_prompt(tmp_path):
    """Whatever a model's generation defaults ask for, and however long its neighbours in the batch are."""
    folder = tiny(tmp_path)
    from transformers import AutoModelForCausalLM

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [{"turns": ["a" * 36]}, {"turns": ["b"]}, {"turns": ["c d"]}]
    texts = []
    for batch_size, defaults in ((1, {}), (3, {"num_return_sequences": 2, "num_beams": 2, "max_time": 1e-9})):
        for name, value in defaults.items():
            setattr(target.generation_config, name, value)
        out = tmp_path / f"{batch_size}.jsonl"
        settings = {"max_new_tokens": 30, "max_length": 50, "temperature": 0.0, "progress": False}
        regenerate_function(target, tokenizer, prompts, out, batch_size=batch_size, **settings)
        texts.append(sorted(out.read_text().splitlines()))
    assert texts[0] == texts[1] and len(texts[0]) == 3
    with pytest.raises(ValueError, match="prompts"):
        regenerate_function(target, tokenizer, prompts[::-1], out, batch_size=3, **settings)
    with open(out, "a") as held:
        lock(held, out)
        with pytest.raises(ValueError, match="another run"):
            regenerate_function(target, tokenizer, prompts, out, batch_size=3, **settings)


def test_regenerate_turns_samples_and_limits(tmp_path):
    folder = tiny(tmp_path)
    from transformers import AutoModelForCausalLM

    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [{"turns": ["hi", "and"]}, {"turns": ["x" * 80]}, {"turns": ["ok"]}]
    out = tmp_path / "out.jsonl"
    counts = regenerate_function(
        target, tokenizer, prompts, out, max_new_tokens=5, max_length=40, temperature=1.0, samples=2, progress=False
    )
    assert counts["rows"] == 4 and counts["too_long"] == 2 and counts["process_seconds"] > 0
    by_prompt = {(row["prompt"], row["sample"]): row for row in rows_of(out)}
    assert set(by_prompt) == {(0, 0), (0, 1), (2, 0), (2, 1)}
    assert by_prompt[0, 0]["input_ids"] != by_prompt[0, 1]["input_ids"]
    roles = [message["role"] for message in by_prompt[0, 0]["messages"]]
    assert roles == ["user", "assistant"] * 2
    with pytest.raises(ValueError, match="samples"):
        regenerate_function(target, tokenizer, prompts, tmp_path / "g", temperature=0.0, samples=2)


def test_a_target_without_a_template(tmp_path, capsys):
    folder = tiny(tmp_path, None)
    prompts = write_lines(tmp_path / "p.jsonl", PROMPTS)
    options = ["--target", str(folder), "--prompts", str(prompts), "--output", str(tmp_path / "o.jsonl")]
    assert cli.main(["regenerate", *options]) == 1
    assert "--chat-template" in capsys.readouterr().err and not (tmp_path / "o.jsonl").exists()
    assert cli.main(["regenerate", *options, "--plain-text", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    row = rows_of(tmp_path / "o.jsonl")[0]
    assert sum(row["assistant_masks"]) >= 1
    (tmp_path / "t.jinja").write_text(UNMARKED)
    options[-1] = str(tmp_path / "p2.jsonl")
    assert (
        cli.main(["regenerate", *options, "--chat-template", str(tmp_path / "t.jinja"), "--max-new-tokens", "4"]) == 0
    )


def test_prompts_of_datasets():
    from dspark.training.prompts import load_prompts, user_turns

    assert user_turns({"prompt": "x"}) == ["x"]
    assert user_turns({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}) == ["q"]
    assert user_turns({"messages": TALK}) == ["hi", "no"]
    assert user_turns({"body": "x"}) is None and user_turns({"body": "x"}, "body") == ["x"]
    with pytest.raises(ValueError, match="no such file"):
        load_prompts("missing.jsonl")


# ---- rows --------------------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_and_named(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny(tmp_path))
    good = {"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 1, 1, 1]}
    lines = [
        good,
        "{broken",
        {"messages": TALK},
        {"messages": TALK[:1]},
        {**good, "assistant_masks": [0, 0, 0, 0]},
        {"input_ids": [5, 64, 7, 8], "assistant_masks": [0, 1, 1, 1]},
        {"input_ids": [5] * 50, "assistant_masks": [1] * 50},
        {"input_ids": [5, 6], "assistant_masks": [1]},
        {"text": "x"},
        [1, 2],
        "",
        {"messages": [{"role": "user"}]},
    ]
    rows = read_rows(write_lines(tmp_path / "rows.jsonl", lines), tokenizer, 64, 40)
    assert len(rows) == 2 and sum(rows.skipped.counts.values()) == 9
    text = str(rows.skipped)
    for reason in ("not JSON (rows.jsonl:2)", "no assistant turn (rows.jsonl:4", "another vocabulary (rows.jsonl:6)"):
        assert reason in text
    assert "longer than the limit of 40 tokens (rows.jsonl:7)" in text and "2 rows: neither" in text
    with pytest.raises(ValueError, match="no usable row.*not JSON"):
        read_rows(write_lines(tmp_path / "bad.jsonl", ["{"]), tokenizer, 64, 40)
    with pytest.raises(ValueError, match="no such file"):
        read_rows(tmp_path / "none.jsonl", tokenizer, 64, 40)


def test_split_is_disjoint():
    rows = Rows([([i, i, i], [1, 1, 1]) for i in range(20)])
    rest, held = rows.split(0.25)
    ids = [{int(row["input_ids"][0]) for row in part} for part in (rest, held)]
    assert len(ids[0]) == 15 and len(ids[1]) == 5 and not ids[0] & ids[1]


# ---- new drafters ------------------------------------------------------------------------------------------------


def test_warm_start_and_vocabulary():
    target = make_target("qwen3", num_hidden_layers=6, eos_token_id=63)
    counts = torch.zeros(64, dtype=torch.long)
    counts[[9, 20, 31]] = torch.tensor([5, 9, 1])
    drafter = new_drafter(target, num_hidden_layers=2, draft_vocab_size=6, token_counts=counts)
    assert drafter.kept_ids.tolist() == [0, 1, 9, 20, 31, 63]  # the frequent, the end of text, the lowest others
    ours, theirs = drafter.layers[0].self_attn.q_norm.weight, target.model.layers[4].self_attn.q_norm.weight
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, target.model.layers[4].mlp.up_proj.weight)
    torch.testing.assert_close(ours, theirs)
    assert ours.data_ptr() != theirs.data_ptr()
    cold = new_drafter(target, num_hidden_layers=2, warm_start=False)
    assert not torch.equal(cold.layers[0].mlp.up_proj.weight, target.model.layers[4].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="token_counts"):
        new_drafter(target, draft_vocab_size=6)
    offsets = draft_vocabulary(counts, drafter.config, {63})
    assert (offsets + torch.arange(6)).tolist() == drafter.kept_ids.tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_neox"])
def test_warm_start_takes_norms_by_what_they_do(kind):
    """Gemma multiplies by `1 + w` and has another norm before its MLP; a layer norm is no RMS norm."""
    target = make_target(kind, num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    drafter = new_drafter(target, num_hidden_layers=2)
    states = torch.randn(1, 5, 32)
    layer = target.get_decoder().layers[2] if kind != "gpt_neox" else target.gpt_neox.layers[2]
    before_mlp = "pre_feedforward_layernorm" if kind.startswith("gemma") else "post_attention_layernorm"
    pairs = {"input_layernorm": "input_layernorm", "post_attention_layernorm": before_mlp}
    for ours, theirs in pairs.items():
        module = getattr(drafter.layers[0], ours)
        if kind == "gpt_neox":
            assert torch.equal(module.weight, torch.ones(32))
        else:
            torch.testing.assert_close(module(states), getattr(layer, theirs)(states), atol=1e-4, rtol=1e-3)


def test_more_layers_than_the_target():
    target = make_target(num_hidden_layers=2)
    drafter = new_drafter(target, num_hidden_layers=3, target_layer_ids=[0])
    assert torch.equal(drafter.layers[2].mlp.up_proj.weight, target.model.layers[1].mlp.up_proj.weight)


# ---- the command -------------------------------------------------------------------------------------------------


def test_flags_and_yaml_are_the_same(tmp_path, capsys):
    flags = arguments(tmp_path, max_steps=2)
    assert cli.main(["train", *flags]) == 0
    first = DSparkModel.from_pretrained(tmp_path / "out")
    values = dict(zip([flag[2:] for flag in flags[::2]], flags[1::2]))
    values["output_dir"] = str(tmp_path / "again")
    values["train_file"] = f"[{values['train_file']}]"
    values["learning_rate"] = "5e-5"  # text to YAML; the default
    (tmp_path / "c.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    assert cli.main(["train", str(tmp_path / "c.yaml")]) == 0
    second = DSparkModel.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text() + "num_ankers: 4\n")
    assert cli.main(["train", str(tmp_path / "c.yaml")]) == 1
    assert "c.yaml" in capsys.readouterr().err
    assert first.config.target_fingerprint == second.config.target_fingerprint is not None


def test_evaluation_and_best_model(tmp_path):
    flags = arguments(
        tmp_path,
        max_steps=4,
        eval_fraction=0.2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accepted_length",
        greater_is_better=True,
    )
    assert cli.main(["train", *flags]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["best_metric"] > 1
    assert any("process_seconds" in entry for entry in state["log_history"])


def test_second_run_asks(tmp_path, capsys):
    flags = arguments(tmp_path, max_steps=2, save_steps=2)
    assert cli.main(["train", *flags, "--resume"]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err
    assert cli.main(["train", *flags]) == 0
    assert cli.main(["train", *flags]) == 1
    assert "--resume" in capsys.readouterr().err
    (tmp_path / "out" / "checkpoint-9").mkdir()  # what a killed run leaves
    assert cli.main(["train", *flags, "--resume"]) == 0


def test_resume_of_a_run_killed_behind_its_last_step(tmp_path):
    """All steps taken, the drafter not yet saved: it is saved, no step is added."""
    flags = arguments(tmp_path, max_steps=4, save_steps=2)
    assert cli.main(["train", *flags]) == 0
    out = tmp_path / "out"
    before = (out / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "config.json", "trainer_state.json"):
        (out / name).unlink()
    assert cli.main(["train", *flags, "--resume"]) == 0
    assert (out / "model.safetensors").read_bytes() == before
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 4


def test_resume_of_another_run_is_refused(tmp_path, capsys):
    """Settings that would make something else of the weights, other data, damaged checkpoints."""
    flags = arguments(tmp_path, max_steps=4, save_steps=2)
    assert cli.main(["train", *flags]) == 0
    out = tmp_path / "out"
    for more, name in (
        (["--block_size", "4"], "block_size"),
        (["--mask_token_id", "5"], "mask_token_id"),
        (["--num_anchors", "2"], "num_anchors"),
        (["--train_file", str(write_lines(tmp_path / "x.jsonl", rows_of(tmp_path / "rows.jsonl")[:20]))], "rows"),
    ):
        assert cli.main(["train", *flags, *more, "--resume"]) == 1
        assert name in capsys.readouterr().err
    (out / "checkpoint-4" / "model.safetensors").write_bytes(b"cut")
    assert newest_checkpoint(out) == out / "checkpoint-2"
    (out / "checkpoint-2" / "optimizer.pt").unlink()
    assert newest_checkpoint(out) is None
    assert cli.main(["train", *flags, "--resume"]) == 1 and "no complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"train_file": "nowhere.jsonl"}, "no such file"),
        ({"eval_strategy": "steps"}, "--eval_file"),
        ({"num_anchors": 0}, "num_anchors"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"target_dtype": "float8"}, "target_dtype"),
        ({"target_layer_ids": 9}, "target_layer_ids"),
    ],
)
def test_bad_settings(more, message, tmp_path, capsys):
    assert cli.main(["train", *arguments(tmp_path, max_steps=1, **more)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()
