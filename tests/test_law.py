"""The sampling law, exactly: every path of a sampled call is walked, and the output's law compared with the target's.

No random number is drawn. Part one walks the real thing, `target.generate(assistant_model=drafter)` with the host's
own acceptance; its reference is plain `generate`, walked the same way. Part two walks a simulated loop around the
project's scheduler and rest policy, where tables stand for the models, so that blocks are longer and tables many.
Both have a control: a scheduler that searches later confidences must be seen to bend the law.
"""

from collections import Counter
from functools import partial

import pytest
import torch
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
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from dspark.candidate_generator import CostTable, DSparkCandidateGenerator, PrefixScheduler, candidate_generator_dspark
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
    plain = generate_law(target, new_tokens, **settings)
    assert sum(plain.values()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(assisted, plain) < EXACT
    assert 0 < seen.accepted < seen.verified
    assert len(seen.lengths) >= least_lengths, seen.lengths
    return seen


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_keeps_the_law(name):
    table, settings = SCHEDULES[name]
    target = small_target(1)
    drafter = small_drafter(target, table)
    assert_same_law(target, drafter, **settings)


@pytest.mark.slow
def test_a_staircase_keeps_the_law():
    target = small_target(3)
    seen = assert_same_law(target, small_drafter(target, TABLES["staircase"], seed=4), least_lengths=1)
    assert 1 in seen.lengths


@pytest.mark.slow
def test_algorithm_1_without_bridging_keeps_the_law(monkeypatch):
    class Plain(PrefixScheduler):
        def __init__(self, *args):
            super().__init__(*args, bridging=False)

    monkeypatch.setattr(candidate_generator_dspark, "PrefixScheduler", Plain)
    target = small_target(1)
    assert_same_law(target, small_drafter(target, TABLES["smooth"]))


@pytest.mark.slow
def test_a_full_block_of_three_keeps_the_law():
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)]}
    seen = assert_same_law(target, small_drafter(target, TABLES["smooth"]), new_tokens=5, extra=extra)
    assert 3 in seen.lengths


@pytest.mark.slow
def test_running_acceptance_rates_keep_the_law():
    """The confidence of a drafter without the head: its own acceptances so far."""
    target = small_target(1)
    drafter = small_drafter(target, CostTable.from_costs({1: 1.0, 2: 1.55, 4: 2.65}), enable_confidence_head=False)
    assert_same_law(target, drafter, new_tokens=5, extra={"logits_processor": [Opening(2)]})


@pytest.mark.slow
def test_resting_keeps_the_law(monkeypatch):
    monkeypatch.setattr(RestPolicy, "CREDIT", 0.4)
    monkeypatch.setattr(RestPolicy, "FIRST_PAUSE", 1)
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)]}
    seen = assert_same_law(target, small_drafter(target, TABLES["smooth"]), new_tokens=5, extra=extra)
    assert seen.rests["drafting did not pay"] > 0


@pytest.mark.slow
def test_drawing_whole_blocks_keeps_the_law(whole_block):
    target = small_target(1)
    extra = {"logits_processor": [Opening(2)], "stopping_criteria": [EndsWith(1, 1)]}
    drafter = small_drafter(target, TABLES["steep"])
    assert_same_law(target, drafter, least_lengths=3, extra=extra, eos_token_id=0)


@pytest.mark.slow
def test_a_search_through_later_confidences_bends_the_law(whole_block, monkeypatch):
    """The control: the same walk, with the one rule broken."""
    target = small_target(1)
    extra = {"logits_processor": [Opening(3)]}
    drafter = small_drafter(target, TABLES["cliff"], seed=4)
    plain = generate_law(target, 4, extra=extra)
    assert total_variation(generate_law(target, 4, drafter, extra=extra), plain) < EXACT
    monkeypatch.setattr(candidate_generator_dspark, "PrefixScheduler", Searching)
    assert total_variation(generate_law(target, 4, drafter, extra=extra), plain) > 0.05


SHAPES = {
    "temperature and top-k": ({"temperature": 0.7, "top_k": 2}, {}),
    "top-p": ({"temperature": 1.5, "top_p": 0.8}, {}),
    "repetition penalty": ({"repetition_penalty": 1.8}, {}),
    "n-gram ban": ({"no_repeat_ngram_size": 2}, {}),
    "reduced vocabulary": ({}, {"draft_vocab_size": 3}),
    "rnn head": ({}, {"markov_head_type": "rnn"}),
    "no sequential head": ({}, {"markov_rank": 0}),
}


@pytest.mark.slow
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
    model = models.BPE(vocab={letter: i for i, letter in enumerate("abcdef")}, merges=[])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


ENDS = {
    "EOS": {"eos_token_id": 0},
    "two EOS": {"eos_token_id": [0, 2]},
    "criterion": {"extra": {"stopping_criteria": [EndsWith(2, 2)]}},
    "stop strings": {"extra": {"tokenizer": four_letters()}, "stop_strings": ["ca", "bb"]},
    "EOS and criterion": {"eos_token_id": 3, "extra": {"stopping_criteria": [EndsWith(0), EndsWith(2, 1)]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
@pytest.mark.parametrize("name", ENDS)
def test_ends_in_mid_block_keep_the_law(name, schedule):
    target = small_target(1)
    drafter = small_drafter(target, TABLES["smooth"])
    assert_same_law(target, drafter, dspark_schedule=schedule, **ENDS[name])
    lengths = {len(text) for text in generate_law(target, 4, **ENDS[name])}
    assert {2, 3, 4} <= lengths  # the ends come true at several places


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
    world, seen = World(3), Counter()
    table = TABLES["cliff"]
    law = simulated_law(world, 5, lambda: PrefixScheduler("throughput", 3, table), seen=seen)
    assert total_variation(law, target_law(world, 5)) < 1e-12
    assert len(seen) == 4, seen


def test_resting_keeps_the_law_in_random_worlds():
    class Impatient(RestPolicy):
        CREDIT, TRIAL_CREDIT, FIRST_PAUSE = 0.4, 0.2, 1

    table, seen = TABLES["smooth"], Counter()
    for seed in range(5):
        world = World(seed)
        law = simulated_law(
            world, 5, lambda: PrefixScheduler("throughput", 3, table), rest=lambda: Impatient(table), seen=seen
        )
        assert total_variation(law, target_law(world, 5)) < 1e-12
    assert seen[None] > 0 and len(seen) > 3, seen


@pytest.mark.parametrize(("name", "seed"), [("cliff", 1), ("steep", 3)])
def test_a_search_bends_the_law_in_a_random_world(name, seed):
    world = World(seed)
    law = simulated_law(world, 3, lambda: Searching("throughput", 3, TABLES[name]), whole_block=True)
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
    ("scheduler", "chance"),
    [
        (lambda table: Searching("throughput", 2, table), 0.85),
        (lambda table: PrefixScheduler("throughput", 2, table, bridging=False), 0.70),
        (lambda table: PrefixScheduler("throughput", 2, table), 0.70),
    ],
    ids=["search", "Algorithm 1", "bridging"],
)
@pytest.mark.parametrize("whole_block", [False, True])
def test_appendix_a(scheduler, chance, whole_block):
    table = CostTable.from_costs({1: 1 / 1.0, 2: 1 / 0.5, 3: 1 / 0.45})
    if chance != 0.70 and not whole_block:
        pytest.skip("a search needs the whole block")
    law = simulated_law(AppendixA, 3, lambda: scheduler(table), whole_block=whole_block)
    assert sum(p for text, p in law.items() if text[0] == 0) == pytest.approx(chance, abs=1e-12)
