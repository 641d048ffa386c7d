"""`dspark publish`: the Hub repo, its card, and the layout serving engines read."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FLAT_COSTS, config, make_drafter, make_target, plain
from test_train import tiny

from dspark.evaluation import cli
from dspark.modeling_dspark import DSparkModel
from dspark.training import publish as publish_function
from dspark.training import serving_layout
from dspark.training.publish import MARK, push


@pytest.fixture
def trained(tmp_path):
    """A drafter's folder as training leaves it, calibrated."""
    target = make_target()
    drafter = make_drafter(target, confidence_temperatures={"0.0": [0.5] * 7, "1.0": [1.5] * 7})
    folder = tmp_path / "trained"
    drafter.save_pretrained(folder)
    (folder / "checkpoint-5").mkdir()
    for name in ("optimizer.pt", "training_args.bin", "cost_table_1.json"):
        (folder / name).write_text("x")
    history = [{"eval_accepted_length": 3.21, **{f"eval_acceptance_{k}": 0.5 for k in range(1, 8)}}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    report = {"0.0": {"mean_ece_before": 0.08, "mean_ece_after": 0.012}}
    (folder / "calibration.json").write_text(json.dumps(report))
    return folder


def test_repo_is_complete_and_nothing_else(trained, tmp_path):
    out = publish_function(trained, tmp_path / "My-DSpark", license="apache-2.0", target_name="org/target")
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    code = {name for name in names if name.endswith("_dspark.py")}
    others = {"README.md", "calibration.json", "config.json", "model.safetensors"}
    assert names == code | others | {os.path.join("custom_generate", "generate.py")} and len(code) > 10
    card = (out / "README.md").read_text()
    for text in (
        "base_model: org/target",
        "license: apache-2.0",
        "# My-DSpark",
        "3.21 tokens",
        "8.0% to 1.2%",
        "7 slots",
    ):
        assert text in card
    assert "$" not in card and "calibrated for sampling temperatures 0.0, 1.0" in card
    code = (
        "import torch; from transformers import AutoModel; "
        f"d = AutoModel.from_pretrained({str(out)!r}, trust_remote_code=True, dtype='auto'); "
        "print(type(d).__name__, d.dtype, d.config.confidence_temperatures['1.0'][0])"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["DSparkModel", "torch.bfloat16", "1.5"], done.stderr[-2000:]


def test_own_words_stay(trained, tmp_path):
    out = publish_function(trained, tmp_path / "repo")
    assert "# repo" in (out / "README.md").read_text()
    publish_function(trained, out, name="Renamed")
    assert "# Renamed" in (out / "README.md").read_text()
    (out / "README.md").write_text((out / "README.md").read_text().replace(MARK, "") + "Mine.")
    publish_function(trained, out, name="Again")
    assert (out / "README.md").read_text().endswith("Mine.")


def test_refusals(trained, tmp_path, capsys):
    assert cli.main(["publish", "--drafter", str(trained), "--output", str(trained)]) == 1
    assert "own folder" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    assert cli.main(["publish", "--drafter", str(trained), "--output", str(tmp_path / "full")]) == 1
    assert "not empty" in capsys.readouterr().err
    target = tiny(tmp_path)
    for layout in ("hub", "deepspec"):
        for precious in (target, trained):
            before = (precious / "model.safetensors").read_bytes()
            options = [
                "--drafter",
                str(trained),
                "--output",
                str(precious),
                "--layout",
                layout,
                "--target",
                str(target),
            ]
            assert cli.main(["publish", *options]) == 1 and "give another" in capsys.readouterr().err
            assert (precious / "model.safetensors").read_bytes() == before
    assert cli.main(["publish", "--drafter", str(tmp_path / "none"), "--output", str(tmp_path / "o")]) == 1


def test_push(trained, tmp_path, monkeypatch):
    calls = []
    api = SimpleNamespace(
        create_repo=lambda repo, **kwargs: calls.append((repo, kwargs)),
        upload_folder=lambda **kwargs: calls.append(kwargs) or "https://hub/org/x",
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    out = publish_function(trained, tmp_path / "repo")
    assert push(out, "org/x", private=True) == "https://hub/org/x"
    assert calls[0] == ("org/x", {"private": True, "exist_ok": True}) and calls[1]["folder_path"] == out

    def offline(*args, **kwargs):
        raise OSError("no network")

    api.create_repo = offline
    with pytest.raises(ValueError, match="hf auth login"):
        push(out, "org/x")


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "gated"])
def test_serving_layout_drafts_the_same(kind, tmp_path, prompt):
    """Read back as a DeepSpec checkpoint it drafts what the drafter drafts, round for round."""
    target = make_target()
    drafter = make_drafter(target, markov_head_type=kind)
    notes = serving_layout.write_serving_layout(drafter, tmp_path / "serving", target)
    assert any("SGLang only" in note for note in notes) == (kind != "vanilla")
    read = DSparkModel.from_pretrained(tmp_path / "serving")
    read.cost_table = FLAT_COSTS
    logs = []
    for one in (drafter, read):
        settings = config(max_new_tokens=40, dspark_schedule="fixed", dspark_log=True)
        out = target.generate(prompt, assistant_model=one, generation_config=settings)
        assert torch.equal(out, plain(target, prompt, max_new_tokens=40)) and one.statistics.drafted > 0
        logs.append([row[:2] for row in one.statistics.log])
    assert logs[0] == logs[1]
    values = json.loads((tmp_path / "serving" / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"] and values["model_type"] == "qwen3"
    assert values["dflash_config"] == {"mask_token_id": values["mask_token_id"], "target_layer_ids": [0, 2]}
    assert values["sample_from_anchor"] is True and values["tie_word_embeddings"] is False


def test_serving_layout_of_a_reduced_vocabulary(tmp_path, prompt):
    """Kept ids keep their logits; the others have the base logits alone."""
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=20)
    kept = torch.arange(3, 43, 2)
    drafter.d2t.copy_(kept - torch.arange(20))
    notes = serving_layout.write_serving_layout(drafter, tmp_path / "serving", target)
    assert any("spread over all 64" in note for note in notes)
    read = DSparkModel.from_pretrained(tmp_path / "serving")
    assert read.kept_ids is None and "d2t" not in dict(read.named_buffers())
    w2 = read.markov_head.markov_w2.weight
    torch.testing.assert_close(w2[kept], drafter.markov_head.markov_w2.weight)
    assert (w2.abs().sum(dim=1) == 0).sum() == 44
    read.cost_table = FLAT_COSTS
    out = target.generate(prompt, assistant_model=read, generation_config=config(max_new_tokens=20))
    assert torch.equal(out, plain(target, prompt, max_new_tokens=20)) and read.statistics.drafted > 0


def test_serving_layout_refuses_what_it_cannot_hold(tmp_path):
    target = make_target()
    for shape in ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, {"final_logit_softcapping": 3.0}):
        with pytest.raises(ValueError, match="layout"):
            serving_layout.write_serving_layout(make_drafter(target, **shape), tmp_path / "s", target)
    scaled = make_target("gemma3_text")
    tensors = serving_layout.serving_tensors(make_drafter(scaled), scaled)
    ids = torch.arange(64)
    torch.testing.assert_close(tensors["embed_tokens.weight"], scaled.get_input_embeddings()(ids))


def test_serving_command(trained, tmp_path, capsys):
    target = tiny(tmp_path)
    options = ["--drafter", str(trained), "--layout", "deepspec", "--target", str(target)]
    assert cli.main(["publish", *options, "--output", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    for text in ("vllm serve", "sglang.launch_server", "convert_hf_to_gguf.py", "confidence temperatures"):
        assert text in out
    assert json.loads((tmp_path / "s" / serving_layout.STS_FILE).read_text()) == {"temperatures": [1.5] * 7}
    from safetensors.torch import load_file

    assert {"embed_tokens.weight", "lm_head.weight"} <= set(load_file(tmp_path / "s" / "model.safetensors"))
    assert cli.main(["publish", *options, "--slim", "--output", str(tmp_path / "t")]) == 0
    assert "lm_head.weight" not in load_file(tmp_path / "t" / "model.safetensors")
    assert cli.main(["publish", *options, "--output", str(tmp_path / "my-dflash")]) == 1
