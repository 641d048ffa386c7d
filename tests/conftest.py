"""Tiny random targets in fp32 and drafters whose tokens and confidences are scripted."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from threads, and several test runs on one machine lose a lot by them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dspark.candidate_generator import CostTable
from dspark.modeling_dspark import DSparkConfig, DSparkModel
from dspark.modeling_dspark.target_dspark import TargetLink


VOCAB = 64
# Verification of a few more tokens is nearly free, drafting cheap: what a GPU at batch 1 looks like.
FLAT_COSTS = CostTable.from_costs({1: 1.0, 16: 1.1}, draft=0.1)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
TARGETS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None},
}


def make_target(kind: str = "llama", seed: int = 0, spread: float = 3.0, **overrides) -> torch.nn.Module:
    """A random causal LM, its weights scaled up by `spread`: greedy text is neither constant nor chaotic then."""
    values = {k: v for k, v in {**COMMON, **TARGETS.get(kind, {}), **overrides}.items() if v is not None}
    torch.manual_seed(seed)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(spread)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target


# Seed and spread whose greedy text behind `prompt` repeats least: a drafter that is a position off is wrong there.
LIVELY = {
    "llama": (5, 6.0),
    "qwen3": (1, 6.0),
    "gemma3_text": (5, 4.0),
    "mistral": (6, 2.0),
    "phi3": (3, 2.0),
    "gpt_neox": (7, 2.0),
}


def lively_target(kind: str = "llama", **overrides) -> torch.nn.Module:
    seed, spread = LIVELY[kind]
    return make_target(kind, seed, spread, **overrides)


def make_drafter(target, seed: int = 1, cls=DSparkModel, cost_table: CostTable = FLAT_COSTS, **overrides):
    """A random drafter for a target, with a hand-written cost table so that no test profiles the machine."""
    values = {"num_hidden_layers": 2, "target_layer_ids": [0, 2], "markov_rank": 8, "initializer_range": 0.2}
    torch.manual_seed(seed)
    drafter = cls(DSparkConfig.from_target(target.config, **{**values, **overrides})).eval()
    drafter.cost_table = cost_table
    return drafter


class ScriptedLink(TargetLink):
    """Base logits that name the script's token at every slot."""

    def base_logits(self, drafter, hidden):
        logits = torch.zeros(*hidden.shape[:2], drafter.config.output_vocab_size, device=hidden.device)
        for slot, position in enumerate(drafter.block_positions):
            logits[:, slot, drafter.script(position + 1)] = 50.0
        return logits


class ScriptedDrafter(DSparkModel):
    """A drafter that runs its real backbone and then drafts `script(position)`, with confidence `confidence(slot)`.

    The sequential head adds nothing (its output weights are zero).
    """

    script = staticmethod(lambda position: 0)
    confidence = staticmethod(lambda slot: 0.9)

    def __init__(self, config):
        super().__init__(config)
        with torch.no_grad():
            self.markov_head.markov_w2.weight.zero_()
        outer = self

        class Confidence(torch.nn.Module):
            def forward(self, hidden, embedding):
                slot = outer.confidence_slot % outer.confidence_slots
                outer.confidence_slot += 1
                return (
                    torch.logit(torch.tensor([outer.confidence(slot)], dtype=torch.float64)).float().to(hidden.device)
                )

        self.confidence_head = Confidence()

    def forward(self, block_embeds, context_features=None, position_ids=None, **kwargs):
        self.block_positions = position_ids[0].tolist() if position_ids is not None else range(block_embeds.shape[1])
        self.confidence_slot, self.confidence_slots = 0, block_embeds.shape[1]
        return super().forward(block_embeds, context_features, position_ids=position_ids, **kwargs)

    def link(self, target):
        if target not in self._runtime.links:
            self._runtime.links[target] = ScriptedLink(self, target)
        return self._runtime.links[target]


def plain(target, prompt, **kwargs):
    """Plain decoding with the same arguments."""
    return target.generate(prompt, **{"do_sample": False, **kwargs})


def scripted(target, prompt, kind: str, tokens: int = 128, **overrides) -> ScriptedDrafter:
    """A scripted drafter for one prompt of a target.

    Args:
        kind: `"oracle"` drafts the target's greedy text, `"never"` something else everywhere, `"alternating"` is right
            at even positions.
    """
    text = plain(target, prompt, max_new_tokens=tokens, eos_token_id=None)[0].tolist()
    padding = 0 if prompt.shape[1] == len(text) - tokens else None
    assert padding == 0, "the target stopped early"
    return following(target, text, kind, **overrides)


def following(target, text: list[int], kind: str = "oracle", shift: int = 0, **overrides) -> ScriptedDrafter:
    """A scripted drafter for a text that is known, kinds as in `scripted`.

    Args:
        shift: position of `text[0]`.
    """
    drafter = make_drafter(target, cls=ScriptedDrafter, **overrides)

    def right(position):
        return text[min(position - shift, len(text) - 1)]

    def wrong(position):
        return (right(position) + 1) % VOCAB

    drafter.script = {
        "oracle": right,
        "never": wrong,
        "alternating": lambda position: right(position) if position % 2 == 0 else wrong(position),
    }[kind]
    return drafter


def with_lora(target, modules: list[str], seed: int = 0):
    """The target with adapters that change what it says, as a `PeftModel`."""
    torch.manual_seed(seed)
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(target, LoraConfig(r=4, target_modules=modules, init_lora_weights=False)).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.mul_(2.0)
    return wrapped


def config(**kwargs) -> GenerationConfig:
    """A greedy generation config; unknown keys such as `dspark_schedule` pass."""
    return GenerationConfig(**{"do_sample": False, "pad_token_id": 0, **kwargs})


@pytest.fixture(autouse=True)
def _no_cost_table_on_disk(tmp_path, monkeypatch):
    """A test that profiles does not leave a table in the user's cache."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "dspark-cache"))


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
