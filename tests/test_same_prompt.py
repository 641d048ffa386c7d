"""The same text for every layout of the prompt, and with processors that act on the target's scores.

As in `test_same_output`: fp32, greedy, against plain `generate` with the same arguments, tokens drafted each time.
"""

import pytest
import torch
from conftest import COMMON, VOCAB, config, following, lively_target, make_drafter, make_target, plain
from same import NEW, assert_same, drafter_for, seeded, shared, text_of
from transformers import AutoConfig, AutoModelForImageTextToText


# ---- the prompt's layout


PADDED = [
    (f, d, n) for f, d in (("llama", "oracle"), ("llama", "random"), ("gemma3_text", "alternating")) for n in (0, 1, 5)
]


@pytest.mark.parametrize(("family", "drafter", "padding"), PADDED)
def test_left_padding(prompt, family, drafter, padding):
    target, text = shared(family), text_of(family)
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
    out = assert_same(target, padded, drafter_for(target, text, drafter), drafter, attention_mask=mask)
    assert out[0, padding:].tolist() == text[: 9 + NEW]


@pytest.mark.parametrize("drafter", ["oracle", "alternating"])
def test_left_padding_of_a_target_that_takes_no_positions(prompt, drafter):
    """BLOOM's forward has none (ALiBi): they follow from the mask alone."""
    target = make_target("bloom", seed=3, num_key_value_heads=None)
    text = plain(target, prompt, max_new_tokens=64)[0].tolist()
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(14) >= 5).long()[None]
    assert_same(target, padded, drafter_for(target, text, drafter), drafter, attention_mask=mask)


def test_padding_is_no_context(prompt):
    """The same drafts with padding as without: a real drafter sees neither the pads nor their positions."""
    logs = []
    for padding in (0, 5):
        drafter = make_drafter(shared())
        padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
        mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
        settings = config(max_new_tokens=24, dspark_schedule="fixed", dspark_log=True)
        shared().generate(padded, attention_mask=mask, assistant_model=drafter, generation_config=settings)
        logs.append([(position, drafts, accepted) for position, drafts, _, accepted in drafter.statistics.log])
    assert logs[0] == logs[1] and len(logs[0]) > 3


@pytest.mark.parametrize("mask", [None, torch.ones(1, 9, dtype=torch.long)], ids=["none", "ones"])
@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_attention_mask_may_be_left_out(prompt, mask, drafter):
    assert_same(shared(), prompt, drafter_for(shared(), text_of(), drafter), drafter, attention_mask=mask)


@pytest.mark.parametrize("drafter", ["oracle", "alternating", "random"])
def test_explicit_position_ids(prompt, drafter):
    positions = torch.arange(100, 109)[None]
    text = shared().generate(prompt, generation_config=config(max_new_tokens=64), position_ids=positions)[0].tolist()
    made = make_drafter(shared()) if drafter == "random" else following(shared(), text, drafter, shift=100)
    assert_same(shared(), prompt, made, drafter, position_ids=positions)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 9, dtype=torch.long)], ids=["none", "ones"])
@pytest.mark.parametrize("drafter", ["oracle", "alternating", "random"])
def test_inputs_embeds_only(prompt, drafter, mask):
    made = drafter_for(shared(), text_of(), drafter)
    embeds = shared().get_input_embeddings()(prompt).detach()
    out = assert_same(shared(), None, made, drafter, inputs_embeds=embeds, attention_mask=mask)
    assert out[0].tolist() == text_of()[9 : 9 + NEW]


@pytest.mark.parametrize("padding", [0, 3])
def test_inputs_embeds_with_ids(prompt, padding):
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
    inputs = {"inputs_embeds": shared().get_input_embeddings()(padded).detach()}
    inputs["attention_mask"] = (torch.arange(padded.shape[1]) >= padding).long()[None]
    assert_same(shared(), padded, following(shared(), text_of()), "oracle", **inputs)


def test_padded_inputs_embeds_without_ids_are_refused(prompt):
    """The host's assisted loop would cut the mask to the ids, of which there are none."""
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    inputs = {"inputs_embeds": shared().get_input_embeddings()(padded).detach()}
    inputs["attention_mask"] = (torch.arange(12) >= 3).long()[None]
    with pytest.raises(ValueError, match="`inputs_embeds`"):
        shared().generate(
            **inputs, assistant_model=following(shared(), text_of()), generation_config=config(max_new_tokens=4)
        )


@pytest.mark.parametrize("drafter", ["oracle", "alternating", "random"])
@pytest.mark.parametrize("image", [True, False])
def test_a_multimodal_target(image, drafter):
    """The text model is nested, and behind an image its rope positions are no longer the places in the text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 4, "num_heads": 2, "out_hidden_size": 32}
    ids = {"image_token_id": 63, "video_token_id": 62, "vision_start_token_id": 61, "vision_end_token_id": 60}
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            "qwen2_5_vl", text_config={**COMMON, "rope_parameters": rope}, vision_config=vision, bos_token_id=1, **ids
        )
    ).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    target.generation_config.update(pad_token_id=0, eos_token_id=None)
    prompt = torch.tensor([[5, 6, 61] + ([63] * 16 if image else [12]) + [60, 7, 8, 9]])
    pixels = {"pixel_values": torch.randn(64, 1176, generator=seeded(0)), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    text = plain(target, prompt, max_new_tokens=64, **(pixels if image else {}))[0].tolist()
    made = drafter_for(target, text, drafter)
    assert_same(target, prompt, made, drafter, expected=text, **(pixels if image else {}))


@pytest.mark.parametrize("drafter", ["oracle", "never"])
def test_drafts_stop_at_the_last_position_of_the_target(drafter):
    """A target with learned positions has none behind its last: drafts must not reach past it where the call's limit
    would let them, since the text itself ends at an EOS before."""
    sizes = {
        "n_positions": 32,
        "max_position_embeddings": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    }
    target = make_target("gpt2", **sizes)
    prompt = torch.randint(3, VOCAB, (1, 20), generator=seeded(1))
    text = plain(target, prompt, max_new_tokens=12)[0].tolist()
    end = next(i for i in range(27, 32) if text[i] not in text[20:i])
    made = following(target, text, drafter)
    expected = text[: end + 1]
    assert_same(target, prompt, made, None, expected=expected, max_new_tokens=100, eos_token_id=text[end])


SWITCHING_ROPES = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 24},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("rope", SWITCHING_ROPES)
@pytest.mark.parametrize("drafter", ["oracle", "alternating", "random"])
@pytest.mark.parametrize("seed", [4, 5])
def test_a_rope_that_changes_with_the_length(prompt, rope, drafter, seed):
    """Where a forward's longest position sets the rotation of all its tokens, no block may reach over the change:
    behind 24 tokens once and for all with `longrope`, with every token with `dynamic` scaling."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, **SWITCHING_ROPES[rope]}
    sizes = {"max_position_embeddings": 24 if rope == "dynamic" else 96, "rope_parameters": parameters}
    text = plain(make_target("llama", seed, **sizes), prompt, max_new_tokens=60)[0].tolist()
    target = make_target("llama", seed, **sizes)  # `dynamic` remembers the longest position it has seen
    made = drafter_for(target, text, drafter)
    assert_same(target, prompt, made, None, expected=text, max_new_tokens=60)
    assert made.statistics.rounds > 1


# ---- processors that act on the target

PROCESSORS = {  # of the text without them
    "repetition_penalty": lambda text: {"repetition_penalty": 1.5},
    "no_repeat_ngram": lambda text: {"no_repeat_ngram_size": 2},
    "penalty_and_ngram": lambda text: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "bad_words": lambda text: {"bad_words_ids": [text[12:13], text[15:17]]},
    "suppress": lambda text: {"suppress_tokens": list(range(10, 40))},
    "sequence_bias": lambda text: {"sequence_bias": [[text[12:13], -30.0], [text[15:17], -30.0]]},
}


@pytest.mark.parametrize(
    ("drafter", "where"),
    [("oracle", "call"), ("alternating", "call"), ("never", "call"), ("alternating", "target"), ("random", "target")],
)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(prompt, name, drafter, where):
    """From the call or from the target's generation config; drafts are right or wrong against the text they make."""
    target, values = lively_target(), PROCESSORS[name](text_of())
    text = plain(target, prompt, max_new_tokens=64, **values)[0].tolist()
    assert text[:41] != text_of()[:41]  # the processor does something
    made = drafter_for(target, text, drafter)
    if where == "call":
        assert_same(target, prompt, made, drafter, expected=text, **values)
    else:
        for key, value in values.items():
            setattr(target.generation_config, key, value)
        assert_same(target, prompt, made, drafter, expected=text)


@pytest.mark.parametrize("drafter", ["oracle", "never", "random"])
def test_prefix_allowed_tokens(prompt, drafter):
    def allowed(batch, ids):
        return [11, 12] if len(ids) < 15 else list(range(20, 50)) if len(ids) % 2 else list(range(3, VOCAB))

    text = plain(shared(), prompt, max_new_tokens=64, prefix_allowed_tokens_fn=allowed)[0].tolist()
    made = drafter_for(shared(), text, drafter)
    out = assert_same(shared(), prompt, made, drafter, prefix_allowed_tokens_fn=allowed)
    assert set(out[0, 9:15].tolist()) <= {11, 12}


def test_a_custom_processor_sees_what_it_sees_in_plain_decoding(prompt):
    """Two-dimensional scores, and ids up to the position that is scored, drafts included."""
    seen = []

    def spy(ids, scores):
        seen.append((tuple(ids.shape), tuple(scores.shape)))
        return scores.roll(1, dims=-1) if ids.shape[1] % 3 == 0 else scores

    text = plain(shared(), prompt, max_new_tokens=64, logits_processor=[spy])[0].tolist()
    seen.clear()
    made = following(shared(), text, "alternating")
    assert_same(shared(), prompt, made, "alternating", expected=text, logits_processor=[spy])
    assert all(ids[0] == 1 and scores == (1, VOCAB) for ids, scores in seen)
    assert {ids[1] for ids, _ in seen} == set(range(9, 9 + NEW))


@pytest.mark.parametrize("least", [5, 20])
@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_min_new_tokens(prompt, least, drafter):
    """An EOS that is not allowed yet, drafted all the same."""
    eos = text_of()[12]
    made = drafter_for(shared(), text_of(), drafter)
    out = assert_same(shared(), prompt, made, None, eos_token_id=eos, min_new_tokens=least)
    assert eos not in out[0, 9 : 9 + least]


def test_forced_eos_at_the_limit(prompt):
    out = assert_same(shared(), prompt, following(shared(), text_of()), None, forced_eos_token_id=2)
    assert out[0, -1] == 2
