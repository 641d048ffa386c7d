"""The DSpark drafter: a DFlash backbone that drafts a block in one pass, a sequential head, a confidence head.

Shapes, here and everywhere: `B` batch, `S` sequence, `A` anchors, `G` block size (the paper's gamma), `H` hidden,
`V` vocabulary (`V'` producible ids), `T` tapped target layers, `R` Markov rank.

Worked example of the index convention, block size 3, anchor `D` at position 3 of `A B C D`:

    slot                  0        1        2
    position              3        4        5
    input                 D      <mask>   <mask>
    predicts position     4        5        6
    context               target features of positions 0, 1, 2 (the anchor has none yet)

Loading this file makes `target.generate(assistant_model=drafter)` understand DSpark drafters (see `decoding_dspark`).
"""

import importlib
import os
import shutil
import threading
import weakref
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dspark import DSparkConfig
from .heads_dspark import ConfidenceHead, MarkovHead
from .target_dspark import TargetLink


# On the Hub all files lie flat; installed, decoding is a sub-package of its own.
if __package__ == "dspark.modeling_dspark":
    decoding = importlib.import_module("dspark.candidate_generator.decoding_dspark")
    install_hook, assisted_decoding = decoding.install_hook, decoding.assisted_decoding
    generate_with, DSparkStatistics = decoding.generate_with, decoding.DSparkStatistics
    CUSTOM_GENERATE = decoding.CUSTOM_GENERATE
else:
    from .decoding_dspark import CUSTOM_GENERATE, DSparkStatistics, assisted_decoding, generate_with, install_hook

AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkModel"}


def rotate(states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of `[B, heads, S, D]` by cosines and sines `[B, S, D]`."""
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    return states * cos + rotate_half(states) * sin


class DSparkAttention(nn.Module):
    """Attention of a block's queries over injected context and the block itself (eq. 3).

    The context enters every layer through the layer's own K and V projections, without a norm of its own: it was
    normed once, when the target's features were fused.
    """

    is_causal = False  # read by the attention functions; a causal block is a mask here

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        norm = Qwen3RMSNorm if config.use_qk_norm else (lambda size, eps: nn.Identity())
        self.q_norm = norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        block_rope: tuple[torch.Tensor, torch.Tensor],
        full_rope: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: DynamicCache | None,
        **kwargs,
    ) -> torch.Tensor:
        """Block states `[B, Q, H]` and new context `[B, S, H]` to `[B, Q, H]`; only context enters the cache."""
        batch, length = hidden_states.shape[:2]
        new = 0 if context is None else context.shape[1]
        injected = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)

        query = rotate(self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2), block_rope)
        key, value = self.keys_values(injected, full_rope)
        if hasattr(cache, "attend"):  # the slots of many requests
            return self.o_proj(cache.attend(self, query, key, value).reshape(batch, length, -1))
        if cache is not None:
            past_key, past_value = cache.update(key[:, :, :new], value[:, :, :new], self.layer_idx)
            key = torch.cat([past_key, key[:, :, new:]], dim=2)
            value = torch.cat([past_value, value[:, :, new:]], dim=2)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attention(
            self,
            query,
            key,
            value,
            self._mask(attention_mask, query, key.shape[2]),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            is_causal=False,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, length, -1))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim)

    def keys_values(self, states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]):
        """Keys and values `[B, heads, S, D]` of injected states `[B, S, H]`."""
        key = rotate(self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2), rope)
        return key, self._heads(self.v_proj(states)).transpose(1, 2)

    def _mask(self, given: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor | None:
        """The caller's boolean mask `[B, 1, Q, K]` or, without one, the layer's window and causality; `None` when
        every slot sees everything. Keys are consecutive positions that end with the block's own."""
        mask = given
        if mask is None:
            slots = query.shape[2]
            windowed = self.sliding_window is not None and keys > self.sliding_window
            if not (windowed or self.config.is_causal):
                return None
            distance = torch.arange(keys - slots, keys, device=query.device)[:, None]
            distance = distance - torch.arange(keys, device=query.device)
            mask = torch.ones_like(distance, dtype=torch.bool)
            if windowed:
                mask &= distance < self.sliding_window
            if self.config.is_causal:
                mask &= distance >= 0
            mask = mask[None, None]
        if self.config._attn_implementation == "eager":
            return torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        return mask


class DSparkDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DSparkPreTrainedModel(PreTrainedModel):
    config_class = DSparkConfig
    base_model_prefix = "drafter"
    main_input_name = "block_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class Runtime:
    """What a drafter remembers between calls and never saves: links to targets, how they can be packed, cost tables,
    statistics."""

    def __init__(self):
        self.links: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.backends: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.cost_tables: dict = {}
        self.thread = threading.local()


class DSparkModel(DSparkPreTrainedModel):
    """A DSpark drafter: backbone (eq. 2-3), sequential head (eq. 4-6) and confidence head (eq. 7).

    Tensor names are DeepSpec's. Embedding and LM head are the target's: shared, frozen, not saved.

    Attributes:
        d2t: `[V']` offsets of a reduced draft vocabulary, target id = draft id + `d2t[draft id]`; absent without one.
        cost_table: a cost table to schedule with; `None` lets decoding load or profile one.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DSparkDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        own = config.own_embeddings
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if own else None
        self.cost_table = None
        self._runtime = Runtime()
        self.post_init()

    def forward(
        self,
        block_embeds: torch.Tensor | None = None,
        context_features: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        context_position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """The parallel backbone.

        Args:
            block_embeds: `[B, Q, H]`, embeddings of one block (`Q = G`) or, in training, of `A` blocks (`Q = A * G`).
            context_features: `[B, S, T * H]`, raw outputs of the tapped target layers, concatenated in the order of
                `target_layer_ids`, for the context positions that are not in the cache yet.
            position_ids: `[B, Q]`; by default the block follows the context.
            context_position_ids: `[B, S]`; by default the context follows the cache.
            attention_mask: boolean `[B, 1, Q, K]` over cached context, new context and block, `True` where a slot may
                look. By default every slot sees all context and its whole block (in sliding layers, its window).
            cache: keys and values of context; the new context is added, the block is not.

        Returns:
            `last_hidden_state` `[B, Q, H]`, after the final norm: `h_1..h_G`.

        Raises:
            ValueError: without `block_embeds`, as when a bare `Trainer` calls.
        """
        if block_embeds is None:
            raise ValueError(
                "a drafter needs `block_embeds`, and has no loss of its own: it is trained beside its target, with "
                "`dspark.training.DSparkTrainer(model=drafter, target=target, ...)`."
            )
        batch, slots = block_embeds.shape[:2]
        new = 0 if context_features is None else context_features.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        if context_position_ids is None:
            context_position_ids = torch.arange(past, past + new, device=block_embeds.device).expand(batch, -1)
        if position_ids is None:
            first = context_position_ids[:, -1:] + 1 if new else past
            position_ids = first + torch.arange(slots, device=block_embeds.device).expand(batch, -1)

        context = None if context_features is None else self.project_context(context_features)
        cos, sin = self.rotary_emb(block_embeds, torch.cat([context_position_ids, position_ids], dim=1))
        hidden_states = block_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                context=context,
                block_rope=(cos[:, new:], sin[:, new:]),
                full_rope=(cos, sin),
                attention_mask=attention_mask,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def project_context(self, features: torch.Tensor) -> torch.Tensor:
        """`H_ctx = RMSNorm(W_c [H^(l_1); ..; H^(l_m)])` (eq. 2): `[B, S, T * H]` to `[B, S, H]`."""
        return self.hidden_norm(self.fc(features.to(device=self.device, dtype=self.dtype)))

    def context_keys_values(self, features: torch.Tensor, position_ids: torch.LongTensor):
        """What each layer attends to of context that is there before the block: keys and values `[B, heads, S, D]` a
        layer, of features `[B, S, T * H]` at positions `[B, S]`."""
        context = self.project_context(features)
        rope = self.rotary_emb(context, position_ids)
        return [layer.self_attn.keys_values(context, rope) for layer in self.layers]

    @property
    def kept_ids(self) -> torch.LongTensor | None:
        """Target ids of the producible ids, `[V']`; `None` when those are all ids."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def new_cache(self) -> DynamicCache:
        """An empty draft cache. It holds context only, bounded by the window in sliding layers."""
        return DynamicCache(config=self.config)

    def link(self, target: PreTrainedModel) -> TargetLink:
        """The drafter's view of a target, checked once per target.

        Raises:
            ValueError: when the drafter does not fit the target.
        """
        links = self._runtime.links
        if target not in links:
            links[target] = TargetLink(self, target)
            links[target].drop_own_embeddings(self)
        return links[target]

    def confidence_temperatures(self, temperature: float) -> list[float]:
        """`G` divisors of the confidence logits, from the calibrated regime nearest to a sampling temperature."""
        regimes = self.config.confidence_temperatures
        if not regimes:
            return [1.0] * self.config.block_size
        return regimes[min(regimes, key=lambda regime: abs(float(regime) - temperature))]

    @property
    def statistics(self) -> DSparkStatistics | None:
        """Counts and times of the last finished `generate` call of this thread; `print` shows a table."""
        return getattr(self._runtime.thread, "statistics", None)

    @statistics.setter
    def statistics(self, value: DSparkStatistics) -> None:
        self._runtime.thread.statistics = value

    # The protocol the hook in `generate` looks for; see `decoding_dspark.install_hook`.
    dspark_takes_batches = True

    def dspark_assisted_decoding(self, original, target, *args, **kwargs):
        return assisted_decoding(self, original, target, *args, **kwargs)

    def decode_for(self, target: PreTrainedModel, **kwargs):
        """`target.generate(assistant_model=self, **kwargs)`, also where the hook is switched off."""
        return generate_with(self, target, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """The host's method, for DSpark repos and for DeepSpec's Qwen3-style files.

        Raises:
            ValueError: when tensors are missing or of another shape; the host would fill them with random numbers.
        """
        drafter, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        if missing:
            raise ValueError(
                f"the checkpoint does not hold this drafter: {len(missing)} tensors are missing or of another shape, "
                f"among them {missing[:5]}. It is incomplete, or its config is another checkpoint's."
            )
        return (drafter, info) if output_loading_info else drafter

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs):
        """Write a complete Hub repo: weights, config, all code files and the `custom_generate` shim, flat, so that the
        folder loads with `AutoModel.from_pretrained(..., trust_remote_code=True)` and nothing else installed."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_code_files(Path(save_directory))

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        """`save_pretrained(push_to_hub=True)` uploads from within the host's method, so the code is written before."""
        write_code_files(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def __getattr__(self, name: str):
        if name == "generation_config":  # what the host asks an assistant for when the hook is not there
            raise AttributeError(
                "a DSpark drafter does not generate by itself, and `generate` does not know DSpark drafters because "
                "DSPARK_HOOK=0 left it as it was. Unset it, or call "
                "`target.generate(..., assistant_model=drafter, custom_generate=<drafter repo>, "
                "trust_remote_code=True)` or `drafter.decode_for(target, ...)`."
            )
        if name == "generate":
            raise AttributeError(
                "a DSpark drafter does not write text by itself: call `target.generate(..., assistant_model=drafter)`."
            )
        return super().__getattr__(name)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_runtime"}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._runtime = Runtime()


def write_code_files(folder: Path) -> None:
    """Copy the drafter's code, byte for byte, next to its weights."""
    sources = {Path(__file__).parent, Path(importlib.import_module(install_hook.__module__).__file__).parent}
    for source in sources:
        for file in sorted(source.glob("*_dspark.py")):
            if file.resolve() != (folder / file.name).resolve():
                shutil.copyfile(file, folder / file.name)
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(CUSTOM_GENERATE, encoding="utf-8")


install_hook()

__all__ = ["DSparkConfig", "DSparkModel"]
