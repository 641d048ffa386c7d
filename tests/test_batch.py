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
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList


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
