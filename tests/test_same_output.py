"""The text with a drafter is the text without one: fp32, greedy, against plain `generate` with the same arguments.

Every test asserts that tokens were drafted; those with an oracle also that its drafts were taken, since a drafter that
is out of step with the text would pass as one that never hits.
"""

import pytest
import torch
from conftest import TARGETS, VOCAB, config, following, lively_target, make_drafter, make_target, plain, with_lora
from same import KINDS, NEW, assert_same, drafter_for, seeded, shared, text_of

from dspark.candidate_generator import CostTable, DSparkCandidateGenerator


# ---- targets and drafters


@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("family", TARGETS)
def test_families(prompt, family, drafter, schedule):
    """Past the sliding window of 8 that Gemma 3 and Mistral have here."""
    target, text = shared(family), text_of(family)
    assert len(set(text[9:41])) > 8  # no constant text, in which any position is as good as another
    assert_same(target, prompt, drafter_for(target, text, drafter), drafter, schedule, expected=text)


@pytest.mark.parametrize("drafter", ["oracle", "alternating", "never"])
def test_a_target_with_short_convolutions(prompt, drafter):
    """Their state is rolled back behind a rejected draft (LFM2)."""
    layers = {"layer_types": ["conv", "full_attention"] * 2, "block_dim": 32, "block_multiple_of": 16}
    target = make_target("lfm2", **layers)
    text = plain(target, prompt, max_new_tokens=64)[0].tolist()
    assert_same(target, prompt, following(target, text, drafter), drafter, expected=text)


@pytest.mark.parametrize("drafter", KINDS)
def test_a_prompt_of_one_token(drafter):
    made = drafter_for(shared(), text_of(start=(10,)), drafter)
    assert_same(shared(), torch.tensor([[10]]), made, drafter, max_new_tokens=64)


@pytest.mark.parametrize("drafter", ["oracle", "alternating", "random"])
@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_block_sizes(prompt, block, drafter):
    made = drafter_for(shared(), text_of(), drafter, block_size=block)
    # One draft a round, and two tokens after a right one: the alternating drafter stays right then.
    assert_same(shared(), prompt, made, drafter if block > 1 else None, expected=text_of())
    assert max(made.statistics.lengths) == block


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("drafter", ["oracle", "never"])
def test_short_calls(prompt, drafter, tokens):
    made = drafter_for(shared(), text_of(), drafter)
    settings = config(max_new_tokens=tokens, dspark_schedule="fixed")
    out = shared().generate(prompt, assistant_model=made, generation_config=settings)
    assert torch.equal(out, plain(shared(), prompt, max_new_tokens=tokens))
    # The prompt's forward gives one token and every later one a token of the target's: the rest may be drafted.
    assert (made.statistics.drafted > 0) == (tokens > 2)
    assert made.statistics.generated == tokens
    if drafter == "oracle":
        assert made.statistics.verified == max(0, min(7, tokens - 2))


def test_max_length_counts_the_prompt(prompt):
    drafter = following(shared(), text_of())
    settings = config(max_length=20, dspark_schedule="fixed")
    out = shared().generate(prompt, assistant_model=drafter, generation_config=settings)
    assert out[0].tolist() == text_of()[:20] and drafter.statistics.accepted > 0


def test_a_long_text_with_rests(prompt):
    drafter = following(shared(), text_of(), "never")
    assert_same(shared(), prompt, drafter, "never", "throughput", expected=text_of(), max_new_tokens=140)
    assert drafter.statistics.rests["drafting did not pay"] > drafter.statistics.rounds > 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_drafter_that_turns_right_after_a_rest(prompt, family):
    """Wrong for 20 tokens, then right: drafting comes back, with what it needs of the rest."""
    made = following(shared(family), text_of(family))
    right = made.script
    made.script = lambda position: right(position) if position > 30 else (right(position) + 1) % VOCAB
    assert_same(shared(family), prompt, made, None, "throughput", text_of(family), max_new_tokens=140)
    assert made.statistics.rests["drafting did not pay"] > 0 and made.statistics.accepted > 20


def test_a_real_drafters_confidence_chooses_among_lengths(prompt):
    drafter = make_drafter(shared())
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(20.0)
    assert_same(shared(), prompt, drafter, None, "threshold", text_of(), max_new_tokens=64)
    assert len(drafter.statistics.lengths) >= 3


# ---- what a round may verify


def test_num_assistant_tokens_caps_without_changing_the_drafts(prompt):
    """The backbone drafts its whole block whatever the cap, so the first drafts are the same."""
    drafter = make_drafter(shared())

    def log(**values):
        settings = config(max_new_tokens=24, dspark_schedule="fixed", dspark_log=True, **values)
        out = shared().generate(prompt, assistant_model=drafter, generation_config=settings)
        assert out[0].tolist() == text_of()[:33]
        return {position: drafts for position, drafts, _, _ in drafter.statistics.log}

    whole = log()
    for cap in range(1, 7):
        capped = log(num_assistant_tokens=cap)
        assert max(map(len, capped.values())) == cap
        shared_rounds = capped.keys() & whole.keys()
        assert len(shared_rounds) > 5 and all(capped[at] == whole[at][:cap] for at in shared_rounds)


@pytest.mark.parametrize("cap", [1, 2, 3, 6, 19])
@pytest.mark.parametrize("drafter", ["oracle", "alternating"])
def test_the_text_does_not_depend_on_the_cap(prompt, cap, drafter):
    made = drafter_for(shared(), text_of(), drafter)
    assert_same(shared(), prompt, made, drafter if cap > 1 else None, expected=text_of(), num_assistant_tokens=cap)
    assert max(made.statistics.lengths) == min(cap, 7)


def test_a_cap_of_zero_drafts_nothing(prompt):
    drafter = following(shared(), text_of())
    settings = config(max_new_tokens=16, num_assistant_tokens=0)
    out = shared().generate(prompt, assistant_model=drafter, generation_config=settings)
    assert out[0].tolist() == text_of()[:25]
    assert drafter.statistics.drafted == 0 and drafter.statistics.rests == {"num_assistant_tokens is 0": 15}


def test_a_reduced_vocabulary(prompt):
    """An oracle over some of the text's ids: it drafts in the target's ids, and never one that was not kept."""
    text = text_of()
    kept = sorted(set(text[9:41]))[1::2]
    drafter = following(shared(), text, "oracle", draft_vocab_size=len(kept))
    drafter.d2t.copy_(torch.tensor(kept) - torch.arange(len(kept)))
    right = drafter.script
    drafter.script = lambda position: kept.index(right(position)) if right(position) in kept else 0
    settings = config(max_new_tokens=NEW, dspark_schedule="fixed", dspark_log=True)
    out = shared().generate(prompt, assistant_model=drafter, generation_config=settings)
    assert out[0].tolist() == text[: 9 + NEW]
    assert 0 < drafter.statistics.accepted < drafter.statistics.verified
    drafts = {token for _, tokens, _, _ in drafter.statistics.log for token in tokens}
    assert len(drafts) > 3 and drafts <= set(kept)


@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_the_target_may_say_the_mask_token(prompt, drafter):
    spoken = text_of()[9:40]
    mask = max(set(spoken), key=spoken.count)
    made = drafter_for(shared(), text_of(), drafter, mask_token_id=mask)
    out = assert_same(shared(), prompt, made, drafter, expected=text_of())
    assert (out[0, 9:] == mask).sum() > 1


# ---- how target and drafter compute


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("drafter", ["alternating", "random"])
def test_eager_attention(prompt, family, drafter):
    target = lively_target(family, attn_implementation="eager")
    assert target.config._attn_implementation == "eager"
    made, statistics = drafter_for(target, text_of(family), drafter), []
    for attention in ("eager", "sdpa"):
        made.set_attn_implementation(attention)
        assert_same(target, prompt, made, drafter, expected=text_of(family))
        statistics.append((made.statistics.lengths, made.statistics.accepted))
    assert statistics[0] == statistics[1]


@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
def test_sliding_draft_layers(prompt, first):
    made = make_drafter(shared(), sliding_window=6, layer_types=[first, "sliding_attention"])
    assert_same(shared(), prompt, made, expected=text_of())


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"]])
@pytest.mark.parametrize(("drafter", "tied"), [("oracle", False), ("alternating", True), ("random", True)])
@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")
def test_lora_targets(prompt, modules, drafter, tied):
    """With the adapter, with it off, and merged: each time the text of what the target is then."""
    target = lively_target(tie_word_embeddings=tied)
    bare = plain(target, prompt, max_new_tokens=48)[0].tolist()
    wrapped = with_lora(target, modules)
    text = plain(wrapped, prompt, max_new_tokens=48)[0].tolist()
    assert text[:33] != bare[:33]
    made = drafter_for(target, text, drafter)
    assert_same(wrapped, prompt, made, drafter, expected=text, max_new_tokens=24)
    with wrapped.disable_adapter():
        assert_same(wrapped, prompt, made, expected=bare, max_new_tokens=24)
    merged = wrapped.merge_and_unload()
    text = plain(merged, prompt, max_new_tokens=48)[0].tolist()
    assert_same(merged, prompt, drafter_for(merged, text, drafter), drafter, expected=text, max_new_tokens=24)


@pytest.mark.parametrize("drafter", ["alternating", "random"])
def test_a_drafter_in_bf16(prompt, drafter):
    assert_same(shared(), prompt, drafter_for(shared(), text_of(), drafter).bfloat16(), drafter, expected=text_of())


@pytest.mark.parametrize("seed", range(4))
def test_bf16_targets_differ_at_near_ties_only(seed):
    """A forward over 8 tokens rounds otherwise than one over 1; only the nearest of choices may turn on that."""
    target = make_target("llama", seed=seed).bfloat16()
    prompt = torch.randint(3, VOCAB, (1, 9), generator=seeded(seed))
    expected = plain(target, prompt, max_new_tokens=64)[0]
    drafter = following(target, expected.tolist(), "alternating")
    settings = config(max_new_tokens=64, dspark_schedule="fixed")
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings)[0]
    assert out.shape == expected.shape and drafter.statistics.accepted > 0
    if not torch.equal(out, expected):
        at = int((out != expected).nonzero()[0])
        with torch.no_grad():
            first, second = target(expected[None, :at]).logits[0, -1].float().topk(2).values.tolist()
        assert first - second <= 4 * 2**-8 * abs(first)  # four units in the last place of bf16


# ---- an accelerator's way of drafting, on a CPU


@pytest.mark.parametrize("schedule", ["fixed", "threshold", "throughput"])
@pytest.mark.parametrize("drafter", KINDS)
def test_whole_blocks_choose_the_same(prompt, monkeypatch, drafter, schedule):
    """Drafting all slots and reading the length once gives the lengths of the slot-by-slot loop."""
    runs = []
    for whole in (False, True):
        switch = property(lambda self, whole=whole: whole, lambda self, value: None)
        monkeypatch.setattr(DSparkCandidateGenerator, "whole_block", switch, raising=False)
        made = drafter_for(shared(), text_of(), drafter, cost_table=CostTable.from_costs({1: 1.0, 8: 2.0}, draft=0.1))
        if drafter == "random":
            with torch.no_grad():
                made.confidence_head.proj.weight.mul_(10.0)
        else:
            made.confidence = lambda slot: (0.95, 0.9, 0.8, 0.6, 0.7, 0.3, 0.9)[slot]
        assert_same(shared(), prompt, made, None, schedule, text_of())
        runs.append(made.statistics)
    slots, blocks = runs
    assert slots.lengths == blocks.lengths and slots.accepted == blocks.accepted
    assert slots.drafted == slots.verified
    assert blocks.drafted > blocks.verified or schedule == "fixed"
