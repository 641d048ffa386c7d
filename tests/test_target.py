"""What a drafter takes from its target: embedding, LM head, tapped layers; and the checks that they fit."""

import logging
import threading

import pytest
import torch
from conftest import COMMON, TARGETS, VOCAB, config, make_drafter, make_target, plain, with_lora
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from dspark.candidate_generator.taps_dspark import FeatureTaps
from dspark.modeling_dspark import DSparkConfig, DSparkModel
from dspark.modeling_dspark.target_dspark import decoder_layers, target_fingerprint


CLOSE = {"rtol": 0, "atol": 1e-5}
# Families that do something to the logits behind the LM head, or to the embeddings, besides the plain ones.
SHAPED = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.mark.parametrize("kind", [*TARGETS, *SHAPED])
def test_base_logits_are_the_targets_own(kind, prompt):
    """From the target's own last state a drafter computes the target's logits: head, scale and soft-cap included."""
    target = make_target(kind, **SHAPED.get(kind, {}))
    drafter = make_drafter(target)
    with torch.no_grad():
        out = target(prompt, output_hidden_states=True)
        logits = drafter.link(target).base_logits(drafter, out.hidden_states[-1])
    torch.testing.assert_close(logits, out.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TARGETS)
def test_embeddings_are_what_the_targets_first_layer_sees(kind, prompt):
    """Gemma 3's scale included: it lives in the embedding module."""
    target = make_target(kind)
    drafter = make_drafter(target)
    with torch.no_grad():
        first = target(prompt, output_hidden_states=True).hidden_states[0]
        assert torch.equal(drafter.link(target).embed(drafter, prompt), first)


# ---- the LM head of a reduced vocabulary


def reduced(target, **values):
    drafter = make_drafter(target, draft_vocab_size=20, **values)
    drafter.d2t.copy_(torch.arange(0, 60, 3) - torch.arange(20))
    return drafter


def base_logits(drafter, target, hidden):
    with torch.no_grad():
        return drafter.link(target).base_logits(drafter, hidden)


HIDDEN = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))


def test_gathered_rows_follow_the_head():
    """They are gathered once, and again when the head is written to, replaced or moved."""
    target = make_target("llama")
    drafter = reduced(target)

    def check():
        with torch.no_grad():
            expected = target.lm_head(HIDDEN)[..., ::3][..., :20].float()
        torch.testing.assert_close(base_logits(drafter, target, HIDDEN), expected, **CLOSE)
        return expected

    first = check()
    rows = drafter.link(target)._head_rows
    check()
    assert drafter.link(target)._head_rows is rows
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    assert not torch.equal(check(), first)
    target.set_output_embeddings(torch.nn.Linear(32, VOCAB, bias=True))
    check()
    target.load_state_dict({k: v + 0.1 for k, v in target.state_dict().items()})
    check()
    target.lm_head.double()
    torch.testing.assert_close(
        base_logits(drafter, target, HIDDEN), target.lm_head(HIDDEN.double())[..., :60:3].float()
    )
    with torch.no_grad():
        drafter.d2t.add_(1)
    torch.testing.assert_close(
        base_logits(drafter, target, HIDDEN), target.lm_head(HIDDEN.double())[..., 1:61:3].float()
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [make_drafter, reduced])
def test_lora_on_the_lm_head_counts(make, prompt):
    target = make_target("llama")
    drafter = make(target)
    bare = base_logits(drafter, target, HIDDEN)
    wrapped = with_lora(target, ["lm_head", "q_proj"])
    adapted = base_logits(drafter, target, HIDDEN)
    assert not torch.allclose(adapted, bare, atol=1e-2)
    with torch.no_grad():
        expected = target.get_output_embeddings()(HIDDEN)
        expected = expected if make is make_drafter else expected[..., :60:3]
    torch.testing.assert_close(adapted, expected, **CLOSE)

    settings = config(max_new_tokens=16)
    expected = plain(wrapped, prompt, max_new_tokens=16)
    assert torch.equal(
        wrapped.generate(input_ids=prompt, assistant_model=drafter, generation_config=settings), expected
    )
    assert drafter.statistics.drafted > 0
    with wrapped.disable_adapter():
        torch.testing.assert_close(base_logits(drafter, target, HIDDEN), bare, **CLOSE)


def test_a_head_with_a_forward_hook_goes_through_the_module(target):
    drafter = reduced(target)
    bare = base_logits(drafter, target, HIDDEN)
    handle = target.lm_head.register_forward_hook(lambda module, args, out: out * 3)
    try:
        torch.testing.assert_close(base_logits(drafter, target, HIDDEN), bare * 3, **CLOSE)
    finally:
        handle.remove()


# ---- a target that does not fit


MISFITS = {
    "hidden_size": {"hidden_size": 64},
    "num_target_layers": {"num_hidden_layers": 5},
    "vocab_size": {"vocab_size": 65},
}


@pytest.mark.parametrize("key", MISFITS)
def test_a_misfit_is_an_error_before_any_forward(key, target, prompt):
    ran = []
    other = make_target("llama", **MISFITS[key])
    other.register_forward_pre_hook(lambda *_: ran.append(True))
    drafter = make_drafter(target, target_name_or_path="org/right-one")
    ours, theirs = getattr(drafter.config, key), next(iter(MISFITS[key].values()))
    message = f"`{key}` is {ours}, the target has {theirs} .*org/right-one"
    with pytest.raises(ValueError, match=message):
        drafter.link(other)
    with pytest.raises(ValueError, match=None if key == "vocab_size" else message):  # the host compares vocabularies
        other.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=4))
    assert not ran


def test_a_mask_token_without_a_row_is_an_error():
    target = make_target("llama")
    drafter = make_drafter(target)
    target.set_input_embeddings(torch.nn.Embedding(VOCAB - 1, 32))
    with pytest.raises(ValueError, match="`mask_token_id` 63 is not a row.*63"):
        drafter.link(target)


def test_a_target_without_a_head_is_an_error(target):
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="LlamaModel has no LM head; load it with AutoModelForCausalLM"):
        drafter.link(LlamaModel(target.config))


def test_layers_are_found_by_their_number():
    """Whatever they are called, and past other lists of the same length: experts inside the layers, say."""
    moe = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for kind in [*TARGETS, "mixtral", "gpt2", "falcon", "opt", "bloom"]:
        values = {**COMMON, **TARGETS.get(kind, {}), **(moe if kind == "mixtral" else {})}
        for name in ("eos_token_id", "num_key_value_heads" if kind in ("gpt_neox", "gpt2", "opt", "bloom") else ""):
            values.pop(name, None)
        extra = {"word_embed_proj_dim": 32, "ffn_dim": 64} if kind == "opt" else {}
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values, **extra)).eval()
        layers, outputs = decoder_layers(target), []
        assert len(layers) == 4
        handles = [layer.register_forward_hook(lambda m, args, out: outputs.append(out)) for layer in layers]
        with torch.no_grad():
            states = target(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
        for i, out in enumerate(outputs[:-1]):  # `hidden_states[i + 1]` is the raw output of layer i
            assert torch.equal(out[0] if isinstance(out, tuple) else out, states[i + 1]), kind
        for handle in handles:
            handle.remove()


# ---- one warning for another target


def linked_warnings(caplog, target, calls=2, **values) -> list[str]:
    caplog.clear()
    drafter = make_drafter(target, **values)
    with caplog.at_level(logging.WARNING):
        for _ in range(calls):
            drafter.link(target)
    return [record.message for record in caplog.records]


def named_target(name="org/target", revision="r1"):
    target = make_target("llama")
    target.config._name_or_path, target.config._commit_hash = name, revision
    return target


def test_the_right_target_is_silent(caplog):
    target = named_target()
    print_ = target_fingerprint(target)
    assert linked_warnings(caplog, target) == []  # name and revision as `from_target` recorded them
    assert linked_warnings(caplog, target, target_fingerprint=print_) == []
    # The same weights under another name, as a local copy has it, are the same target.
    moved = {"target_name_or_path": "elsewhere", "target_revision": None, "target_fingerprint": print_}
    assert linked_warnings(caplog, target, **moved) == []
    unknown = {"target_name_or_path": None, "target_revision": None}
    assert linked_warnings(caplog, target, **unknown) == []


@pytest.mark.parametrize(
    "recorded",
    [
        {"target_name_or_path": "org/other", "target_revision": None},
        {"target_revision": "r2"},
        {"target_fingerprint": "0123456789abcdef"},
    ],
    ids=["name", "revision", "fingerprint"],
)
def test_another_target_is_one_warning_that_names_both(caplog, recorded):
    target = named_target()
    messages = linked_warnings(caplog, target, **recorded)
    assert len(messages) == 1
    assert recorded.get("target_name_or_path", "org/target") in messages[0] and "org/target" in messages[0]
    for value in recorded.values():
        assert value is None or value in messages[0]


def test_fingerprint_tells_weights_not_formats():
    target = make_target("llama")
    first = target_fingerprint(target)
    assert len(first) == 16 and first == target_fingerprint(make_target("llama"))
    assert target_fingerprint(make_target("llama", seed=1)) != first
    # A projection in the last layer alone, as a fine-tune of the upper layers would change it.
    with torch.no_grad():
        target.model.layers[-1].mlp.up_proj.weight.mul_(1.05)
        target.model.layers[-1].mlp.gate_proj.weight.mul_(1.05)
    assert target_fingerprint(target) != first
    # The bf16 copy of a bf16 checkpoint held in fp32 is the same target.
    rounded = make_target("llama").bfloat16()
    assert target_fingerprint(rounded) == target_fingerprint(make_target("llama").bfloat16().float())
    with torch.device("meta"):
        assert target_fingerprint(AutoModelForCausalLM.from_config(target.config)) is None


def test_a_link_does_not_keep_the_target_alive():
    import gc
    import weakref

    target = make_target("llama")
    drafter = make_drafter(target)
    drafter.link(target)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None and len(drafter._runtime.links) == 0


# ---- taps


def taps_on(target, ids) -> FeatureTaps:
    return FeatureTaps(decoder_layers(target), ids, torch.device("cpu"), torch.float32)


def hooks(target) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())


@pytest.mark.parametrize("kind", TARGETS)
def test_taps_are_the_classic_hidden_states(kind, prompt):
    """Id i is `hidden_states[i + 1]`, -1 the embeddings; of two forwards between two looks the first counts."""
    target = make_target(kind)
    ids = [-1, 0, 2]
    with torch.no_grad():
        target(prompt, output_hidden_states=True)  # the host has lasting hooks of its own for these
    before = hooks(target)
    with torch.no_grad(), taps_on(target, ids) as taps:
        states = target(prompt, output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1] for i in ids], dim=-1)
        assert torch.equal(taps.take(), expected)
        target(prompt)
        target(prompt[:, :3])
        assert torch.allclose(taps.take(), expected, atol=1e-5)
    assert hooks(target) == before


def test_taps_catch_their_own_thread_only(target, prompt):
    with torch.no_grad(), taps_on(target, [0]) as taps:
        other = threading.Thread(target=lambda: target(prompt))
        other.start()
        other.join()
        with pytest.raises(RuntimeError, match="compiled before"):
            taps.take()
        target(prompt[:, :2])
        assert taps.take().shape == (1, 2, 32)


def test_taps_keep_nothing_but_taps(target, prompt):
    """Bytes: T * H * 4 for each token of the prompt, whatever the depth."""
    with torch.no_grad(), taps_on(target, [0, 2]) as taps:
        target(prompt)
        kept = [t for caught in taps._caught.values() for t in caught]
        assert sum(t.untyped_storage().nbytes() for t in kept) == prompt.shape[1] * 2 * 32 * 4
        taps.take()
        assert not any(taps._caught.values())
    drafter = make_drafter(target)
    target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=8))
    assert drafter.statistics.feature_bytes == prompt.shape[1] * 2 * 32 * 4


@pytest.mark.parametrize("where", ["target", "drafter", "criterion"])
def test_hooks_go_when_a_call_fails(prompt, where):
    target = make_target("llama")
    drafter = make_drafter(target)
    settings = config(max_new_tokens=24, dspark_schedule="fixed")
    calls = []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise KeyError("on purpose")

    extra = {}
    if where == "criterion":
        extra["stopping_criteria"] = [lambda ids, scores, **_: torch.tensor([fail() is not None])]
    handle = {"target": target, "drafter": drafter}.get(where, torch.nn.Linear(1, 1)).register_forward_pre_hook(
        lambda *_: fail()
    )
    before = hooks(target)
    with pytest.raises(KeyError, match="on purpose"):
        target.generate(prompt, assistant_model=drafter, generation_config=settings, **extra)
    handle.remove()
    assert hooks(target) == before - (where == "target")
    assert drafter.statistics is None
    expected = plain(target, prompt, max_new_tokens=24)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, generation_config=settings), expected)


def test_a_drafter_class_of_another_name_works(target, prompt):
    class Renamed(DSparkModel):
        pass

    torch.manual_seed(1)
    drafter = Renamed(DSparkConfig.from_target(target.config, num_hidden_layers=1, markov_rank=4)).eval()
    out = target.generate(
        prompt, assistant_model=drafter, generation_config=config(max_new_tokens=12, dspark_schedule="fixed")
    )
    assert torch.equal(out, plain(target, prompt, max_new_tokens=12)) and drafter.statistics.drafted > 0
