"""The README's Python blocks run as they stand, in order, with tiny models in place of the names it uses."""

import json
import re
from pathlib import Path

import torch
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.evaluation import cli


README = Path(__file__).parent.parent / "README.md"
NAMES = {"org/target-DSpark": "drafter", "org/target": "target"}  # longest first


def write_tokenizer(folder: Path) -> None:
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .?!0123456789"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[:63])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}. {% endif %}"
    )
    fast.save_pretrained(folder)


def test_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    write_tokenizer(tmp_path / "target")
    make_drafter(target, confidence_temperatures={"0.0": [0.2] * 7}).save_pretrained(tmp_path / "drafter")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 5
    scope: dict = {}
    for block in blocks:
        for name, folder in NAMES.items():
            block = block.replace(f'"{name}"', repr(str(tmp_path / folder)))
        exec(compile(block, str(README), "exec"), scope)
    assert "rounds drafted" in capsys.readouterr().out
    assert scope["drafter"].statistics.drafted > 0
    plain = scope["target"].generate(**scope["inputs"], do_sample=False, max_length=scope["out"].shape[1])
    assert torch.equal(scope["out"], plain[:, : scope["out"].shape[1]])


def test_every_command_it_names_is_one():
    named = set(re.findall(r"(?:`|^)dspark ([a-z]+)", README.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"load", "serve", "benchmark"} <= named <= set(cli.COMMANDS)


def test_training_section_runs(tmp_path, monkeypatch, capsys):
    """Its commands in order, as they stand, with a tiny target and settings to match: from prompts to a published
    drafter that `generate` takes."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    target = make_target()
    target.save_pretrained("target")
    write_tokenizer(tmp_path / "target")
    letters = "abcdefghijklmnopqrstuvwxyz"
    for name, count in (("prompts", 24), ("held_out", 30)):
        turns = [letters[i % 20 : i % 20 + 3 + i // 20] for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    section = README.read_text(encoding="utf-8").split("## Train one for your model tonight")[1]
    block = re.search(r"```bash\n(.*?)```", section, flags=re.DOTALL).group(1).replace("\\\n", " ")
    more = {
        "regenerate": ["--max-new-tokens", "40"],
        "train": ["--use_cpu", "--report_to", "none", "--num_hidden_layers", "1", "--markov_rank", "4"],
        "calibrate": ["--max-new-tokens", "80"],
        "benchmark": ["--max-new-tokens", "8", "--num-prompts", "2", "--force"],
    }
    ran = []
    for line in block.splitlines():
        program, command, *options = line.split("    #")[0].split()
        if program == "dspark":
            options = [option.replace("org/target", "target") for option in options] + more.get(command, [])
            assert cli.main([command, *options]) == 0, capsys.readouterr().err
            ran.append(command)
    assert ran == ["regenerate", "train", "calibrate", "publish", "benchmark"]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["fixed"]["drafted"] > 0 and result["same_text"] == 2
    card = Path("target-DSpark/README.md").read_text()
    assert "calibrated for sampling temperatures 0.0, 1.0" in card and "tokens a round" in card


def test_two_commands_exist():
    text = README.read_text(encoding="utf-8")
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
