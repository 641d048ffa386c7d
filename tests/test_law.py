"""The sampling law, exactly: every path of a sampled call is walked, and the output's law compared with the target's.

No random number is drawn. Part one walks the real thing, `target.generate(assistant_model=drafter)` with the host's
own acceptance; its reference is plain `generate`, walked the same way. Part two walks a simulated loop around the
project's scheduler and rest policy, where tables stand for the models, so that blocks are longer and tables many.
Both have a control: a scheduler that searches later confidences must be seen to bend the law.
"""

import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import config, make_drafter, make_target, plain
from law import (
    PROMPT,
    VOCAB,
    Opening,
    PathStatistics,
    Searching,
    World,
    generate_law,
    simulated_law,
    small_drafter,
    small_target,
    target_law,
    total_variation,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from dspark.candidate_generator import CostTable, DSparkCandidateGenerator, PrefixScheduler, candidate_generator_dspark
from dspark.candidate_generator.draft_chain_dspark import DraftChain
from dspark.candidate_generator.schedule_dspark import RestPolicy


EXACT = 1e-6  # the host computes probabilities in fp32
TABLES = {
    "smooth": CostTable.from_costs({1: 1.0, 2: 1.5, 3: 1.8, 4: 2.0}),
    "cliff": CostTable.from_costs({1: 1.0, 2: 1.7, 4: 1.7}),
    "staircase": CostTable.from_costs({1: 1.0, 2: 1.0, 3: 1.6, 4: 1.6}),
    "steep": CostTable.from_costs({1: 1.0, 2: 2.0, 3: 2.2, 4: 2.4}),
}


class EndsWith(StoppingCriteria):
    """True for a text whose new part ends with the given ids."""

    def __init__(self, *ids: int):
        self.ids = list(ids)

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids[0, PROMPT.shape[1] :].tolist()
        return torch.tensor([new[-len(self.ids) :] == self.ids])


@pytest.fixture(autouse=True)
def _one_thread():
    """Forwards this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def whole_block(monkeypatch):
    """Drafts as an accelerator does: all slots are drawn, then `length` is asked."""
    # A data descriptor wins over what the generator's constructor sets.
    monkeypatch.setattr(
        DSparkCandidateGenerator, "whole_block", property(lambda _: True, lambda *_: None), raising=False
    )


def assert_same_law(target, drafter, new_tokens: int = 4, least_lengths: int = 2, **settings) -> PathStatistics:
    """Compare assisted with plain, and see to it that the paths accepted, refused and chose different lengths."""
    seen = PathStatistics()
    assisted = generate_law(target, new_tokens, drafter, seen, **settings)
    expected = generate_law(target, new_tokens, **settings)
    assert sum(expected.values()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(assisted, expected) < EXACT
    assert 0 < seen.accepted < seen.verified
    assert len(seen.lengths) >= least_lengths, seen.lengths
    return seen


def spy(monkeypatch, owner, name: str, see) -> None:
    """Let `see(result, *args)` watch a function or method."""
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        out = original(*args, **kwargs)
        see(out, *args)
        return out

    monkeypatch.setattr(owner, name, watched)


def test_the_plain_reference_is_the_product_of_the_softmaxes():
    target = small_target(1)

    class Model:
        @staticmethod
        def target(text):
            ids = torch.cat([PROMPT, torch.tensor([text[1:]], dtype=torch.long)], dim=1)
            return target(ids).logits[0, -1].softmax(-1).tolist()

    law = target_law(Model, 3)
    assert len(law) == VOCAB**3
    assert total_variation(generate_law(target, 3), law) < EXACT


SCHEDULES = {
    "fixed": (None, {"dspark_schedule": "fixed"}),
    "threshold": (None, {"dspark_threshold": 0.5}),
    **{name: (table, {}) for name, table in TABLES.items() if name != "staircase"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_keeps_the_law(name):
    table, settings = SCHEDULES[name]
    target = small_target(1)
    drafter = small_drafter(target, table)
    assert_same_law(target, drafter, **settings)


def test_a_staircase_keeps_the_law():
    target = small_target(3)
    seen = assert_same_law(target, small_drafter(target, TABLES["staircase"], seed=4), least_lengths=1)
    assert 1 in seen.lengths


def test_algorithm_1_without_bridging_keeps_the_law(monkeypatch):
    class Plain(PrefixScheduler):
        def __init__(self, *args):
            super().__init__(*args, bridging=False)

    monkeypatch.setattr(candidate_generator_dspark, "PrefixScheduler", Plain)
    target = small_target(1)
    assert_same_law(target, small_drafter(target, TABLES["smooth"]))


def test_a_full_block_of_three_keeps_the_law():
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)]}
    seen = assert_same_law(target, small_drafter(target, TABLES["smooth"]), new_tokens=5, extra=extra)
    assert 3 in seen.lengths


def test_running_acceptance_rates_keep_the_law():
    """The confidence of a drafter without the head: its own acceptances so far."""
    target = small_target(1)
    drafter = small_drafter(target, CostTable.from_costs({1: 1.0, 2: 1.55, 4: 2.65}), enable_confidence_head=False)
    assert_same_law(target, drafter, new_tokens=5, extra={"logits_processor": [Opening(2)]})


def test_resting_keeps_the_law(monkeypatch):
    monkeypatch.setattr(RestPolicy, "CREDIT", 0.4)
    monkeypatch.setattr(RestPolicy, "FIRST_PAUSE", 1)
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)]}
    seen = assert_same_law(target, small_drafter(target, TABLES["smooth"]), new_tokens=5, extra=extra)
    assert seen.rests["drafting did not pay"] > 0


def test_drawing_whole_blocks_keeps_the_law(whole_block):
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)], "stopping_criteria": [EndsWith(1, 1)]}
    drafter = small_drafter(target, TABLES["steep"])
    assert_same_law(target, drafter, least_lengths=3, extra=extra, eos_token_id=0)


def test_a_search_through_later_confidences_bends_the_law(whole_block, monkeypatch):
    """The control: the same walk, with the one rule broken."""
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)]}
    drafter = small_drafter(target, TABLES["steep"])
    expected = generate_law(target, 4, extra=extra)
    assert total_variation(generate_law(target, 4, drafter, extra=extra), expected) < EXACT
    monkeypatch.setattr(candidate_generator_dspark, "PrefixScheduler", Searching)
    assert total_variation(generate_law(target, 4, drafter, extra=extra), expected) > 0.05


SHAPES = {
    "temperature and top-k": ({"temperature": 0.7, "top_k": 2}, {}),
    "top-p": ({"temperature": 1.5, "top_p": 0.8}, {}),
    "repetition penalty": ({"repetition_penalty": 1.8}, {}),
    "n-gram ban": ({"no_repeat_ngram_size": 2}, {}),
    "reduced vocabulary": ({}, {"draft_vocab_size": 3}),
    "rnn head": ({}, {"markov_head_type": "rnn"}),
    "no sequential head": ({}, {"markov_rank": 0}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shaped_laws_and_other_heads_keep_the_law(name):
    settings, overrides = SHAPES[name]
    target = small_target(1)
    drafter = small_drafter(target, **overrides)
    if "draft_vocab_size" in overrides:
        drafter.d2t.copy_(torch.tensor([0, 1, 1]))  # ids 0, 2, 3
    assert_same_law(target, drafter, **settings, dspark_threshold=0.3)


def four_letters() -> PreTrainedTokenizerFast:
    """Ids 0-3 are the letters a-d; e and f are there because the host tokenizes "abcdef" to find token borders."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcdef")}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ENDS = {
    "EOS": {"eos_token_id": 0},
    "two EOS": {"eos_token_id": [0, 2]},
    "criterion": {"extra": {"stopping_criteria": [EndsWith(2, 2)]}},
    "stop strings": {"extra": {"tokenizer": four_letters()}, "stop_strings": ["ca", "bb"]},
    "EOS and criterion": {"eos_token_id": 3, "extra": {"stopping_criteria": [EndsWith(0), EndsWith(2, 1)]}},
}


@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
@pytest.mark.parametrize("name", ENDS)
def test_ends_in_mid_block_keep_the_law(name, schedule):
    target = small_target(1)
    drafter = small_drafter(target, TABLES["smooth"])
    assert_same_law(target, drafter, dspark_schedule=schedule, **ENDS[name])
    lengths = {len(text) for text in generate_law(target, 4, **ENDS[name])}
    assert {2, 3, 4} <= lengths  # the ends come true at several places


# What is handed to the verifier.


def warped(logits: list[float], kept: list[int], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The draft law over the target's ids, written out: temperature, top-k, top-p, min-p, in the host's order."""
    heat = {i: math.exp((logit - max(logits)) / temperature) for i, logit in zip(kept, logits)}
    ranked = sorted(heat, key=heat.get, reverse=True)[: top_k or None]
    total, before, nucleus = sum(heat[i] for i in ranked), 0.0, []
    for i in ranked:
        if before < top_p:
            nucleus.append(i)
        before += heat[i] / total
    nucleus = [i for i in nucleus if heat[i] >= min_p * heat[nucleus[0]]]
    total = sum(heat[i] for i in nucleus)
    return [heat[i] / total if i in nucleus else 0.0 for i in range(64)]


KEPT = [0, 2, 3, 5, 8, 9, *range(20, 30), 40, 50, 62, 63]
WARPERS = {
    "plain": {"top_k": 0},
    "the host's default top-k": {"top_k": 50},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "tiny temperature": {"temperature": 1e-4, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6, "top_k": 0},
    "min-p": {"min_p": 0.2, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full vocabulary", "reduced vocabulary"])
@pytest.mark.parametrize("name", WARPERS)
def test_log_q_is_the_law_of_the_drafts(name, kept, monkeypatch):
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=kept and len(kept))
    if kept:
        drafter.d2t.copy_(torch.tensor(kept) - torch.arange(len(kept)))
    logits, drawn, handed = [], [], []
    spy(monkeypatch, DraftChain, "logits", lambda out, *_: logits.append(out[0].tolist()))
    spy(monkeypatch, candidate_generator_dspark, "draw_from", lambda out, q: drawn.append(q[0].double().tolist()))
    spy(monkeypatch, DSparkCandidateGenerator, "get_candidates", lambda out, *_: handed.append(out))
    torch.manual_seed(0)
    how = config(do_sample=True, max_new_tokens=40, dspark_schedule="fixed", **WARPERS[name])
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, generation_config=how)

    rows = []
    for candidates, log_q in handed:
        if log_q is not None:
            assert log_q.shape == (1, log_q.shape[1], 64) and log_q.dtype == torch.float32
            drafts = candidates[0, -log_q.shape[1] :].tolist()
            rows += [(draft, row.tolist()) for draft, row in zip(drafts, log_q[0].double().exp())]
    assert len(rows) == len(logits) == len(drawn) > 40
    for (draft, row), scores, q in zip(rows, logits, drawn):
        assert row == pytest.approx(warped(scores, kept or range(64), **WARPERS[name]), abs=1e-6)
        assert sorted(x for x in q if x) == pytest.approx(sorted(x for x in row if x), abs=1e-6)  # what was drawn from
        assert row[draft] > 0


def test_drafts_below_the_greedy_temperature_are_certain(monkeypatch):
    target = make_target()
    drafter, handed = make_drafter(target), []
    spy(monkeypatch, DSparkCandidateGenerator, "get_candidates", lambda out, *_: handed.append(out))
    how = config(do_sample=True, temperature=1e-6, max_new_tokens=24)
    text = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, generation_config=how)
    assert text.tolist() == plain(target, torch.tensor([[5, 6, 7]]), max_new_tokens=24).tolist()
    rows = [(out[0], out[1]) for out in handed if out[1] is not None]
    assert rows
    for candidates, log_q in rows:
        assert log_q[0].exp().tolist() == F.one_hot(candidates[0, -log_q.shape[1] :], 64).tolist()


def test_draws_invert_the_distribution_function(monkeypatch):
    """Even random numbers give every id its share to the last one, and ids of probability 0 nothing."""
    n = 4000
    q = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.65, 0.0])
    for points in (torch.arange(n) / n, 1 - torch.tensor([2.0**-53] * n, dtype=torch.float64)):
        monkeypatch.setattr(torch, "rand", lambda *_, dtype=None, **__: points.to(dtype)[:, None])
        counts = candidate_generator_dspark.draw_from(q.expand(n, -1)).bincount(minlength=6)
        assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
        if points[0] == 0:
            assert (counts / n - q).abs().max() < 2 / n


# Part two: tables instead of models.

NON_ANTICIPATING = {
    "fixed": partial(PrefixScheduler, "fixed", 3),
    "threshold": partial(PrefixScheduler, "threshold", 3, threshold=0.5),
    **{f"{name}, bridging": lambda t=t: PrefixScheduler("throughput", 3, t) for name, t in TABLES.items()},
    **{
        f"{name}, plain": lambda t=t: PrefixScheduler("throughput", 3, t, bridging=False) for name, t in TABLES.items()
    },
}


def ends_in_a_pair(text):
    return text[-2:] == (1, 1)


@pytest.mark.parametrize("name", NON_ANTICIPATING)
def test_schedules_keep_the_law_in_random_worlds(name):
    seen = Counter()
    for seed in range(5):
        world = World(seed)
        law = simulated_law(world, 4, NON_ANTICIPATING[name], ended=ends_in_a_pair, seen=seen)
        assert total_variation(law, target_law(world, 4, ended=ends_in_a_pair)) < 1e-12
    # Algorithm 1 alone stops in front of a cliff, and on the first stair, whatever the confidence.
    assert len(seen) > 1 or name in ("steep, plain", "staircase, plain"), seen


@pytest.mark.parametrize("name", NON_ANTICIPATING)
def test_whole_blocks_keep_the_law_in_random_worlds(name):
    for seed in (1, 3):
        world = World(seed)
        law = simulated_law(world, 3, NON_ANTICIPATING[name], whole_block=True)
        assert total_variation(law, target_law(world, 3)) < 1e-12


def test_bridging_on_forecasts_keeps_the_law():
    """Several rounds, so that forecasts come from drafts of earlier rounds, the refused ones included."""
    world, seen = World(2), Counter()
    law = simulated_law(world, 5, partial(PrefixScheduler, "throughput", 3, TABLES["cliff"]), seen=seen)
    assert total_variation(law, target_law(world, 5)) < 1e-12
    assert len(seen) > 2, seen


def test_resting_keeps_the_law_in_random_worlds():
    class Impatient(RestPolicy):
        CREDIT, TRIAL_CREDIT, FIRST_PAUSE = 0.4, 0.2, 1

    table, seen = TABLES["smooth"], Counter()
    for seed in range(5):
        world = World(seed)
        law = simulated_law(
            world, 5, partial(PrefixScheduler, "throughput", 3, table), partial(Impatient, table), seen=seen
        )
        assert total_variation(law, target_law(world, 5)) < 1e-12
    assert seen[None] > 0 and len(seen) > 3, seen


@pytest.mark.parametrize(("name", "seed"), [("cliff", 1), ("steep", 3)])
def test_a_search_bends_the_law_in_a_random_world(name, seed):
    world = World(seed)
    law = simulated_law(world, 3, partial(Searching, "throughput", 3, TABLES[name]), whole_block=True)
    assert total_variation(law, target_law(world, 3)) > 0.05


class AppendixA:
    """The paper's counterexample: ids A = 0 and B = 1, and a second confidence that tells what the first draft was."""

    block_size = 2

    @staticmethod
    def target(text):
        return [0.7, 0.3]

    @staticmethod
    def draft(text, drafts):
        return [0.5, 0.5]

    @staticmethod
    def confidence(text, drafts):
        return 0.8 if not drafts else (0.9 if drafts[0] == 0 else 0.0)


@pytest.mark.parametrize(
    ("scheduler", "whole_block", "chance"),
    [
        (Searching, True, 0.85),
        (partial(PrefixScheduler, bridging=False), False, 0.70),
        (partial(PrefixScheduler, bridging=False), True, 0.70),
        (PrefixScheduler, False, 0.70),
        (PrefixScheduler, True, 0.70),
    ],
    ids=["search", "algorithm 1", "algorithm 1, whole block", "bridging", "bridging, whole block"],
)
def test_appendix_a(scheduler, whole_block, chance):
    table = CostTable.from_costs({1: 1 / 1.0, 2: 1 / 0.5, 3: 1 / 0.45})
    law = simulated_law(AppendixA, 3, lambda: scheduler("throughput", 2, table), whole_block=whole_block)
    assert sum(p for text, p in law.items() if text[0] == 0) == pytest.approx(chance, abs=1e-12)
