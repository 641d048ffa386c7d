"""The packed target forward: every logit and tapped feature against an uncached forward of the same text, fp32."""

import pytest
import torch
from conftest import VOCAB, make_target, plain
from many import FAMILIES, Walk, family_target, pack, shared_target, taps_of, uncached, worst_error

from dspark.candidate_generator import packed_target_dspark
from dspark.candidate_generator.packed_attention_dspark import CURRENT, PackedStep
from dspark.candidate_generator.packed_target_dspark import PackedTarget
from dspark.candidate_generator.slots_dspark import Packing, Slots


CLOSE = 1e-5  # of the largest logit; rounding gives 1e-6, a mask that is one key off 1e-2 and more
WRONG = 1e-3
HYBRID = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT = {
    "qwen3_5_text": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, **HYBRID},
    "mamba": {"intermediate_size": None, "state_size": 4},
}


def walk(family: str, backend: str | None = None, seed: int = 0, deep: bool = True, **overrides) -> Walk:
    target = family_target(family, **overrides) if overrides else shared_target(family)
    return Walk(pack(target, taps_of(family), backend), seed, deep)


# ---- families


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Ragged blocks, rollbacks across windows and chunks of 8, slots that change hands, prompts in pieces."""
    one = walk(family, deep=FAMILIES[family][2] != "loop")
    assert one.packed.backend == FAMILIES[family][2]
    one.run(12)
    assert one.worst < CLOSE and one.compared > 100


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama4", "falcon"])
def test_more_requests_than_slots(family):
    one = walk(family, seed=1).run(10, requests=6)
    assert one.packed.slots.count == 8 and one.worst < CLOSE


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 4}),
        ("gemma4", {"num_kv_shared_layers": 0}),
        ("gemma4", {"num_kv_shared_layers": 2, "global_head_dim": 8}),
        ("gpt_oss", {"sliding_window": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("cohere2", {"attn_implementation": "eager"}),
        ("falcon", {"attn_implementation": "eager"}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_variants(family, overrides):
    one = walk(family, **overrides)
    assert one.packed.backend == FAMILIES[family][2]
    assert one.run(10).worst < CLOSE


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "llama4", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_mask_back_end_where_it_is_not_the_first(family, attention):
    one = walk(family, "mask", attn_implementation=attention)
    assert one.packed.backend == "mask"
    assert one.run(10).worst < CLOSE


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "llama4", "gemma2"])
def test_the_loop_where_it_is_not_the_first(family):
    """It takes back what the last forward wrote, which is what decoding needs."""
    one = walk(family, "loop", deep=False)
    assert one.packed.backend == "loop"
    assert one.run(10).worst < CLOSE


def test_an_unknown_back_end_is_named():
    with pytest.raises(ValueError, match="`backend` is 'paged'.*packed, mask, loop"):
        pack(shared_target("llama"), backend="paged")


# ---- slots


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4", "deepseek_v3", "falcon"])
def test_slots_and_capacity_grow(family):
    """From 4 slots to 16 and from 128 tokens to 512, with requests in the middle of their texts."""
    one = walk(family)
    first = one.acquire()
    one.feed({first: 20})
    others = [one.acquire() for _ in range(9)]
    one.feed({first: 3, **{slot: 1 + i for i, slot in enumerate(others)}})
    assert one.packed.slots.count == 16 and one.packed.slots.capacity == 128
    for piece in (110, 100, 70):  # a prompt in pieces beside the blocks of others
        one.feed({others[0]: piece, first: 4, others[-1]: 2}, {others[0]: 3, first: 4, others[-1]: 1})
    assert one.packed.slots.capacity == 512
    for slot in others[1:-1]:
        one.release(slot)
    one.feed({others[-1]: 5, first: 1, others[0]: 8})  # far apart, long beside short
    one.rollback(others[0], 150)
    again = one.acquire()
    one.feed({again: 30, others[0]: 2, first: 1})
    assert again == others[1] and one.worst < CLOSE


def test_a_longer_context_is_its_own_rectangle():
    """Contexts of 300 beside 10, and slots with others between them, which are copied rather than viewed."""
    one = walk("llama")
    slots = [one.acquire() for _ in range(8)]
    one.feed({slots[0]: 300, slots[7]: 40, slots[3]: 5})
    one.feed({slots[0]: 7, slots[1]: 7, slots[2]: 9, slots[3]: 1})
    one.feed({slots[7]: 4, slots[0]: 8, slots[1]: 1})
    assert one.worst < CLOSE
    far = Packing([7, 0, 1], [40, 307, 7], [4, 8, 1], torch.device("cpu"))
    assert [(group.span, group.index is None) for group in far.groups] == [((1, 8), False), ((0, 1), True)]
    assert far.cells == 2 * 4 * 44 + 8 * 315


def test_slots_hand_out_the_lowest_and_refuse_what_is_wrong():
    slots = Slots()
    assert [slots.acquire() for _ in range(6)] == list(range(6)) and slots.count == 8 and slots.taken == 6
    slots.lengths[3] = 5
    slots.release(3)
    slots.release(1)
    assert slots.acquire() == 1 and slots.acquire() == 3 and slots.lengths[3] == 0
    for wrong in (6, -1, 8):
        with pytest.raises(ValueError, match=f"slot {wrong} is not taken"):
            slots.release(wrong)
    slots.lengths[2] = 4
    for tokens in (5, -1):
        with pytest.raises(ValueError, match="slot 2 holds 4 tokens"):
            slots.rollback(2, tokens)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_first_position(family):
    """A request that does not start at 0; learned positions would show a shift, rotated ones do not."""
    one = walk(family)
    slots = [one.acquire(first) for first in (0, 5, 11)]
    one.feed(dict(zip(slots, (4, 7, 3))))
    one.feed(dict(zip(slots, (1, 2, 3))))
    assert one.worst < CLOSE
    if family != "llama":
        text = one.texts[slots[1]]
        assert (
            worst_error(uncached(one.packed.target, [0], text)[0], uncached(one.packed.target, [0], text, 5)[0])
            > WRONG
        )


def test_a_request_does_not_depend_on_its_neighbours():
    """Alone, beside short ones and beside long ones: the same logits up to rounding."""
    packed = pack(shared_target("mistral"))
    text = [(7 * i + 3) % VOCAB for i in range(20)]
    seen = []
    for others in ((), (1, 2), (60, 17, 30)):
        slots = [packed.acquire() for _ in (*others, 0)]
        tokens = [[(i + n) % VOCAB for i in range(n)] for n in others] + [text]
        seen.append(packed.verify(slots, tokens, [1] * len(others) + [20]).logits[-20:])
        for slot in slots:
            packed.release(slot)
    assert all(worst_error(other, seen[0]) < CLOSE for other in seen[1:])


# ---- mutations: what the comparison must not miss


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", None), ("mistral", None), ("falcon", None), ("llama", "loop")]
)
def test_a_rollback_that_does_nothing_is_seen(family, backend):
    one = walk(family, backend)
    slot, other = one.acquire(), one.acquire()
    one.feed({slot: 9, other: 4})
    one.packed.rollback = lambda slot, tokens: None
    one.rollback(slot, 3)
    one.packed.slots.lengths[slot] = 9  # as it would stand there
    with pytest.raises(AssertionError):
        one.feed({slot: 2, other: 1})
    texts = {s: list(t) for s, t in one.texts.items()}
    logits = one.packed.verify([slot], [[5]], [1]).logits
    assert worst_error(logits, uncached(one.packed.target, [0], texts[slot] + [5])[0][-1:]) > WRONG


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "gemma2", "cohere2"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_seen(family, off, monkeypatch):
    """By the comparison, and by the probe, which leaves the back end to another."""
    right = PackedStep.reach

    def reach(self, module, sliding_window):
        window, chunk = right(self, module, sliding_window)
        return (None if window is None else window + off), chunk

    monkeypatch.setattr(PackedStep, "reach", reach)
    assert walk(family, "packed").run(8).worst > WRONG
    assert walk(family).packed.backend != "packed"


def test_a_chunk_off_by_one_is_seen(monkeypatch):
    right = PackedStep.reach

    def reach(self, module, sliding_window):
        window, chunk = right(self, module, sliding_window)
        return window, (None if chunk is None else chunk + 1)

    monkeypatch.setattr(PackedStep, "reach", reach)
    assert walk("llama4", "packed").run(8).worst > WRONG
    assert walk("llama4").packed.backend != "packed"


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("mutation", ["neighbour", "future", "behind"])
def test_a_wrong_group_mask_is_seen(family, mutation, monkeypatch):
    """Rows with the mask of the next row, queries that see one key too many, or one too few."""
    right = PackedStep.mask

    def mask(self, group, window, chunk, first_key, repeats, dtype):
        given = right(self, group, window, chunk, first_key, repeats, dtype)
        if mutation == "neighbour":
            return given.roll(1, dims=0)
        return given.roll(1 if mutation == "future" else -1, dims=-1)

    monkeypatch.setattr(PackedStep, "mask", mask)
    assert walk(family, "packed").run(8).worst > WRONG
    assert walk(family).packed.backend != "packed"


def test_a_diagonal_mask_that_lets_requests_see_each_other_is_seen(monkeypatch):
    right = PackedTarget._diagonal_mask

    def mask(self, packing):
        return torch.ones_like(right(self, packing))

    monkeypatch.setattr(PackedTarget, "_diagonal_mask", mask)
    assert walk("falcon", "mask").run(8).worst > WRONG
    assert walk("falcon").packed.backend == "loop"


# ---- the choice of a back end


def chosen(monkeypatch, target, errors: dict):
    """A packed target whose probes give these errors, or raise them."""

    def probe(packed, backend):
        if isinstance(errors[backend], Exception):
            raise errors[backend]
        return errors[backend]

    monkeypatch.setattr(packed_target_dspark, "probe", probe)
    return pack(target)


@pytest.mark.parametrize("problem", [1e-2, float("nan"), float("inf"), RuntimeError("no such kernel")])
def test_a_probe_that_disagrees_falls_back_and_says_so(problem, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(packed_target_dspark.logger, "level", 20)
    one = chosen(monkeypatch, shared_target("llama"), {"packed": problem, "mask": 1e-6})
    assert one.backend == "mask"
    said = [record.message for record in caplog.records if "'packed'" in record.message]
    assert len(said) == 1 and "LlamaForCausalLM" in said[0]
    assert ("no such kernel" if isinstance(problem, Exception) else f"{problem:.1e}") in said[0]
    assert Walk(one).run(4).worst < CLOSE

    caplog.clear()
    one = chosen(monkeypatch, shared_target("llama"), {"packed": problem, "mask": problem})
    assert one.backend == "loop"
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "one at a time" in warned[0] and "LlamaForCausalLM" in warned[0]
    assert Walk(one, deep=False).run(4).worst < CLOSE


def test_a_probe_leaves_nothing_behind(monkeypatch):
    one = pack(shared_target("llama"))
    assert one.slots.taken == 0 and one.slots.lengths == [0] * 4 and one.cache.packing is None


def test_tolerances_follow_the_dtype():
    """A bf16 target is packed too; its rounding is no reason to fall back."""
    target = family_target("llama").bfloat16()
    assert pack(target).backend == "packed"
    target = family_target("llama").double()
    one = pack(target)
    assert one.backend == "packed" and packed_target_dspark.probe(one, "packed") < 1e-12


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_targets_are_refused(kind):
    target = make_target(kind, **RECURRENT[kind])
    ran = []
    target.register_forward_pre_hook(lambda *_: ran.append(True))
    with pytest.raises(ValueError, match=f"{type(target).__name__} keeps a recurrent state.*rolled back"):
        pack(target, [0])
    assert not ran


# ---- what depends on more than a request's own text in the model itself


def test_temperature_tuning_by_position_is_the_requests_own():
    """Llama 4 scales queries by positions it counts itself, in a packed forward from the longest text on. What a probe
    shows is short of the first scale, here 64 and 8,192 in the published models."""
    tuning = {"no_rope_layers": [1, 0, 1, 0], "attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 1.0}
    one = walk("llama4", **tuning)
    slots = [one.acquire() for _ in range(3)]
    one.feed(dict(zip(slots, (40, 20, 6))))
    one.feed(dict(zip(slots, (4, 4, 4))))
    assert one.worst < CLOSE


def test_alibi_reaches_as_far_as_one_text():
    """MPT builds its biases for `max_seq_len` keys; the keys of all requests together may be more."""
    one = walk("mpt", max_seq_len=32)
    slots = [one.acquire() for _ in range(4)]
    one.feed(dict.fromkeys(slots, 12))
    one.feed(dict.fromkeys(slots, 3))
    assert one.worst < CLOSE


ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_that_depends_on_the_longest_position(kind):
    """A request behind the switch must not change the factors of one that is before it, nor what that has cached."""
    settings = {"max_position_embeddings": 32}
    if kind == "longrope":
        settings = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    one = walk("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}, **settings)
    long, short = one.acquire(), one.acquire()
    one.feed({long: 40, short: 6})
    target, text = one.packed.target, one.texts[long]
    parts = [uncached(target, [0], text[:n])[0][:32] for n in (32, 40)]
    assert worst_error(*parts) > WRONG  # the factors do switch
    one.feed({short: 3})
    assert one.worst < CLOSE


# ---- the target is left as it was


def state_of(target) -> tuple:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
    attention = [c._attn_implementation for c in (target.config, target.config.get_text_config(decoder=True))]
    return hooks, attention, target.training, target.config.to_dict(), CURRENT.get()


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "packed"), ("gemma3", "packed"), ("falcon", "mask"), ("bloom", "loop")]
)
def test_the_target_is_as_it_was(prompt, family, backend):
    target = family_target(family)
    before, text = state_of(target), plain(target, prompt, max_new_tokens=20)
    one = Walk(pack(target))
    assert one.packed.backend == backend and state_of(target) == before
    slots = [one.acquire() for _ in range(2)]
    one.feed(dict.fromkeys(slots, 12))
    assert state_of(target) == before and one.packed.cache.packing is None and one.packed.cache.gather is None
    assert torch.equal(plain(target, prompt, max_new_tokens=20), text)  # between the steps of a session
    one.feed(dict.fromkeys(slots, 2))
    assert one.worst < CLOSE

    handle = one.packed.layers[1].register_forward_hook(raises)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.packed.verify(slots, [[1, 2], [3]], [1, 1])
    handle.remove()
    assert state_of(target) == before and one.packed.cache.packing is None and one.packed.cache.gather is None
    assert torch.equal(plain(target, prompt, max_new_tokens=20), text)
    assert [one.packed.length(slot) for slot in slots] == [14, 14]
    if backend == "loop":  # its caches may hold half a forward: the requests of that forward are over
        for slot in slots:
            one.release(slot)
        slots = [one.acquire() for _ in range(2)]
    one.feed(dict.fromkeys(slots, 3))
    assert one.worst < CLOSE


def raises(*_):
    raise RuntimeError("out of memory")


def test_own_hooks_of_the_target_see_a_packed_forward_and_stay():
    target, shapes = family_target("llama"), []
    target.model.layers[0].register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    one = Walk(pack(target))
    slots = [one.acquire() for _ in range(3)]
    shapes.clear()
    one.packed.verify(slots, [[1, 2, 3], [4], [5, 6]], [0, 0, 0])
    assert shapes == [(1, 6, 32)]  # exactly the packed tokens, without padding


def test_another_thread_in_a_packed_target_is_told():
    """Its attention is exchanged for the time of a forward: a plain one beside it must not compute something else."""
    import threading

    target = family_target("llama")
    packed, seen = pack(target), []

    def plain_forward():
        try:
            target(torch.tensor([[1, 2, 3]]), use_cache=False)
        except RuntimeError as error:
            seen.append(str(error))

    def beside(*_):
        if not seen and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=plain_forward)
            thread.start()
            thread.join()

    handle = packed.layers[0].register_forward_pre_hook(beside)
    slot = packed.acquire()
    logits = packed.verify([slot], [[5, 6, 7]], [3]).logits
    handle.remove()
    assert len(seen) == 1 and "another thread" in seen[0]
    assert worst_error(logits, uncached(target, [0], [5, 6, 7])[0]) < CLOSE
