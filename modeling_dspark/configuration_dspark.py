"""Configuration of a DSpark drafter: DeepSpec's flat key names where it has one, plus what decoding needs to know.

The index conventions these keys stand for (positions are absolute, the anchor `x_0` is the last committed token, at
position `p`):

- block slot `k = 0..G-1` sits at position `p + k`; slot 0 holds the anchor's embedding, the others the mask token's;
- slot `k` predicts the token at `p + k + 1`, so `block_size` inputs give `block_size` drafts;
- target layer id `i` is the raw output of decoder layer `i` (`hidden_states[i + 1]`), `-1` the embeddings.
"""

from typing import Any

from transformers import PreTrainedConfig


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
SCHEDULES = ("throughput", "fixed", "threshold")
# DeepSpec writes a drafter with its target family's model type and one of these architectures.
DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel",)
# Rope variants whose parameters carry over to a drafter with another head size.
PORTABLE_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
RESERVED_TOKEN_MARKS = ("mask", "reserved", "unused", "extra_id", "empty", "fim_pad", "pad")


class DSparkConfig(PreTrainedConfig):
    """Shape, target and decoding defaults of a [`DSparkModel`].

    Args:
        vocab_size: rows of the target's embedding, `V`. Token ids are the target's.
        draft_vocab_size: kept output ids, `None` for all `V`. The kept ids are in the model's buffer `d2t` (offsets).
        block_size: slots of a drafted block, `G` (the paper's gamma).
        num_target_layers: decoder layers of the target.
        target_layer_ids: tapped target layers, strictly increasing, the last layer excluded.
        mask_token_id: an unused row of the target's embedding; the content of slots `1..G-1`.
        markov_rank: `R` of eq. 5, 0 for no sequential head.
        markov_head_type: `"vanilla"` (eq. 5), `"gated"` or `"rnn"` (eq. 6).
        enable_confidence_head, confidence_head_with_markov: eq. 7, with or without `W_1[x_{k-1}]`.
        confidence_temperatures: sampling temperature, as a string (`"0.0"` is greedy), to `G` temperatures of the
            confidence logits (sequential temperature scaling). `None`: uncalibrated.
        target_name_or_path, target_revision, target_fingerprint: the target the drafter was trained for.
        schedule, schedule_threshold: what decoding does unless a call says otherwise.
        own_embeddings: the checkpoint brings its own embedding and LM head (files of other projects).

    Raises:
        ValueError: for a value that no drafter can have; the message names the key.
    """

    model_type = "dspark"

    vocab_size: int = 151936
    draft_vocab_size: int | None = None
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    use_qk_norm: bool = True
    is_causal: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    final_logit_softcapping: float | None = None
    logit_scale: float | int = 1.0
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    block_size: int = 7
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: dict | None = None
    own_embeddings: bool = False
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    schedule: str = "throughput"
    schedule_threshold: float | int = 0.5

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for key in ("block_size", "num_hidden_layers", "num_target_layers", "vocab_size", "hidden_size"):
            self._check_positive(key)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            self._check_positive(key)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.mask_token_id is None:
            self.mask_token_id = self.vocab_size - 1
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.markov_rank == 0:
            self.confidence_head_with_markov = False
        super().__post_init__(**kwargs)
        self._check()

    def _refuse(self, key: str, remedy: str):
        raise ValueError(f"`{key}` of a DSpark config is {getattr(self, key)!r}: {remedy}")

    def _check_positive(self, key: str) -> None:
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(key, "give a positive whole number.")

    def _check(self) -> None:
        refuse = self._refuse
        self._check_positive("head_dim")
        if not self.sample_from_anchor:
            refuse("sample_from_anchor", "only drafters whose anchor slot predicts are supported.")
        if self.markov_rank < 0:
            refuse("markov_rank", "give 0 for no sequential head, or a positive rank.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            refuse("markov_head_type", f"choose one of {MARKOV_HEAD_TYPES}.")
        if self.schedule not in SCHEDULES:
            refuse("schedule", f"choose one of {SCHEDULES}.")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse("num_key_value_heads", f"it must divide num_attention_heads = {self.num_attention_heads}.")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            refuse("draft_vocab_size", f"give a number from 1 to vocab_size = {self.vocab_size}, or None.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            refuse("mask_token_id", f"it must be a row of the target's embedding, 0 to {self.vocab_size - 1}.")
        ids = self.target_layer_ids
        if not ids or any(b <= a for a, b in zip(ids, ids[1:])):
            refuse("target_layer_ids", "give at least one id, strictly increasing.")
        if ids[0] < -1 or ids[-1] > self.num_target_layers - 2:
            refuse(
                "target_layer_ids",
                f"ids run from -1 (the embeddings) to {self.num_target_layers - 2}; the last layer of the target "
                f"({self.num_target_layers} layers) cannot be tapped.",
            )
        if self.head_dim % 2:
            refuse("head_dim", "rotary position embedding needs an even number.")
        if set(self.layer_types) - {"full_attention", "sliding_attention"}:
            refuse("layer_types", "draft layers are 'full_attention' or 'sliding_attention'.")
        if not 0 <= self.schedule_threshold <= 1:
            refuse("schedule_threshold", "it is compared with a probability, give 0 to 1.")
        if len(self.layer_types) != self.num_hidden_layers:
            refuse("layer_types", f"give one entry for each of the {self.num_hidden_layers} draft layers.")
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < 1:
            refuse("sliding_window", "layer_types has sliding layers, so give the window's width in tokens.")
        for temperature, scales in (self.confidence_temperatures or {}).items():
            if not str(temperature).replace(".", "", 1).isdigit():
                refuse(
                    "confidence_temperatures", f"{temperature!r} is no sampling temperature such as '0.0' or '1.0'."
                )
            if len(scales) != self.block_size or not all(scale > 0 for scale in scales):
                refuse("confidence_temperatures", f"{temperature!r} needs {self.block_size} positive numbers.")

    @property
    def output_vocab_size(self) -> int:
        """Ids a drafter can produce: `draft_vocab_size`, or `vocab_size` without a reduced vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def confidence_input_size(self) -> int:
        """Width of eq. 7's input: `H`, or `H + R` with the Markov embedding."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return normalize_config_dict(config_dict), kwargs

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, num_hidden_layers: int = 5, block_size: int = 7, tokenizer=None, **kwargs
    ) -> "DSparkConfig":
        """The configuration of a fresh drafter for a target.

        Args:
            target_config: the target's config; of a multimodal one the text part is used.
            num_hidden_layers: depth of the drafter (2 already beat a 5-layer DFlash in the paper).
            block_size: slots per block, `G`.
            tokenizer: the target's tokenizer; lets an unused embedding row be found for the mask token. Without it
                and without `mask_token_id` the last row of the embedding is taken.
            kwargs: any other key of this class, given precedence over what the target suggests.
        """
        text = target_config.get_text_config(decoder=True)
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
            if not isinstance(shape_value(text, key), int):
                raise ValueError(
                    f"`target_config` ({type(text).__name__}) has no `{key}`: DSpark drafts for attention decoders."
                )
        size = text.hidden_size
        heads = text.num_attention_heads
        key_value_heads = shape_value(text, "num_key_value_heads", heads)
        values = {
            "vocab_size": text.vocab_size,
            "hidden_size": size,
            "intermediate_size": shape_value(text, "intermediate_size", 4 * size),
            "num_attention_heads": heads,
            "num_key_value_heads": heads if heads % key_value_heads else key_value_heads,
            "head_dim": shape_value(text, "head_dim", 2 * max(1, size // heads // 2)),
            "max_position_embeddings": shape_value(text, "max_position_embeddings", 32768),
            "rms_norm_eps": shape_value(text, "rms_norm_eps", 1e-6),
            "rope_parameters": portable_rope_parameters(text),
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "logit_scale": output_logit_scale(text),
            "num_target_layers": text.num_hidden_layers,
            # Layers that share keys and values may skip the prompt (Gemma 3n, Gemma 4).
            "target_layer_ids": default_target_layer_ids(
                text.num_hidden_layers - shape_value(text, "num_kv_shared_layers", 0)
            ),
            "mask_token_id": find_mask_token_id(tokenizer, text.vocab_size),
            "target_name_or_path": getattr(target_config, "_name_or_path", None) or None,
            "target_revision": getattr(target_config, "_commit_hash", None),
        }
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            values[key] = getattr(target_config, key, None)
        return cls(num_hidden_layers=num_hidden_layers, block_size=block_size, **{**values, **kwargs})


def shape_value(text_config: PreTrainedConfig, key: str, default=None):
    """A number of a target's config; of one that differs from layer to layer, the largest or else the default."""
    try:
        value = getattr(text_config, key, None)
    except Exception:  # hosts refuse to name one value for a key that layers override, each release in its own way
        return default
    if isinstance(value, (list, tuple)):
        value = max(value, default=None)
    return value or default


def default_target_layer_ids(num_layers: int) -> list[int]:
    """Up to five taps spread from layer 1 to layer `num_layers - 3` (DeepSpec: 1, 9, 17, 25, 33 of 36)."""
    if num_layers < 2:
        return [-1]
    first, last = min(1, num_layers - 2), max(num_layers - 3, min(1, num_layers - 2))
    count = min(5, last - first + 1)
    if count == 1:
        return [first]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def portable_rope_parameters(text_config: PreTrainedConfig) -> dict[str, Any]:
    """The target's rope parameters as far as they make sense for a drafter that rotates its whole head."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention") or rope)  # some families nest one entry per layer type
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    if rope.get("rope_type", "default") not in PORTABLE_ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    dropped = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type", "sliding_attention")
    return {"rope_type": "default", **{k: v for k, v in rope.items() if k not in dropped}, "rope_theta": theta}


def output_logit_scale(text_config: PreTrainedConfig) -> float:
    """Factor some families apply to the logits behind the LM head (Cohere multiplies, Granite divides)."""
    if getattr(text_config, "logit_scale", None):
        return float(text_config.logit_scale)
    return 1.0 / float(getattr(text_config, "logits_scaling", None) or 1.0)


def find_mask_token_id(tokenizer, vocab_size: int) -> int:
    """An embedding row that no text uses: padding rows of the embedding first, then a reserved special token."""
    if tokenizer is None:
        return vocab_size - 1
    used = set(tokenizer.get_vocab().values())
    padding = [i for i in range(max(0, vocab_size - 4096), vocab_size) if i not in used]
    if padding:
        return padding[-1]
    special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < vocab_size)
    in_use = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    free = [i for i in special if i not in in_use]
    for mark in RESERVED_TOKEN_MARKS:
        for i in free:
            if mark in tokenizer.convert_ids_to_tokens(i).lower():
                return i
    raise ValueError(
        f"no unused row for the mask token: the embedding has {vocab_size} rows, the tokenizer uses all of them and "
        "has no reserved special token. Pass `mask_token_id=` with the id of a token your text never contains."
    )


def normalize_config_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's Qwen3-style config as DSpark keys; a `dspark` config is returned as it is.

    DeepSpec deep-copies the target's config and overrides it, so only the keys its draft class reads are taken; what
    else is in the file is noise.

    Raises:
        ValueError: for the config of something that is not a DSpark drafter; the message names what is missing.
    """
    if config_dict.get("model_type") in (None, DSparkConfig.model_type):
        return config_dict
    architectures = config_dict.get("architectures") or []
    needed = ("block_size", "target_layer_ids", "mask_token_id")
    missing = [key for key in needed if key not in config_dict]
    if missing or not set(architectures) & set(DEEPSPEC_ARCHITECTURES):
        raise ValueError(
            f"not a DSpark drafter: model_type {config_dict.get('model_type')!r}, architectures {architectures}"
            + (f", and the keys {missing} are missing" if missing else "")
            + f". Supported besides model_type 'dspark': architectures {DEEPSPEC_ARCHITECTURES}."
        )
    taken = (
        *needed,
        *("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
        *("initializer_range", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias"),
        *("attention_dropout", "is_causal", "num_target_layers", "sample_from_anchor", "markov_rank"),
        *("markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    )
    normalized = {key: config_dict[key] for key in taken if key in config_dict}
    normalized["model_type"] = DSparkConfig.model_type
    normalized.setdefault("markov_rank", 0)
    normalized.setdefault("enable_confidence_head", False)
    # A reduced draft vocabulary is only ever written without embeddings.
    normalized["own_embeddings"] = config_dict.get("own_embeddings", not config_dict.get("draft_vocab_size"))
    return normalized


def model_class():
    """The class built from this config. Never called: the host finds its cached copy of a local folder's config code
    by the content of the files this one imports, and its model class by the config's class. Without the import two
    folders of one name that differ in the model's code alone would share the first one's class."""
    from .modeling_dspark import DSparkModel

    return DSparkModel
