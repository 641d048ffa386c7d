"""What goes into a call with a batch and what comes out of it: masks, positions, streams, refusals, statistics."""

import pytest
import torch
from conftest import config, lively_target, make_drafter
from many import (
    NEW,
    ByRowLength,
    LastToken,
    assert_rows,
    assisted,
    ends_of,
    plain,
    ragged,
    rows_drafter,
    shared_target,
    texts_of,
    unused_id,
)
from same import characters
from transformers.generation import BaseStreamer

from dspark.candidate_generator import decoding_dspark


@pytest.fixture(scope="module")
def target():
    """One whose texts repeat little."""
    return lively_target()


@pytest.fixture
def batch():
    """Four prompts, the longest padded nowhere."""
    ids, mask = ragged((9, 3, 14, 6))
    return {"input_ids": ids, "attention_mask": mask}


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        self.puts.append((value.dtype, value.tolist()))

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", ["oracle", "alternating"])
@pytest.mark.parametrize("ends", ["eos", "criterion", "some", "length"])
def test_a_streamer_gets_the_columns_of_plain_decoding(target, batch, kind, ends):
    texts = texts_of(target, batch)
    settings = {
        "eos": {"eos_token_id": ends_of(texts, batch, (5, 9, 3, 12))},
        "criterion": {"stopping_criteria": [ByRowLength()]},
        "some": {"stopping_criteria": [LastToken(ends_of(texts, batch, (4, 6, 2, 11))[:2])]},
        "length": {},
    }[ends]
    drafter, theirs, mine = rows_drafter(target, texts, kind), Recorder(), Recorder()
    plain(target, batch, streamer=theirs, **settings)
    out = assisted(target, batch, drafter, streamer=mine, **settings)
    assert mine.puts == theirs.puts and mine.ended == theirs.ended == 1 and drafter.statistics.drafted > 0
    assert [row for _, row in mine.puts[1:]] == out[:, 14:].t().tolist()


def test_a_streamer_sees_tokens_while_the_others_are_written(target, batch):
    """Not all at the end: the first column is there when the target has run twice."""
    seen, drafter = [], rows_drafter(target, texts_of(target, batch), "never")

    class Counts(Recorder):
        def put(self, value):
            seen.append(forwards[0])

    forwards = [0]
    assisted(target, batch, drafter)  # a first call may ask the target more
    handle = target.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    assisted(target, batch, drafter, streamer=Counts())
    handle.remove()
    assert seen == [0, *range(1, NEW + 1)]


def test_masks(target, batch):
    """Ones, none, and none with padding in front, which the host takes for a mask of its own."""
    ids, _ = ragged((9, 9, 9))
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    texts = texts_of(target, whole)
    for inputs in (whole, {"input_ids": ids}):
        assert_rows(target, inputs, rows_drafter(target, texts, "oracle"), "oracle")
    texts = texts_of(target, batch)
    for dtype in (torch.bool, torch.float32):
        inputs = {**batch, "attention_mask": batch["attention_mask"].to(dtype)}
        assert_rows(target, inputs, rows_drafter(target, texts, "oracle"), "oracle")
    assert_rows(target, {"input_ids": batch["input_ids"]}, rows_drafter(target, texts, "oracle"), "oracle")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("shift", [0, 4])
def test_explicit_positions(batch, family, shift):
    """Learned positions tell where a text starts."""
    target = shared_target(family)
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + shift * torch.tensor([[0], [1], [2], [3]])
    texts = texts_of(target, batch, position_ids=positions)
    if family == "gpt2":
        assert (texts != texts_of(target, batch)) == (shift > 0)
    drafter = rows_drafter(target, texts, "oracle", firsts=[shift * row for row in range(4)])
    assert_rows(target, batch, drafter, "oracle", position_ids=positions)


def test_the_same_prompt_in_every_row(target, prompt):
    ids = prompt.expand(3, -1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = assert_rows(target, batch, rows_drafter(target, texts_of(target, batch), "oracle"), "oracle")
    assert torch.equal(out[0], out[2])


def test_several_texts_of_a_prompt(target, batch, prompt):
    drafter = make_drafter(target)
    sampling = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    for inputs, rows in (({"input_ids": prompt}, 3), (batch, 12)):
        outs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append(assisted(target, inputs, drafter, **sampling))
            assert drafter.statistics.drafted > 0
        length = inputs["input_ids"].shape[1]
        assert outs[0].shape == (rows, length + 12)
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
        assert torch.equal(outs[0][:, :length], inputs["input_ids"].repeat_interleave(3, dim=0))
        assert len({tuple(row) for row in outs[0][:3].tolist()}) == 3
    with pytest.raises(ValueError, match="[Gg]reedy.*num_return_sequences"):  # the host's own
        assisted(target, batch, drafter, num_return_sequences=3)


def test_sampled_rows_that_cannot_differ(target, batch):
    """Top-k of 1 is greedy decoding through the sampling code."""
    settings = {"do_sample": True, "top_k": 1}
    for kind in ("oracle", "alternating", "random"):
        assert_rows(target, batch, rows_drafter(target, texts_of(target, batch), kind), kind, **settings)


@pytest.mark.parametrize("return_dict", [True, False])
def test_return_dict(target, batch, return_dict):
    drafter = rows_drafter(target, texts_of(target, batch), "oracle")
    expected = plain(target, batch, return_dict_in_generate=return_dict)
    out = assisted(target, batch, drafter, return_dict_in_generate=return_dict)
    assert type(out) is type(expected) and drafter.statistics.accepted > 0
    if return_dict:
        expected, out = expected.sequences, out.sequences
    assert torch.equal(out, expected)


def test_decode_for(target, batch, monkeypatch):
    """With the hook, and through the host's `custom_generate` without it; the shim of a drafter's repo."""
    texts, tokenizer = texts_of(target, batch), characters()
    stop = tokenizer.decode(texts[0][13:15])
    expected = plain(target, batch)
    settings = config(max_new_tokens=NEW, dspark_schedule="fixed", eos_token_id=unused_id(texts))
    stopped = {"stop_strings": [stop], "tokenizer": tokenizer}
    ended = plain(target, batch, eos_token_id=unused_id(texts), **stopped)
    assert not torch.equal(ended, expected)
    shim = {}
    exec(decoding_dspark.CUSTOM_GENERATE, shim)
    for hook in (True, False):
        if not hook:
            monkeypatch.setattr(decoding_dspark, "hook_installed", lambda: False)
        drafter, recorder = rows_drafter(target, texts, "oracle"), Recorder()
        out = drafter.decode_for(target, **batch, generation_config=settings, streamer=recorder)
        assert torch.equal(out, expected) and drafter.statistics.accepted > 0 and recorder.ended == 1
        assert [row for _, row in recorder.puts[1:]] == expected[:, 14:].t().tolist()
        assert torch.equal(drafter.decode_for(target, **batch, generation_config=settings, **stopped), ended)
        drafter.statistics = None
        assert torch.equal(shim["generate"](target, drafter, **batch, generation_config=settings), expected)
        assert drafter.statistics.accepted > 0
        drafter, sampled = make_drafter(target), config(max_new_tokens=5, do_sample=True, num_return_sequences=2)
        assert drafter.decode_for(target, **batch, generation_config=sampled).shape == (8, 19)
        assert drafter.statistics.drafted > 0


# ---- refusals, before anything ran


@pytest.fixture
def forwards(target) -> list:
    ran = []
    handle = target.register_forward_pre_hook(lambda *_: ran.append(True))
    yield ran
    handle.remove()


REFUSED = {
    "right padding": "row 1 has zeros behind its first token.*left",
    "a hole": "row 2 has zeros behind its first token.*left",
    "an all-masked row": "masks the whole prompt of row 3",
    "positions": "`position_ids`.*consecutive",
    "embeddings": "`inputs_embeds`.*once a prompt.*assistant_model",
    **{
        name: f"`{name}`.*call `generate` once a prompt.*assistant_model"
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    },
    "guidance": "`guidance_scale`",
    "no cache": "use_cache",
    "schedule": "`dspark_schedule` is 'always'",
    "threshold": "`dspark_threshold` is 1.5",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(target, batch, forwards, what):
    """Also by a drafter that never met the target, whose first call would probe and profile."""
    drafter, settings = make_drafter(target, cost_table=None), {}
    ids, mask = batch["input_ids"], batch["attention_mask"].clone()
    if what == "right padding":
        mask[1, -2:] = 0
    elif what == "a hole":
        mask[2, 4] = 0
    elif what == "an all-masked row":
        mask[3] = 0
    elif what == "positions":
        settings["position_ids"] = torch.arange(14).expand(4, -1) * 2
    elif what == "embeddings":
        settings["inputs_embeds"] = target.get_input_embeddings()(ids)
    elif what.startswith("output_"):
        settings = {what: True, "return_dict_in_generate": True}
    else:
        settings = {
            "guidance": {"guidance_scale": 1.5},
            "no cache": {"use_cache": False},
            "schedule": {"dspark_schedule": "always"},
            "threshold": {"dspark_threshold": 1.5},
        }[what]
    own = {k: v for k, v in settings.items() if not isinstance(v, torch.Tensor)}
    call = {k: v for k, v in settings.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ValueError, match=REFUSED[what]):
        target.generate(
            ids,
            attention_mask=mask,
            assistant_model=drafter,
            generation_config=config(**{"max_new_tokens": 8, "dspark_schedule": "throughput", **own}),
            **call,
        )
    assert not forwards and drafter.statistics is None


def test_a_drafter_of_another_target_is_refused(target, batch, forwards):
    with pytest.raises(ValueError, match="`num_target_layers` is 2, the target has 4"):
        assisted(target, batch, make_drafter(lively_target(num_hidden_layers=2), target_layer_ids=[0]))
    assert not forwards


# ---- nothing of a call outlives it


def test_a_call_leaves_settings_and_target_as_they_were(target, batch):
    texts, attention = texts_of(target, batch), target.config._attn_implementation
    drafter, settings = rows_drafter(target, texts, "oracle"), config(max_new_tokens=NEW, dspark_schedule="fixed")
    before = settings.to_dict(), target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
    ids, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
    target.generate(**batch, assistant_model=drafter, generation_config=settings)
    target.generate(**batch, assistant_model=drafter, generation_config=settings, do_sample=True)
    after = settings.to_dict(), target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    assert after == before and target.config._attn_implementation == attention
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()) == hooks
    assert torch.equal(batch["input_ids"], ids) and torch.equal(batch["attention_mask"], mask)


def test_calls_of_one_drafter_do_not_touch_each_other(target, batch, prompt):
    """A batch, one prompt, another batch, the first again: each as with a drafter of its own."""
    other = dict(zip(("input_ids", "attention_mask"), ragged((5, 11), seed=3)))
    one, drafter = {"input_ids": prompt}, make_drafter(target)
    seen = []
    for inputs in (batch, one, other, batch):
        texts = []
        for mine in (drafter, make_drafter(target)):
            out = assisted(target, inputs, mine, "throughput")
            counts = {k: v for k, v in mine.statistics.as_dict().items() if not k.endswith("seconds")}
            texts.append((out.tolist(), counts))
        assert texts[0] == texts[1]
        seen.append(texts[0])
    assert seen[-1] == seen[0] and seen[0][1]["drafted"] > 0


@pytest.mark.parametrize("kind", ["oracle", "alternating", "random"])
@pytest.mark.parametrize("schedule", ["fixed", "throughput", "threshold"])
def test_statistics_add_up(target, batch, kind, schedule):
    drafter = rows_drafter(target, texts_of(target, batch, 52), kind)
    assert_rows(target, batch, drafter, schedule=schedule, max_new_tokens=40)
    counts = drafter.statistics
    assert counts.schedule == schedule and counts.generated == 4 * 40
    assert sum(counts.lengths.values()) == counts.rounds > 0
    assert sum(length * n for length, n in counts.lengths.items()) == counts.verified <= counts.drafted
    assert sum(counts.accepted_per_slot) == counts.accepted
    assert all(a <= o for a, o in zip(counts.accepted_per_slot, counts.offered_per_slot))
    # The first token of a row comes with its prompt; every later block gives its kept drafts and one more.
    assert counts.generated == 4 + counts.rounds + counts.plain_rounds + counts.accepted
    assert sum(counts.rests.values()) == counts.plain_rounds
    assert 0 < counts.draft_seconds + counts.verify_seconds <= counts.total_seconds


def test_statistics_end_with_the_text(target, batch):
    """Drafts behind an end are none of the text's: the oracle's are all taken all the same."""
    texts = texts_of(target, batch)
    drafter = rows_drafter(target, texts, "oracle")
    stops = [LastToken(ends_of(texts, batch, (4, 6, 2, 11)))]
    out = assisted(target, batch, drafter, stopping_criteria=stops, eos_token_id=unused_id(texts))
    counts, written = drafter.statistics, (out[:, 14:] != 0).sum()
    assert counts.generated <= int(written) and sum(counts.accepted_per_slot) == counts.accepted <= counts.generated
    assert counts.offered_per_slot == counts.accepted_per_slot  # what was judged was right
