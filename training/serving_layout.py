"""A drafter in DeepSpec's layout, which serving engines read: flat config, `Qwen3DSparkModel`, embedding and LM head.

Which engine reads what (vLLM 0.33, SGLang 0.5.23, llama.cpp's converter; from their code, none was run here):

                          vLLM           SGLang         llama.cpp
    Markov head           vanilla        all kinds      vanilla
    confidence head       if enabled     not in static  with Markov features
                          verification   mode
    temperatures (STS)    no             its own file   no
    reduced vocabulary    -              no             -        (so the layout always has the full one)
"""

import json
from pathlib import Path

import torch


STS_FILE = "confidence_temperatures.json"  # SGLang's `--speculative-dspark-confidence-sts-path`


def serving_config(drafter) -> dict:
    """DeepSpec's flat keys, written out in full so that no reader has to guess; built fresh, without the target's own
    keys."""
    c = drafter.config
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "sample_from_anchor": True,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": c.target_layer_ids},
    }
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
        *("rms_norm_eps", "rope_parameters", "attention_bias", "attention_dropout", "is_causal", "layer_types"),
        *("block_size", "num_target_layers", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type"),
        *("enable_confidence_head", "confidence_head_with_markov", "final_logit_softcapping"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    )
    config |= {key: getattr(c, key) for key in same}
    config["rope_theta"] = c.rope_parameters.get("rope_theta")
    return config


@torch.no_grad()
def serving_tensors(drafter, target=None) -> dict[str, torch.Tensor]:
    """DeepSpec's tensor names. A reduced vocabulary is spread over the full one, with no bias for ids outside it.

    Args:
        target: brings embedding and LM head; without it the file has none (vLLM and SGLang take the target's).
    """
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name != "d2t"}
    if drafter.config.draft_vocab_size is not None and drafter.markov_head is not None:
        reduced = tensors["markov_head.markov_w2.weight"]
        full = reduced.new_zeros(drafter.config.vocab_size, reduced.shape[1])
        full[drafter.kept_ids] = reduced
        tensors["markov_head.markov_w2.weight"] = full
    if target is not None and drafter.embed_tokens is None:
        embedding = target.get_input_embeddings()  # called, for a scale that lives in it
        ids = torch.arange(drafter.config.vocab_size, device=embedding.weight.device)
        tensors["embed_tokens.weight"] = embedding(ids)
        tensors["lm_head.weight"] = target.get_output_embeddings().weight
    rows = drafter.config.vocab_size
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:rows]
    return {name: tensor.detach().to("cpu", drafter.dtype).contiguous().clone() for name, tensor in tensors.items()}


def write_serving_layout(drafter, folder: Path, target=None) -> list[str]:
    """Write the layout and say what engines will not use.

    Args:
        target: see `serving_tensors`.

    Returns:
        Notes, a sentence each.

    Raises:
        ValueError: for a drafter the layout has no words for.
    """
    from safetensors.torch import save_file

    config = drafter.config
    if not config.use_qk_norm or config.mlp_bias or config.logit_scale != 1.0 or config.final_logit_softcapping:
        raise ValueError("the layout has QK-norm, no MLP bias, no logit scale and no soft-cap; this drafter differs.")
    if "sliding_attention" in config.layer_types:
        raise ValueError("the layout's readers make sliding layers causal; this drafter's blocks look both ways.")
    if target is not None and getattr(target.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("the target's LM head has a bias, which the layout cannot hold: use `--slim`.")
    if "dflash" in folder.name.lower():
        raise ValueError(
            f"`--output` {folder.name}: vLLM takes a name with 'dflash' for another method; choose another."
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(serving_tensors(drafter, target), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(serving_config(drafter), indent=2) + "\n", encoding="utf-8")
    notes = []
    if config.draft_vocab_size is not None:
        notes.append(
            f"The draft vocabulary of {config.draft_vocab_size} ids is spread over all {config.vocab_size}: engines "
            "draft from all of them, the sequential head is silent on the others."
        )
    if config.markov_rank == 0:
        notes.append(
            "Without a sequential head SGLang refuses the file, and llama.cpp needs `--spec-type draft-dspark`."
        )
    elif config.markov_head_type != "vanilla":
        notes.append(f"A {config.markov_head_type} head is read by SGLang only.")
    if not config.enable_confidence_head:
        notes.append("Without a confidence head engines verify whole blocks.")
    if config.confidence_temperatures:
        # SGLang takes one set; the regime nearest to temperature 1, the engines' usual one.
        regime = min(config.confidence_temperatures, key=lambda key: abs(float(key) - 1.0))
        values = {"temperatures": config.confidence_temperatures[regime]}
        (folder / STS_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")
        notes.append(f"The confidence temperatures are read by SGLang alone, from {STS_FILE}; others use raw ones.")
    notes.append("This project's schedules and cost table stay behind; each engine has its own.")
    return notes


def commands(folder: str, target: str, block_size: int) -> str:
    """How to serve it, for people."""
    settings = json.dumps({"method": "dspark", "model": folder, "num_speculative_tokens": block_size})
    return "\n".join(
        (
            "vLLM:",
            f"  vllm serve {target} --speculative-config '{settings}'",
            "SGLang:",
            f"  python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
            f"--speculative-draft-model-path {folder} --speculative-dspark-block-size {block_size}",
            "llama.cpp (folders on this machine, not Hub ids):",
            f"  python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile drafter.gguf",
            "  llama-server -m target.gguf -md drafter.gguf --spec-type draft-dspark",
        )
    )
