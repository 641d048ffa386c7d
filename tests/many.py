"""What the tests of many requests share: tiny targets of many families, uncached forwards as the reference, drafters
that follow one script a row, and calls of `generate` with and without them."""

from functools import cache

import torch
from conftest import VOCAB, ScriptedDrafter, config, make_drafter, make_target
from same import seeded
from transformers import StoppingCriteria

from dspark.candidate_generator.packed_target_dspark import PackedTarget
from dspark.modeling_dspark.target_dspark import TargetLink, decoder_layers


SWA = {"sliding_window": 8}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Where a family does not share the names of the other configs.
RENAMED = {"num_key_value_heads": None, "intermediate_size": None}
MIXED = ["sliding_attention", "full_attention"] * 2
# Family -> model type, settings, the back end that must be chosen.
FAMILIES = {
    "llama": ("llama", {}, "packed"),
    "qwen3": ("qwen3", {"head_dim": 8}, "packed"),
    "gpt2": ("gpt2", RENAMED, "packed"),
    "opt": ("opt", {**RENAMED, "ffn_dim": 64, "word_embed_proj_dim": 32}, "packed"),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}, "packed"),
    "phi3": ("phi3", {}, "packed"),
    "olmo2": ("olmo2", {}, "packed"),
    "mistral": ("mistral", SWA, "packed"),
    "gemma3": ("gemma3_text", {**SWA, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": MIXED}, "packed"),
    "cohere2": ("cohere2", {**SWA, "layer_types": MIXED}, "packed"),
    "gemma2": (
        "gemma2",
        {**SWA, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        "packed",
    ),
    "gpt_oss": ("gpt_oss", {**SWA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "packed"),
    "deepseek_v3": (
        "deepseek_v3",
        {**MLA, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        "packed",
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "num_experts": 4}, "packed"),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "packed"),
    "llama4": (
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 64},
        "packed",
    ),
    "gemma4": (
        "gemma4_text",
        {**SWA, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "layer_types": MIXED}
        | {"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
        "packed",
    ),
    "falcon": ("falcon", {**RENAMED, "alibi": False}, "mask"),
    "mpt": (
        "mpt",
        {
            "d_model": 32,
            "n_layers": 4,
            "n_heads": 4,
            "max_seq_len": 512,
            "max_position_embeddings": None,
            "use_cache": True,
        }
        | {**RENAMED, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None},
        "mask",
    ),
    "bloom": ("bloom", {**RENAMED, "max_position_embeddings": None}, "loop"),
}
KINDS = ("oracle", "never", "alternating", "random")
NEW = 16  # tokens of a call, unless it says otherwise
TEXT = NEW + 12  # of the texts that drafters know: as far as a block reaches
# Arguments of `generate` that are no settings.
CALL = (
    *("assistant_model", "logits_processor", "stopping_criteria", "streamer", "tokenizer", "position_ids"),
    *("prefix_allowed_tokens_fn",),
)
# Layers to tap: of Gemma 4, only the embeddings and those before the ones that share keys.
TAPS = {"gemma4": [-1, 0, 1]}


def family_target(family: str, seed: int = 0, spread: float = 3.0, **overrides) -> torch.nn.Module:
    kind, settings, _ = FAMILIES[family]
    return make_target(kind, seed, spread, **{**settings, **overrides})


@cache
def shared_target(family: str) -> torch.nn.Module:
    """One that no test changes."""
    return family_target(family)


def taps_of(family: str) -> list[int]:
    return TAPS.get(family, [-1, 0, 2])


def pack(target, layer_ids=(-1, 0, 2), backend: str | None = None) -> PackedTarget:
    layers = decoder_layers(target)
    return PackedTarget(target, layers, list(layer_ids), torch.device("cpu"), torch.float32, backend)


@torch.no_grad()
def uncached(target, layer_ids, text: list[int], first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[S, V]` and tapped features `[S, F]` of one text in one forward without a cache."""
    layers, caught = decoder_layers(target), {}

    def keep(i):
        return lambda module, args, out: caught.update({i: (out if isinstance(out, torch.Tensor) else out[0])[0]})

    def keep_input(module, args, kwargs):
        caught[-1] = (args[0] if args else kwargs["hidden_states"])[0]

    handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids if i >= 0]
    handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    arguments = {"position_ids": torch.arange(first, first + len(text))[None]} if first else {}
    try:
        logits = target(torch.tensor([text]), use_cache=False, **arguments).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, torch.cat([caught[i] for i in layer_ids], dim=-1)


def worst_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where something is no number."""
    assert got.shape == right.shape
    if not got.isfinite().all():
        return float("inf")
    return float((got - right).abs().max() / right.abs().max())


class Walk:
    """A random life of a packed target: requests come, advance by ragged blocks, are rolled back and leave.

    Every forward is compared with uncached ones; `worst` is the largest error of a logit or a feature so far.
    """

    def __init__(self, packed: PackedTarget, seed: int = 0, deep: bool = True):
        self.packed, self.deep = packed, deep  # deep: also roll back what earlier forwards wrote
        self.random = seeded(seed)
        self.texts: dict[int, list[int]] = {}
        self.firsts: dict[int, int] = {}
        self.worst, self.compared = 0.0, 0

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def acquire(self, first: int = 0) -> int:
        slot = self.packed.acquire(first)
        assert slot not in self.texts
        self.texts[slot], self.firsts[slot] = [], first
        return slot

    def release(self, slot: int) -> None:
        self.packed.release(slot)
        del self.texts[slot]

    def feed(self, blocks: dict[int, int], keep: dict[int, int] | None = None) -> None:
        """One forward of that many random tokens by slot, compared; all logits unless `keep` says otherwise."""
        rows = list(blocks)
        tokens = [torch.randint(VOCAB, (blocks[row],), generator=self.random).tolist() for row in rows]
        kept = [blocks[row] if keep is None else keep[row] for row in rows]
        verified = self.packed.verify(rows, tokens, kept)
        assert (verified.logits is None) == (not any(kept))
        logits = verified.logits.split(kept) if any(kept) else [None] * len(rows)
        features = verified.features.split(list(blocks.values()))
        for row, block, part, n, feature in zip(rows, tokens, logits, kept, features):
            self.texts[row] += block
            assert self.packed.length(row) == len(self.texts[row])
            right, states = uncached(self.packed.target, self.packed.layer_ids, self.texts[row], self.firsts[row])
            errors = [worst_error(feature, states[-len(block) :])]
            errors += [worst_error(part, right[-n:])] if n else []
            self.worst = max(self.worst, *errors)
            self.compared += n

    def rollback(self, slot: int, tokens: int) -> None:
        self.packed.rollback(slot, tokens)
        if tokens:
            del self.texts[slot][-tokens:]

    def run(self, steps: int, requests: int = 3, most: int = 12) -> "Walk":
        """`most`: tokens of a block. Texts stay short of 60 tokens."""
        for _ in range(requests):
            self.acquire()
        for step in range(steps):
            if step % 4 == 3:
                self.release(list(self.texts)[self.below(len(self.texts))])
                self.acquire()
            slots = [s for s in self.texts if len(self.texts[s]) < 48 and (self.below(4) or not self.texts[s])]
            blocks = {slot: 1 + self.below(most) for slot in slots}
            if not blocks:
                continue
            self.feed(blocks, {slot: n if self.below(3) else self.below(n + 1) for slot, n in blocks.items()})
            for slot, n in blocks.items():
                # Never all of a text: a request keeps its prompt.
                length = len(self.texts[slot])
                limit = length if self.deep and not self.below(3) else min(n + 1, length)
                self.rollback(slot, self.below(limit))
        return self


class RowLink(TargetLink):
    """Base logits that name the script's token of each row at every slot."""

    def base_logits(self, drafter, hidden):
        logits = torch.zeros(*hidden.shape[:2], drafter.config.output_vocab_size)
        for at, (row, positions) in enumerate(zip(drafter.block_rows, drafter.row_positions)):
            for slot, position in enumerate(positions):
                logits[at, slot, drafter.script(row, position + 1)] = 50.0
        return logits


class RowDrafter(ScriptedDrafter):
    """Drafts `script(row, position)` with confidence `confidence(slot)`; rows are the draft slots, which a call hands
    out in the order of its prompts."""

    script = staticmethod(lambda row, position: 0)

    def forward(self, block_embeds, context_features=None, position_ids=None, cache=None, **kwargs):
        self.block_rows, self.row_positions = cache.packing.rows, position_ids.tolist()
        self.widest = max(getattr(self, "widest", 0), len(self.block_rows))
        return super().forward(block_embeds, context_features, position_ids=position_ids, cache=cache, **kwargs)

    def link(self, target):
        if target not in self._runtime.links:
            self._runtime.links[target] = RowLink(self, target)
        return self._runtime.links[target]


def rows_drafter(target, texts: list[list[int]], kind: str, firsts=None, **overrides):
    """A drafter for a batch whose texts, without padding, are known; kinds as in `conftest.following`."""
    if kind == "random":
        return make_drafter(target, **overrides)
    drafter = make_drafter(target, cls=RowDrafter, **overrides)
    firsts = firsts or [0] * len(texts)

    def right(row, position):
        return texts[row][min(position - firsts[row], len(texts[row]) - 1)]

    def wrong(row, position):
        return (right(row, position) + 1) % VOCAB

    drafter.script = {
        "oracle": right,
        "never": wrong,
        "alternating": lambda row, at: right(row, at) if (at + row) % 2 == 0 else wrong(row, at),
    }[kind]
    return drafter


def ragged(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of those lengths, padded on the left, and their mask."""
    longest, random = max(lengths), seeded(seed)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, VOCAB, (length,), generator=random)
        mask[row, longest - length :] = 1
    return ids, mask


def generate(target, batch, **kwargs):
    """One call, its settings in a generation config of their own."""
    settings = {"max_new_tokens": NEW, **kwargs}
    call = {key: settings.pop(key) for key in CALL if key in settings}
    return target.generate(**batch, generation_config=config(**settings), **call)


def plain(target, batch, **kwargs):
    """Without a drafter; run once for equal settings."""
    if set(kwargs) & set(CALL) or kwargs.get("do_sample"):
        return generate(target, batch, **kwargs)
    key = target, repr(([(name, t.dtype, t.tolist()) for name, t in batch.items()], kwargs))
    if key not in _known:
        _known[key] = generate(target, batch, **kwargs)
    return _known[key]


_known: dict = {}


def assisted(target, batch, drafter, schedule: str = "fixed", **kwargs):
    return generate(target, batch, assistant_model=drafter, dspark_schedule=schedule, **kwargs)


def texts_of(target, batch, tokens: int = TEXT, **kwargs) -> list[list[int]]:
    """What the target writes behind each prompt, without padding."""
    out = plain(target, batch, max_new_tokens=tokens, **kwargs)
    return [row[-int(seen.sum()) - tokens :].tolist() for row, seen in zip(out, batch["attention_mask"])]


def assert_rows(target, batch, drafter, kind: str | None = None, schedule: str = "fixed", **kwargs):
    """Assisted equals plain decoding, with the acceptance the kind of drafter must have."""
    expected = plain(target, batch, **kwargs)
    out = assisted(target, batch, drafter, schedule, **kwargs)
    assert out.dtype == expected.dtype and out.tolist() == expected.tolist()
    statistics = drafter.statistics
    assert statistics.drafted > 0
    if kind == "oracle":
        assert statistics.accepted == statistics.verified > 0
    elif kind == "alternating":
        assert 0 < statistics.accepted < statistics.verified
    elif kind == "never":
        assert statistics.accepted == 0 < statistics.verified
    return out


def ends_of(texts, batch, counts) -> list[int]:
    """Ids that end the rows after about `counts` new tokens."""
    return [text[int(seen.sum()) + n] for text, seen, n in zip(texts, batch["attention_mask"], counts)]


class LastToken(StoppingCriteria):
    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids)


class ByRowLength(StoppingCriteria):
    """Another length for every row of a batch of four."""

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 4
        return input_ids.shape[1] >= torch.tensor([16, 19, 22, 18])


def unused_id(texts) -> int:
    return next(i for i in range(1, VOCAB) if not any(i in text for text in texts))
