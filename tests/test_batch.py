"""`target.generate(batch, assistant_model=drafter)` is plain `generate` with the same arguments, row by row (fp32).

Every test asserts that tokens were drafted; those with an oracle also that its drafts were taken.
"""

import pytest
import torch
from conftest import VOCAB, config, lively_target, make_drafter
from many import (
    FAMILIES,
    KINDS,
    NEW,
    TEXT,
    assert_rows,
    assisted,
    plain,
    ragged,
    rows_drafter,
    shared_target,
    texts_of,
)
from same import characters
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from dspark.candidate_generator import decoding_dspark


# One of each kind of attention, positions and experts; test_packed has them all.
BATCH_FAMILIES = [f for f in FAMILIES if f not in ("qwen3", "opt", "phi3", "olmo2", "mixtral", "cohere2")]


@pytest.fixture(scope="module")
def target():
    """One whose texts repeat little."""
    return lively_target()


@pytest.fixture
def batch():
    """Four prompts, the longest padded nowhere."""
    ids, mask = ragged((9, 3, 14, 6))
    return {"input_ids": ids, "attention_mask": mask}


# ---- families, drafters, schedules, sizes


@pytest.mark.parametrize("family", BATCH_FAMILIES)
def test_families(family, batch):
    """Past the windows and chunks of 8 that some have here, and with a prompt shorter than one."""
    target = shared_target(family)
    texts = texts_of(target, batch)
    # Not texts of one token, in which a drafter is right wherever it stands.
    assert sum(len(set(text[-TEXT:])) for text in texts) > 12
    last = ("never", "random")[BATCH_FAMILIES.index(family) % 2]
    for kind, schedule in (("oracle", "fixed"), ("alternating", "throughput"), (last, "threshold")):
        drafter = rows_drafter(target, texts, kind)
        assert_rows(target, batch, drafter, kind, schedule, max_new_tokens=12)
        if kind != "random":
            assert drafter.widest == 4  # all rows in one pass of the backbone


@pytest.mark.parametrize("schedule", ["fixed", "throughput", "threshold"])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(target, batch, kind, schedule):
    drafter = rows_drafter(target, texts_of(target, batch, 52), kind)
    if kind != "random":
        drafter.confidence = lambda slot: (0.95, 0.9, 0.8, 0.7, 0.6, 0.4, 0.9)[slot]
    assert_rows(target, batch, drafter, kind, schedule, max_new_tokens=40)
    # A round verifies all 7, those before the slot below the threshold of 0.5, or what pays.
    longest = max(drafter.statistics.lengths)
    assert longest == 7 or schedule != "fixed"
    assert schedule != "threshold" or longest == 5 or kind == "random"


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
@pytest.mark.parametrize("kind", ["oracle", "alternating"])
def test_sizes(target, rows, kind):
    ids, mask = ragged(tuple(1 + (7 * i) % 23 for i in range(rows)), seed=rows)
    batch = {"input_ids": ids, "attention_mask": mask}
    drafter = rows_drafter(target, texts_of(target, batch), kind)
    assert_rows(target, batch, drafter, kind)
    assert drafter.widest == rows


def test_rows_that_fall_apart(target, batch):
    """One row is drafted for perfectly, one never: they are at different lengths in every forward."""
    texts = texts_of(target, batch, 52)
    drafter = rows_drafter(target, texts, "oracle")
    right = drafter.script
    drafter.script = lambda row, at: (right(row, at) + (row == 1 or (row == 2 and at % 3 == 0))) % VOCAB
    assert_rows(target, batch, drafter, "alternating", max_new_tokens=40)


@pytest.mark.parametrize("block", [1, 2, 16])
def test_block_sizes(target, batch, block):
    drafter = rows_drafter(target, texts_of(target, batch, 52), "oracle", block_size=block)
    assert_rows(target, batch, drafter, "oracle", max_new_tokens=40)
    assert max(drafter.statistics.lengths) == block


@pytest.mark.parametrize("cap", [1, 3])
def test_num_assistant_tokens_caps(target, batch, cap):
    drafter = rows_drafter(target, texts_of(target, batch), "oracle")
    assert_rows(target, batch, drafter, "oracle", num_assistant_tokens=cap)
    assert max(drafter.statistics.lengths) == cap


def test_a_reduced_vocabulary(target, batch):
    texts = texts_of(target, batch)
    kept = sorted({token for text in texts for token in text[-TEXT:]})[::2]
    drafter = rows_drafter(target, texts, "oracle", draft_vocab_size=len(kept))
    drafter.d2t.copy_(torch.tensor(kept) - torch.arange(len(kept)))
    right = drafter.script
    drafter.script = lambda row, at: kept.index(right(row, at)) if right(row, at) in kept else 0
    assert_rows(target, batch, drafter, "alternating")


@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
def test_a_real_drafter_drafts_for_a_row_what_it_drafts_alone(target, batch, first):
    """Through its own attention, sliding layers included: rows that draft otherwise would accept otherwise."""
    drafter = make_drafter(target, sliding_window=6, layer_types=[first, "sliding_attention"])
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(20.0)
    assert_rows(target, batch, drafter, schedule="threshold", max_new_tokens=24)
    together, alone = drafter.statistics, []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"]):
        settings = config(max_new_tokens=24, dspark_schedule="threshold")
        target.generate(ids[mask.bool()][None], assistant_model=drafter, generation_config=settings)
        alone.append(drafter.statistics)
    assert together.lengths == sum((one.lengths for one in alone[1:]), alone[0].lengths)
    assert together.accepted == sum(one.accepted for one in alone) and len(together.lengths) > 2


def test_a_bf16_drafter(target, batch):
    drafter = rows_drafter(target, texts_of(target, batch), "alternating").bfloat16()
    assert_rows(target, batch, drafter, "alternating")


# ---- processors: each row's, at each of its prefixes


class Parity(LogitsProcessor):
    """Bans ids of the parity that the sum of the text so far has, and never the last token again."""

    def __call__(self, input_ids, scores):
        parity = input_ids.sum(dim=-1, keepdim=True) % 2
        scores = scores.masked_fill(torch.arange(VOCAB)[None] % 2 == parity, float("-inf"))
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class ByRow(LogitsProcessor):
    """Knows which row is which, and how many there are."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 4
        rows = torch.arange(4)[:, None]
        return scores.masked_fill(torch.arange(VOCAB)[None] % 4 == rows, float("-inf"))


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [40], [17, 3], [9, 9]]},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [4, 7, 11, 20, 33]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(VOCAB) if (t + int(ids[-1])) % (row + 2)]
    },
    "parity": {"logits_processor": [Parity()]},
    "by_row": {"logits_processor": [ByRow()]},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[8]], "suppress_tokens": [6]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(target, batch, name):
    """Drafts that are right and drafts that are not, by turns."""
    kind, settings = "alternating", PROCESSORS[name]
    bare = texts_of(target, batch, NEW)
    whole = plain(target, batch, max_new_tokens=TEXT, **settings)
    texts = [row[14 - int(seen.sum()) :].tolist() for row, seen in zip(whole, batch["attention_mask"])]
    assert [text[: len(one)] for text, one in zip(texts, bare)] != bare  # it changes what is said
    drafter = rows_drafter(target, texts, kind)
    assert_rows(target, batch, drafter, None if "eos_token_id" in settings else kind, **settings)
    assert drafter.statistics.accepted > 0


def test_a_processor_that_raises_leaves_all_as_it_was(target, batch):
    class Raises(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 18:
                raise KeyError("the processor's own")
            return scores

    drafter = rows_drafter(target, texts_of(target, batch), "oracle")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
    with pytest.raises(KeyError, match="the processor's own"):
        assisted(target, batch, drafter, logits_processor=[Raises()])
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()) == hooks
    assert_rows(target, batch, drafter, "oracle")


# ---- ends


def ends_of(texts, batch, counts) -> list[int]:
    """Ids that end the rows after about `counts` new tokens."""
    return [text[int(seen.sum()) + n] for text, seen, n in zip(texts, batch["attention_mask"], counts)]


@pytest.mark.parametrize(
    ("kind", "schedule"), [("oracle", "fixed"), ("alternating", "throughput"), ("never", "threshold")]
)
@pytest.mark.parametrize("ends", ["one", "several", "all", "none", "first"])
def test_eos(target, batch, kind, schedule, ends):
    """Rows that end early are padded; the call ends with the last."""
    texts = texts_of(target, batch)
    ids = {
        "one": ends_of(texts, batch, (5, 0, 0, 0))[0],
        "several": ends_of(texts, batch, (5, 9, 0, 0))[:2],
        "all": ends_of(texts, batch, (5, 9, 3, 12)),
        "none": None,
        "first": ends_of(texts, batch, (0, 0, 0, 0)),
    }[ends]
    drafter = rows_drafter(target, texts, kind)
    out = assisted(target, batch, drafter, schedule, eos_token_id=ids)
    assert out.tolist() == plain(target, batch, eos_token_id=ids).tolist()
    assert (drafter.statistics.drafted > 0) == (ends != "first")
    # The cases are what they are called: rows that ended, and one that did not.
    ended = [] if ids is None else torch.isin(out[:, 14:], torch.tensor(ids)).any(1).tolist()
    assert {"all": all(ended), "first": out.shape[1] == 15, "none": out.shape[1] == 14 + NEW}.get(ends, any(ended))
    if kind == "oracle" and ends != "first":
        assert drafter.statistics.accepted == drafter.statistics.verified > 0


@pytest.mark.parametrize("pad", [0, 63, None])
def test_padding_of_finished_rows(target, batch, pad):
    texts = texts_of(target, batch)
    eos = ends_of(texts, batch, (2, 0, 0, 0))[0]
    drafter = rows_drafter(target, texts, "oracle")
    out = assert_rows(target, batch, drafter, eos_token_id=eos, pad_token_id=pad)
    if pad is not None:
        assert any(row[-1] == pad for row in out.tolist())


def test_eos_in_a_prompt_ends_nothing(target, batch):
    texts = texts_of(target, batch)
    eos = int(batch["input_ids"][2, 5])
    drafter = rows_drafter(target, texts, "oracle")
    assert_rows(target, batch, drafter, eos_token_id=eos)


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("kind", ["oracle", "alternating"])
def test_stop_strings(target, batch, kind, eos):
    """Without an EOS plain decoding lets rows that stopped write on until the last has."""
    texts, tokenizer = texts_of(target, batch), characters()
    stops = [tokenizer.decode(text[n : n + 2]) for text, n in zip(texts, (9 + 4, 3 + 7, 14 + 2))]
    ends = {"eos_token_id": ends_of(texts, batch, (0, 0, 0, 10))[3]} if eos else {}
    drafter = rows_drafter(target, texts, kind)
    out = assert_rows(target, batch, drafter, stop_strings=stops, tokenizer=tokenizer, **ends)
    assert eos == any(row[-1] == 0 for row in out.tolist())
    assert drafter.statistics.accepted > 0


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


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("kind", ["oracle", "alternating"])
@pytest.mark.parametrize("which", ["last", "length", "both"])
def test_criteria(target, batch, which, kind, eos):
    """All rows end by a criterion: with an EOS they are padded behind it, without they write on to the longest."""
    texts = texts_of(target, batch)
    criteria = {"last": [LastToken(ends_of(texts, batch, (4, 6, 2, 11)))], "length": [ByRowLength()]}
    criteria["both"] = criteria["last"] + criteria["length"]
    drafter = rows_drafter(target, texts, kind)
    ends = {"eos_token_id": ends_of(texts, batch, (12, 0, 0, 0))[0]} if eos else {}
    kept = StoppingCriteriaList(criteria[which])
    out = assert_rows(target, batch, drafter, stopping_criteria=kept, **ends)
    assert out.shape[1] < 14 + NEW and len(kept) == len(criteria[which])
    if not eos:
        assert [row[14 - n :] for row, n in zip(out.tolist(), (9, 3, 14, 6))] == [
            text[: len(text) - TEXT + out.shape[1] - 14] for text in texts
        ]


@pytest.mark.parametrize("eos", [True, False])
def test_a_criterion_that_ends_some_rows(target, batch, eos):
    """The others go on to the length limit."""
    texts = texts_of(target, batch)

    class FirstRows(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (torch.arange(4) < 2) & (input_ids.shape[1] == 20)  # true once, not from then on

    drafter = rows_drafter(target, texts, "oracle")
    ends = {"eos_token_id": unused_id(texts)} if eos else {}
    out = assert_rows(target, batch, drafter, stopping_criteria=[FirstRows()], **ends)
    assert out.shape[1] == 14 + NEW and (out[0, 20:] == 0).all() == eos


def unused_id(texts) -> int:
    return next(i for i in range(1, VOCAB) if not any(i in text for text in texts))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("kind", ["oracle", "never"])
def test_short_calls(target, batch, kind, tokens):
    drafter = rows_drafter(target, texts_of(target, batch), kind)
    out = assisted(target, batch, drafter, max_new_tokens=tokens)
    assert torch.equal(out, plain(target, batch, max_new_tokens=tokens)) and out.shape[1] == 14 + tokens
    statistics = drafter.statistics
    assert (statistics.drafted > 0) == (tokens > 2) and statistics.generated == 4 * tokens
    if kind == "oracle":
        assert statistics.verified == 4 * max(0, min(7, tokens - 2))


def test_max_length_counts_the_padded_prompt(target, batch):
    drafter = rows_drafter(target, texts_of(target, batch), "oracle")
    out = assert_rows(target, batch, drafter, "oracle", max_new_tokens=None, max_length=25)
    assert out.shape == (4, 25)


# ---- what goes in and what comes out


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
