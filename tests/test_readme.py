"""The README's Python blocks run as they stand, in order, with tiny models in place of the names it uses."""

import re
from pathlib import Path

import torch
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


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


def test_two_commands_exist():
    text = README.read_text(encoding="utf-8")
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
