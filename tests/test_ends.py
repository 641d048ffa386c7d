"""Where a call ends, and what it returns: the same place and the same things as plain decoding, in mid block too."""

import threading
from functools import cache

import pytest
import torch
from conftest import VOCAB, config, following, lively_target, make_drafter, plain
from same import characters
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from dspark.candidate_generator import DSparkCandidateGenerator
from dspark.candidate_generator.cost_table_dspark import cache_argument


NEW = 30
# The prompt's forward gives new token 0; an oracle's first block is new tokens 1 to 7, its bonus token number 8. So
# block index k is new token 1 + k, and 7 stands for the bonus token.
BLOCK_INDICES = (0, 3, 6, 7)


@cache
def case(family: str):
    """A target, a prompt and its plain text, the first ten new tokens of which are all different."""
    target = lively_target(family)
    for seed in range(200):
        prompt = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(seed))
        if len(set(plain(target, prompt, max_new_tokens=10)[0, 9:].tolist())) == 10:
            return target, prompt, plain(target, prompt, max_new_tokens=64)[0].tolist()
    raise AssertionError("no such prompt")


def drafter_for(family: str, kind: str, **overrides):
    target, _, text = case(family)
    return make_drafter(target, **overrides) if kind == "random" else following(target, text, kind, **overrides)


def generate(target, prompt, drafter=None, schedule="fixed", **kwargs):
    settings = {"max_new_tokens": NEW, **kwargs}
    return target.generate(
        prompt, assistant_model=drafter, generation_config=config(dspark_schedule=schedule), **settings
    )


def assert_same_end(drafter, family="llama", ends_at=None, **kwargs):
    """Equal ids, and as many of them as the test means to have."""
    target, prompt, text = case(family)
    expected = generate(target, prompt, **kwargs)[0].tolist()
    assert ends_at is None or expected == text[: 9 + ends_at + 1]
    assert generate(target, prompt, drafter, **kwargs)[0].tolist() == expected
    statistics = drafter.statistics
    assert statistics.drafted > 0
    assert statistics.generated == len(expected) - 9
    # Drafts that count as taken are in the text. The rest is one token of the target's a forward, less one where a
    # draft ends the text.
    forwards = 1 + statistics.rounds + statistics.plain_rounds
    assert 0 <= forwards - (statistics.generated - statistics.accepted) <= 1
    assert sum(statistics.accepted_per_slot) == statistics.accepted
    assert all(o <= a for o, a in zip(statistics.offered_per_slot[1:], statistics.accepted_per_slot))
    return expected


# ---- EOS, stop strings, criteria


EOS_FORMS = {"int": lambda eos: eos, "list": lambda eos: [2, eos], "list of one": lambda eos: [eos]}


@pytest.mark.parametrize("form", EOS_FORMS)
@pytest.mark.parametrize("index", BLOCK_INDICES)
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never", "random"])
def test_eos(kind, index, form):
    eos = case("llama")[2][9 + 1 + index]
    assert_same_end(drafter_for("llama", kind), ends_at=1 + index, eos_token_id=EOS_FORMS[form](eos))


@pytest.mark.parametrize("index", BLOCK_INDICES)
@pytest.mark.parametrize("form", EOS_FORMS)
def test_eos_from_the_targets_generation_config(index, form):
    target, prompt, text = case("llama")
    drafter = drafter_for("llama", "oracle")
    target.generation_config.eos_token_id = EOS_FORMS[form](text[10 + index])
    try:
        assert_same_end(drafter, ends_at=1 + index)
    finally:
        target.generation_config.eos_token_id = None


def test_no_eos_at_all():
    assert len(assert_same_end(drafter_for("llama", "oracle"), eos_token_id=None)) == 9 + NEW


@pytest.mark.parametrize("whole", [False, True])
def test_a_draft_is_cut_behind_an_eos_never_before_it(monkeypatch, whole):
    """What would follow is not verified, and the EOS is, so that a right one ends the call in this round. Slot by slot
    as on a CPU, and in whole blocks as on an accelerator."""
    switch = property(lambda self: whole, lambda self, value: None)
    monkeypatch.setattr(DSparkCandidateGenerator, "whole_block", switch, raising=False)
    target, prompt, text = case("llama")
    drafter = drafter_for("llama", "oracle")
    generate(target, prompt, drafter, eos_token_id=text[9 + 4])
    assert drafter.statistics.lengths == {4: 1} and drafter.statistics.accepted == 4
    assert drafter.statistics.drafted == (7 if whole else 4)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("index", BLOCK_INDICES)
@pytest.mark.parametrize("kind", ["oracle", "alternating", "random"])
def test_stop_strings(kind, index, length):
    """Of one token, or spread over several, the last of them at each index of the block."""
    text = case("llama")[2]
    stop = characters().decode(text[10 + index - length + 1 : 10 + index + 1])
    assert len(stop) == length
    ends_at = None if length > 1 + index + 1 else 1 + index
    given = {"stop_strings": [stop, "never seen"], "tokenizer": characters()}
    assert_same_end(drafter_for("llama", kind), ends_at=ends_at, **given)


def test_stop_strings_from_the_targets_generation_config():
    target, prompt, text = case("llama")
    drafter = drafter_for("llama", "oracle")
    target.generation_config.stop_strings = [characters().decode(text[12:14])]
    try:
        assert_same_end(drafter, ends_at=4, tokenizer=characters())
    finally:
        target.generation_config.stop_strings = None


@pytest.mark.parametrize("index", BLOCK_INDICES)
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never", "random"])
@pytest.mark.parametrize("scores", [False, True])
def test_a_custom_criterion_sees_every_prefix_once(kind, index, scores):
    """In order, verified tokens only, with as many scores as plain decoding shows it."""
    target, prompt, text = case("llama")
    seen: list = []

    def criterion(ids, scores, **kwargs):
        seen.append((ids[0].tolist(), None if scores is None else len(scores)))
        return torch.tensor([ids.shape[1] > 10 and ids[0, -2:].tolist() == text[9 + index : 11 + index]])

    extra = {"stopping_criteria": [criterion]}
    if scores:
        extra |= {"output_scores": True, "return_dict_in_generate": True}
    expected = generate(target, prompt, **extra)
    plain_view, seen[:] = list(seen), []
    drafter = drafter_for("llama", kind)
    out = generate(target, prompt, drafter, **extra)
    if scores:
        expected, out = expected.sequences, out.sequences
    assert torch.equal(out, expected) and out.shape[1] == 11 + index
    assert seen == plain_view
    assert drafter.statistics.drafted > 0


def test_two_criteria_and_the_first_hit():
    """The earlier of an EOS and a criterion ends the call, in whichever order they come within the block."""
    text = case("llama")[2]
    for eos_at, criterion_at in ((3, 5), (5, 3)):

        def criterion(ids, scores, at=criterion_at, **kwargs):
            return torch.tensor([ids.shape[1] >= 9 + at + 1])

        given = {"eos_token_id": text[9 + eos_at], "stopping_criteria": [criterion]}
        assert_same_end(drafter_for("llama", "oracle"), ends_at=3, **given)


@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
def test_a_sampled_text_ends_at_its_first_eos(schedule):
    target, prompt, text = case("llama")
    drafter, eos, ended = drafter_for("llama", "random"), [5, 19, 20, 31], 0
    for seed in range(10):
        torch.manual_seed(seed)
        out = generate(target, prompt, drafter, schedule, eos_token_id=eos, do_sample=True, temperature=3.0, top_k=0)[
            0, 9:
        ].tolist()
        hits = [i for i, token in enumerate(out) if token in eos]
        assert hits in ([], [len(out) - 1]) and (hits or len(out) == NEW)
        ended += bool(hits)
    assert ended > 3


# ---- streamers


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


LIMITS = {
    "eos in mid block": {"eos": 4},
    "criterion in mid block": {"stop_at": 5},
    "limit in mid block": {"max_new_tokens": 13},
    "limit behind the prompt": {"max_new_tokens": 1},
}


def settings_of(limit: dict) -> dict:
    text, out = case("llama")[2], {"max_new_tokens": limit.get("max_new_tokens", NEW)}
    if "eos" in limit:
        out["eos_token_id"] = text[9 + limit["eos"]]
    if "stop_at" in limit:
        out["stopping_criteria"] = [lambda ids, scores, **_: torch.tensor([ids.shape[1] > 9 + limit["stop_at"]])]
    return out


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never"])
def test_a_streamer_gets_each_token_once(kind, limit):
    """The prompt first, then token by token, then one `end`: what plain decoding sends, to the last call."""
    target, prompt, _ = case("llama")
    ours, theirs = Recorder(), Recorder()
    drafter = drafter_for("llama", kind)
    generate(target, prompt, streamer=theirs, **settings_of(LIMITS[limit]))
    generate(target, prompt, drafter, streamer=ours, **settings_of(LIMITS[limit]))
    assert ours.puts == theirs.puts and ours.ends == theirs.ends == 1
    assert (drafter.statistics.drafted > 0) == (limit != "limit behind the prompt")


@pytest.mark.parametrize("limit", LIMITS)
def test_text_iterator_streamer_in_a_thread(limit):
    target, prompt, _ = case("llama")
    settings = settings_of(LIMITS[limit])
    expected = characters().decode(generate(target, prompt, **settings)[0, 9:])
    streamer = TextIteratorStreamer(characters(), skip_prompt=True, timeout=60)
    drafter = drafter_for("llama", "oracle")
    thread = threading.Thread(
        target=generate, args=(target, prompt, drafter), kwargs={"streamer": streamer, **settings}
    )
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


# ---- what a dict holds


def assert_close_nested(ours, theirs, where: str):
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.shape == theirs.shape, where
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    elif ours is not None:
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs)):
            assert_close_nested(a, b, f"{where}[{i}]")


@pytest.mark.parametrize("limit", [name for name in LIMITS if name != "limit behind the prompt"])
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never"])
@pytest.mark.parametrize("processed", [False, True])
def test_dict_outputs(kind, limit, processed):
    """Scores, logits, hidden states: one entry a token, plain decoding's shapes and values."""
    target, prompt, _ = case("llama")
    extra = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    extra |= {"output_hidden_states": True, **settings_of(LIMITS[limit])}
    drafter = drafter_for("llama", kind)
    if processed:  # scores are behind the processors, logits before them
        extra["sequence_bias"] = [[[7], -0.5]]
    theirs = generate(target, prompt, **extra)
    ours = generate(target, prompt, drafter, **extra)
    assert drafter.statistics.drafted > 0 and type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_close_nested(ours.get(name), theirs.get(name), name)
    assert len(ours.scores) == len(ours.hidden_states) == ours.sequences.shape[1] - 9
    assert processed == (not torch.equal(ours.scores[0], ours.logits[0]))


@pytest.mark.parametrize("kind", ["oracle", "alternating", "never"])
@pytest.mark.parametrize("limit", ["eos in mid block", "criterion in mid block", "limit in mid block"])
def test_attentions(kind, limit):
    _, prompt, text = case("llama")
    target = lively_target("llama", attn_implementation="eager")
    extra = {"return_dict_in_generate": True, "output_attentions": True, **settings_of(LIMITS[limit])}
    drafter = following(target, text, kind)
    ours, theirs = generate(target, prompt, drafter, **extra), generate(target, prompt, **extra)
    assert drafter.statistics.drafted > 0
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close_nested(ours.attentions, theirs.attentions, "attentions")


# ---- the returned cache


def contents(cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("limit", [name for name in LIMITS if name != "limit behind the prompt"])
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never", "random"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_the_returned_cache_is_plain_decodings(family, kind, limit):
    """In length and content, sliding-window layers included; and plain decoding can go on from it."""
    target, prompt, text = case(family)
    settings = settings_of(LIMITS[limit])
    if "eos_token_id" in settings:
        settings["eos_token_id"] = text[9 + LIMITS[limit]["eos"]]
    drafter = drafter_for(family, kind)
    theirs = generate(target, prompt, return_dict_in_generate=True, **settings)
    ours = generate(target, prompt, drafter, return_dict_in_generate=True, **settings)
    assert drafter.statistics.drafted > 0
    assert torch.equal(ours.sequences, theirs.sequences)
    ours_cache, theirs_cache = (out.get("cache") or out.past_key_values for out in (ours, theirs))
    assert ours_cache.get_seq_length() == theirs_cache.get_seq_length() == ours.sequences.shape[1] - 1
    for layer, (a, b) in enumerate(zip(contents(ours_cache), contents(theirs_cache))):
        assert a[0].shape == b[0].shape, f"layer {layer}"
        for one, other in zip(a, b):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    length = ours.sequences.shape[1]
    more = target.generate(
        ours.sequences, generation_config=config(max_new_tokens=12), **{cache_argument(target): ours_cache}
    )
    assert more[0].tolist() == text[: length + 12]


@pytest.mark.parametrize("kind", ["oracle", "alternating", "never"])
def test_windowed_layers_stay_bounded(kind):
    """At most the window and a block, at every round, however long the text."""
    target, prompt, text = case("mistral")
    widths = []

    def spy(module, args, kwargs, output):
        cache = kwargs.get("cache") or kwargs["past_key_values"]
        widths.append(max(layer.keys.shape[2] for layer in cache.layers))

    handle = target.register_forward_hook(spy, with_kwargs=True)
    try:
        generate(target, prompt, drafter_for("mistral", kind), max_new_tokens=54)
    finally:
        handle.remove()
    assert len(widths) > 6 and max(widths) <= target.config.sliding_window + 7 + 1
