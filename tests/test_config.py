"""`DSparkConfig`: what it refuses, what it takes over from a target, which files of other projects it reads."""

import json

import pytest
from conftest import COMMON
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from dspark.modeling_dspark import DSparkConfig
from dspark.modeling_dspark.configuration_dspark import default_target_layer_ids, find_mask_token_id


REFUSED = [
    ("block_size", {"block_size": 0}),
    ("num_hidden_layers", {"num_hidden_layers": 0}),
    ("num_target_layers", {"num_target_layers": 0}),
    ("vocab_size", {"vocab_size": 0}),
    ("hidden_size", {"hidden_size": 0}),
    ("head_dim", {"head_dim": 0}),
    ("head_dim", {"head_dim": 7}),
    ("block_size", {"block_size": "7"}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("num_key_value_heads", {"num_key_value_heads": 0}),
    ("num_key_value_heads", {"num_key_value_heads": 5}),
    ("sample_from_anchor", {"sample_from_anchor": False}),
    ("markov_rank", {"markov_rank": -1}),
    ("markov_head_type", {"markov_head_type": "lstm"}),
    ("schedule", {"schedule": "always"}),
    ("schedule_threshold", {"schedule_threshold": 1.5}),
    ("draft_vocab_size", {"draft_vocab_size": 0}),
    ("draft_vocab_size", {"vocab_size": 100, "draft_vocab_size": 101}),
    ("mask_token_id", {"mask_token_id": -1}),
    ("mask_token_id", {"vocab_size": 100, "mask_token_id": 100}),
    ("target_layer_ids", {"target_layer_ids": []}),
    ("target_layer_ids", {"target_layer_ids": [3, 3]}),
    ("target_layer_ids", {"target_layer_ids": [3, 1]}),
    ("target_layer_ids", {"target_layer_ids": [-2, 1]}),
    ("target_layer_ids", {"num_target_layers": 8, "target_layer_ids": [1, 7]}),
    ("layer_types", {"layer_types": ["full_attention"]}),
    ("layer_types", {"layer_types": ["linear_attention"] * 5}),
    ("sliding_window", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ("confidence_temperatures", {"confidence_temperatures": {"greedy": [1.0] * 7}}),
    ("confidence_temperatures", {"confidence_temperatures": {"0.0": [1.0] * 6}}),
    ("confidence_temperatures", {"confidence_temperatures": {"0.0": [1.0] * 6 + [0.0]}}),
]


@pytest.mark.parametrize(("key", "values"), REFUSED, ids=[f"{i}-{key}" for i, (key, _) in enumerate(REFUSED)])
def test_refused_values_name_their_key(key, values):
    with pytest.raises(ValueError, match=f"`{key}`"):
        DSparkConfig(**values)


def test_values_at_the_edge_are_taken():
    DSparkConfig(num_target_layers=8, target_layer_ids=[-1, 6])
    assert DSparkConfig(vocab_size=10, mask_token_id=9, draft_vocab_size=1).output_vocab_size == 1
    assert DSparkConfig(vocab_size=10, draft_vocab_size=10).draft_vocab_size is None  # all ids: no reduced vocabulary
    assert DSparkConfig(num_attention_heads=4, hidden_size=32).num_key_value_heads == 4


def test_rank_zero_has_a_confidence_head_without_markov_features():
    config = DSparkConfig(markov_rank=0, confidence_head_with_markov=True, hidden_size=64)
    assert config.confidence_input_size == 64
    assert DSparkConfig(markov_rank=8, hidden_size=64).confidence_input_size == 72


def test_save_and_load_keeps_every_value(tmp_path):
    config = DSparkConfig(
        target_layer_ids=[0, 1], num_target_layers=9, confidence_temperatures={"0.0": [1.5] * 3}, block_size=3,
        target_name_or_path="org/target", target_revision="abc", schedule="threshold", schedule_threshold=0.3,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


def test_default_taps():
    assert default_target_layer_ids(36) == [1, 9, 17, 25, 33]  # DeepSpec's, for Qwen3-4B and 8B
    assert default_target_layer_ids(40) == [1, 10, 19, 28, 37]
    for layers in range(1, 100):
        ids = DSparkConfig(num_target_layers=layers).target_layer_ids  # every default passes the checks
        if layers > 7:  # five, each at most half a layer off an even spread from layer 1 to the third last
            assert len(ids) == 5 and all(abs(1 + i * (layers - 4) / 4 - at) <= 0.5 for i, at in enumerate(ids))


FAMILIES = {
    "llama": ({}, {"logit_scale": 1.0, "final_logit_softcapping": None}),
    "qwen3": ({"head_dim": 16}, {"head_dim": 16}),
    "gemma2": ({"head_dim": 8, "final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
    "mistral": ({"sliding_window": 8}, {"sliding_window": None}),  # the draft layers see everything by default
    "phi3": ({}, {}),
    "cohere": ({"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "granite": ({"logits_scaling": 8.0}, {"logit_scale": 0.125}),
    "gpt_neox": ({"num_key_value_heads": None, "rotary_pct": 0.25}, {"num_key_value_heads": 4}),
    "gpt2": ({"num_key_value_heads": None, "intermediate_size": None}, {"intermediate_size": 4 * 32}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_from_target(kind):
    overrides, expected = FAMILIES[kind]
    target = AutoConfig.for_model(
        kind, **{k: v for k, v in {**COMMON, "eos_token_id": [7, 9], **overrides}.items() if v is not None}
    )
    config = DSparkConfig.from_target(target, num_hidden_layers=3, block_size=5)
    same = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_target_layers": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [7, 9]}
    for key, value in {**same, **ends, "num_hidden_layers": 3, "block_size": 5, **expected}.items():
        assert getattr(config, key) == value, key
    assert config.mask_token_id == 63 and not config.tie_word_embeddings
    # A drafter rotates its whole head, whatever part of it the target rotates.
    assert "partial_rotary_factor" not in config.rope_parameters


def test_from_target_takes_the_callers_word_first():
    target = AutoConfig.for_model("llama", **COMMON)
    config = DSparkConfig.from_target(target, hidden_act="gelu", mask_token_id=5, target_layer_ids=[0], markov_rank=0)
    assert (config.hidden_act, config.mask_token_id, config.target_layer_ids, config.markov_rank) == (
        "gelu",
        5,
        [0],
        0,
    )


def test_from_a_multimodal_target_reads_the_text_part():
    text = {**COMMON, "head_dim": 16, "num_hidden_layers": 6, "rope_theta": 5e5}
    target = AutoConfig.for_model("gemma3", text_config=text, eos_token_id=7)
    config = DSparkConfig.from_target(target)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers, config.head_dim) == (32, 64, 6, 16)
    assert config.eos_token_id == 7
    # Gemma 3 nests one entry per layer type; the draft layers are full attention.
    assert (
        config.rope_parameters["rope_theta"]
        == target.get_text_config().rope_parameters["full_attention"]["rope_theta"]
    )
    assert "sliding_attention" not in config.rope_parameters


def test_rope_scaling_is_taken_over_where_it_fits():
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    target = AutoConfig.for_model("llama", **COMMON, rope_parameters=dict(scaled))
    assert DSparkConfig.from_target(target).rope_parameters == scaled
    # Factors of `longrope` are lists of the target's head size, so only its base frequency is kept.
    long = {"rope_type": "longrope", "rope_theta": 7e5, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long |= {"original_max_position_embeddings": 64}
    target = AutoConfig.for_model("phi3", **COMMON, original_max_position_embeddings=64, rope_parameters=long)
    assert DSparkConfig.from_target(target).rope_parameters == {"rope_type": "default", "rope_theta": 7e5}


def tokenizer_of(tokens: list[str], special: list[str] = (), **named) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **named)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


class TestMaskToken:
    """The mask token is a row of the embedding that no text uses."""

    words = ["<unk>", "<s>", "a", "b", "<|reserved_1|>", "<|mask|>", "c", "<|im_end|>"]
    special = ["<|reserved_1|>", "<|mask|>", "<|im_end|>"]

    def test_padding_rows_of_the_embedding_come_first(self):
        assert find_mask_token_id(tokenizer_of(self.words, self.special), 16) == 15
        assert find_mask_token_id(None, 16) == 15

    def test_then_a_reserved_special_token(self):
        assert find_mask_token_id(tokenizer_of(self.words, self.special), len(self.words)) == 5
        assert find_mask_token_id(tokenizer_of(self.words, ["<|reserved_1|>", "<|im_end|>"]), len(self.words)) == 4

    def test_never_one_in_use(self):
        tokenizer = tokenizer_of(self.words, ["<|mask|>", "<|reserved_1|>"], pad_token="<|mask|>")
        assert find_mask_token_id(tokenizer, len(self.words)) == 4

    def test_none_left_is_an_error_with_the_remedy(self):
        with pytest.raises(ValueError, match="mask_token_id="):
            find_mask_token_id(tokenizer_of(self.words, ["<|im_end|>"]), len(self.words))

    def test_from_target_uses_it(self):
        target = AutoConfig.for_model("llama", **{**COMMON, "vocab_size": len(self.words)})
        assert DSparkConfig.from_target(target, tokenizer=tokenizer_of(self.words, self.special)).mask_token_id == 5


class TestForeignFiles:
    """`from_pretrained` reads DeepSpec's Qwen3-style config and refuses what is no drafter."""

    deepspec = {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "vocab_size": 50, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "block_size": 5,
        "target_layer_ids": [0, 2], "num_target_layers": 6, "mask_token_id": 49, "markov_rank": 4,
        "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": False,
        "tie_word_embeddings": True, "sliding_window": 16, "layer_types": ["full_attention"] * 36,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": [3, 4],
    }  # fmt: skip

    def load(self, tmp_path, **changes):
        content = {k: v for k, v in {**self.deepspec, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return DSparkConfig.from_pretrained(tmp_path)

    def test_deepspec(self, tmp_path):
        config = self.load(tmp_path)
        for key in (
            "vocab_size",
            "block_size",
            "target_layer_ids",
            "mask_token_id",
            "markov_head_type",
            "eos_token_id",
        ):
            assert getattr(config, key) == self.deepspec[key], key
        assert config.rope_parameters["rope_theta"] == 1e6
        assert config.own_embeddings
        # Left over from the target's config, which DeepSpec copies whole: not the drafter's.
        assert config.layer_types == ["full_attention"] * 2 and not config.tie_word_embeddings

    def test_absent_heads(self, tmp_path):
        config = self.load(tmp_path, markov_rank=None, markov_head_type=None, enable_confidence_head=None)
        assert config.markov_rank == 0 and not config.enable_confidence_head

    @pytest.mark.parametrize("key", ["block_size", "target_layer_ids", "mask_token_id"])
    def test_missing_keys_are_named(self, tmp_path, key):
        with pytest.raises(ValueError, match=f"'{key}'.*missing"):
            self.load(tmp_path, **{key: None})

    def test_another_model_is_refused(self, tmp_path):
        AutoConfig.for_model("llama", **COMMON).save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match="not a DSpark drafter.*llama.*block_size.*target_layer_ids.*mask_token_id"
        ):
            DSparkConfig.from_pretrained(tmp_path)

    def test_another_architecture_with_the_same_keys_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="not a DSpark drafter.*Qwen3DFlashModel"):
            self.load(tmp_path, architectures=["Qwen3DFlashModel"])
