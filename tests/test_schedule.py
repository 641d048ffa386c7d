"""The prefix schedule against plain transcriptions of its rules, by hand-made tables, and through `generate`."""

import itertools
import random
import time

import pytest
import torch
from conftest import FLAT_COSTS, config, following, lively_target, make_drafter, plain, scripted

from dspark.candidate_generator import CostTable, DSparkCandidateGenerator, PrefixScheduler


G = 7
CLIFF = CostTable.from_costs({1: 1.0, 2: 1.9, 8: 1.9})
STAIRS = CostTable.from_costs({1: 1.0, 4: 1.0, 5: 2.0, 8: 2.0})


def slot_by_slot(scheduler, confidences, limit: int | None = None) -> int:
    """A whole round through `admits`, as decoding on a CPU asks."""
    scheduler.start_round(len(confidences) if limit is None else limit, 0)
    length = sum(1 for _ in itertools.takewhile(scheduler.admits, confidences))
    scheduler.end_round()
    return length


def algorithm_1(confidences: list[float], seconds: list[float]) -> int:
    """The paper's algorithm for one request, line by line. `seconds[B - 1]` is `1 / SPS(B)`."""
    survival = {}
    for j in range(1, len(confidences) + 1):
        survival[j] = survival.get(j - 1, 1.0) * confidences[j - 1]
    candidates = sorted((j for j in survival if survival[j] > 0), key=lambda j: (-survival[j], j))
    best_length, batch, tau = 0, 1, 1.0
    best = tau / seconds[batch - 1]
    for j in candidates:
        batch, tau = batch + 1, tau + survival[j]
        theta = tau / seconds[batch - 1]
        if theta > best:
            best, best_length = theta, j
        else:
            break
    return best_length


def bridged(confidences: list[float], seconds: list[float], past: list[list[float]]) -> int:
    """Algorithm 1 with bridging, written from its definition: a slot that does not pay by itself is admitted when a
    later one would, by the means of its past confidences (`past[slot]`), or by the slot's own where it has none."""
    admitted = []
    for j, c in enumerate(confidences):

        def theta(factors):
            products = itertools.accumulate(factors, lambda a, b: a * b)
            return (1 + sum(products)) / seconds[len(factors)]

        best = theta(admitted) if admitted else 1 / seconds[0]
        guesses = [sum(p) / len(p) if p else c for p in past[j + 1 : len(confidences)]]
        if not any(theta([*admitted, c, *guesses[:m]]) > best for m in range(len(guesses) + 1)):
            break
        admitted.append(c)
    return len(admitted)


def random_costs(rng: random.Random, smooth: bool = False) -> tuple[CostTable, list[float]]:
    """A table with steps, flats and cliffs, and the seconds of a round by length."""
    row, draft = {1: 1.0}, rng.choice([0.0, rng.random()])
    for tokens in range(2, G + 2):
        row[tokens] = row[tokens - 1] + (0.3 * rng.random() if smooth else rng.choice([0.0, 0.1, 0.9]) * rng.random())
    return CostTable.from_costs(row, draft), [draft + row[tokens] for tokens in range(1, G + 2)]


def random_confidences(rng: random.Random, size: int) -> list[float]:
    """As a head gives them, in fp32; now and then a certain or a hopeless one."""
    values = [rng.choice([rng.random(), rng.betavariate(4, 1), rng.betavariate(4, 1), 0.0, 1.0]) for _ in range(size)]
    return torch.tensor(values, dtype=torch.float32).tolist()


def test_algorithm_1_as_printed():
    rng, lengths = random.Random(0), set()
    for _ in range(10_000):
        table, seconds = random_costs(rng)
        confidences = random_confidences(rng, G)
        scheduler = PrefixScheduler("throughput", G, table, bridging=False)
        lengths.add(length := slot_by_slot(scheduler, confidences))
        assert length == algorithm_1(confidences, seconds), (confidences, seconds)
    assert lengths == set(range(G + 1))


def test_bridging_as_defined():
    """Over several rounds, whose examined confidences make the forecasts of the next."""
    rng, lengths, differ = random.Random(0), set(), 0
    for _ in range(2_500):
        table, seconds = random_costs(rng)
        scheduler, past = PrefixScheduler("throughput", G, table), [[] for _ in range(G)]
        for _ in range(4):
            confidences = random_confidences(rng, rng.randint(1, G))
            length = slot_by_slot(scheduler, confidences)
            assert length == bridged(confidences, seconds, past), (confidences, seconds, past)
            for slot, c in enumerate(confidences[: length + 1]):
                past[slot].append(c)
            lengths.add(length)
            differ += length != algorithm_1(confidences, seconds)
    assert lengths == set(range(G + 1)) and differ > 500


@pytest.mark.parametrize("values", ["drawn", "tenths"])
def test_length_is_the_number_of_admitted_slots(values):
    """Both forms of every schedule, over rounds with forecasts and limits; round numbers make ties."""
    rng, lengths = random.Random(1), set()
    kinds = ["throughput", "throughput", "threshold", "fixed"]
    for case in range(2_500):
        table, _ = random_costs(rng)
        threshold = rng.choice([rng.random(), rng.randint(0, 10) / 10])
        scheduler = PrefixScheduler(kinds[case % 4], G, table, threshold, bridging=rng.random() < 0.7)
        for _ in range(4):
            limit = rng.randint(1, G)
            confidences = random_confidences(rng, limit)
            if values == "tenths":
                confidences = torch.tensor([rng.randint(0, 10) / 10 for _ in range(limit)]).tolist()
            scheduler.start_round(limit, 0)
            length = scheduler.length(torch.tensor(confidences))
            assert length.shape == () and length.dtype == torch.long
            lengths.add(int(length))
            assert int(length) == slot_by_slot(scheduler, confidences), (kinds[case % 4], threshold, confidences)
    assert lengths == set(range(G + 1))


def test_on_a_smooth_table_the_greedy_choice_is_the_best():
    """Where every further token costs at least as much as the one before, Theta has one peak."""
    rng = random.Random(2)
    for _ in range(2_000):
        steps = sorted(0.5 * rng.random() for _ in range(G))
        seconds = list(itertools.accumulate([1.0, *steps]))
        confidences = random_confidences(rng, G)
        tokens = list(itertools.accumulate(itertools.accumulate(confidences, lambda a, b: a * b), initial=1.0))
        best = max(range(G + 1), key=lambda n: (tokens[n] / seconds[n], -n))
        table = CostTable.from_costs(dict(enumerate(seconds, start=1)))
        scheduler = PrefixScheduler("throughput", G, table, bridging=False)
        length = slot_by_slot(scheduler, confidences)
        assert tokens[length] / seconds[length] == pytest.approx(tokens[best] / seconds[best], rel=1e-12)


@pytest.mark.parametrize(
    "confidence,bridging,length", [(0.9, True, G), (0.2, True, 0), (0.9, False, 0), (0.2, False, 0)]
)
def test_a_cliff_is_crossed_in_the_first_round_or_not_at_all(confidence, bridging, length):
    scheduler = PrefixScheduler("throughput", G, CLIFF, bridging=bridging)
    assert [slot_by_slot(scheduler, [confidence] * G) for _ in range(3)] == [length] * 3


def test_forecasts_decide_at_a_cliff():
    """One good first slot does not cross it when past rounds say that the later slots are hopeless."""
    scheduler = PrefixScheduler("throughput", 3, CLIFF)
    assert slot_by_slot(scheduler, [0.8, 0.0, 0.0]) == 1
    assert slot_by_slot(scheduler, [0.8, 0.0, 0.0]) == 0
    fresh = PrefixScheduler("throughput", 3, CLIFF)
    for _ in range(3):
        assert slot_by_slot(fresh, [0.8, 0.9, 0.9]) == 3


def test_two_tokens_at_almost_twice_the_price():
    """`(1 + c) / 1.9 > 1` only for `c > 0.9`."""
    table = CostTable.from_costs({1: 1.0, 2: 1.9})
    for confidence, length in ((0.85, 0), (0.89, 0), (0.91, 1), (1.0, 1)):
        assert slot_by_slot(PrefixScheduler("throughput", 1, table), [confidence]) == length


def test_survival_decides_not_the_slots_own_confidence():
    """At 0.8 a slot, survival is .8 .64 .512 .41 .33: a table that pays above .4 gives 4, a threshold of .5 all 7."""
    seconds, tokens, survival = [1.0], 1.0, 1.0
    for _ in range(G):
        tokens, survival = tokens + survival * 0.8, survival * 0.8
        # A forward that costs 0.4 of what a token is worth more than the one before.
        seconds.append(seconds[-1] * (1 + 0.4 / (tokens - survival)))
    table = CostTable.from_costs(dict(enumerate(seconds, start=1)))
    for bridging in (True, False):
        assert slot_by_slot(PrefixScheduler("throughput", G, table, bridging=bridging), [0.8] * G) == 4
    threshold = PrefixScheduler("threshold", G, threshold=0.5)
    assert slot_by_slot(threshold, [0.8] * G) == G
    assert slot_by_slot(threshold, [0.8, 0.5, 0.49, 0.9, 0.9]) == 2


def test_a_staircase_is_climbed_to_the_edge_of_a_stair():
    scheduler = PrefixScheduler("throughput", G, STAIRS)
    assert slot_by_slot(scheduler, [0.5] * G) == 3  # four tokens cost what one does
    assert slot_by_slot(scheduler, [1.0] * G) == 3  # twice the tokens at twice the cost is no gain
    higher = CostTable.from_costs({1: 1.0, 4: 1.0, 5: 1.5, 8: 1.5})
    assert slot_by_slot(PrefixScheduler("throughput", G, higher), [1.0] * G) == G
    assert slot_by_slot(PrefixScheduler("throughput", G, higher, bridging=False), [1.0] * G) == 3
    assert slot_by_slot(PrefixScheduler("throughput", G, higher), [0.6] * G) == 3


def test_hopeless_slots_end_a_round_wherever_they_are():
    for at in range(G):
        confidences = [0.9] * at + [0.0] + [0.9] * (G - at - 1)
        assert slot_by_slot(PrefixScheduler("throughput", G, FLAT_COSTS), confidences) == at


def test_a_dearer_draft_is_never_answered_by_a_shorter_block():
    """Once a block is drafted its cost is spent: the more it was, the more a longer prefix is worth."""
    rng, longer = random.Random(3), 0
    for _ in range(2_000):
        table, _ = random_costs(rng)
        doubled = CostTable(table.verify, {0: 2 * table.draft_seconds()})
        confidences = random_confidences(rng, G)
        one, two = (slot_by_slot(PrefixScheduler("throughput", G, t), confidences) for t in (table, doubled))
        assert two >= one
        longer += two > one
    assert longer > 20


def test_context_chooses_the_row_of_the_table():
    """Behind a long context a forward costs more, and so does plain decoding: drafts are worth more there."""
    table = CostTable({0: {1: 1.0, 2: 1.9, 8: 7.0}, 1000: {1: 10.0, 8: 10.5}}, {0: 0.0})
    scheduler = PrefixScheduler("throughput", G, table, bridging=False)
    for context, length in ((0, 0), (1000, G)):
        scheduler.start_round(G, context)
        assert int(scheduler.length(torch.full((G,), 0.7))) == length


def test_a_refused_slot_closes_the_round():
    scheduler = PrefixScheduler("threshold", G, threshold=0.5)
    scheduler.start_round(3, 0)
    assert [scheduler.admits(c) for c in (0.9, 0.1, 0.9)] == [True, False, False]
    scheduler.start_round(2, 0)
    assert [scheduler.admits(0.9) for _ in range(4)] == [True, True, False, False]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'best'.*'throughput', 'fixed' or 'threshold'"):
        PrefixScheduler("best", G)
    with pytest.raises(ValueError, match="cost_table"):
        PrefixScheduler("throughput", G)


# Through generate.


@pytest.fixture(scope="module")
def target():
    return lively_target()


@pytest.mark.parametrize("table", [FLAT_COSTS, CostTable.from_costs({1: 1.0, 8: 9.0}, draft=3.0)])
@pytest.mark.parametrize("kind", ["oracle", "alternating", "never"])
def test_a_hand_fixed_length_is_obeyed(target, prompt, kind, table):
    """Whatever the table and the confidences say."""
    drafter = scripted(target, prompt, kind, cost_table=table)
    drafter.confidence = lambda slot: 0.01
    settings = config(max_new_tokens=40, num_assistant_tokens=4, dspark_schedule="fixed", dspark_log=True)
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings)
    assert torch.equal(out, plain(target, prompt, max_new_tokens=40))
    end = prompt.shape[1] + 40
    drafted = [(position, len(drafts)) for position, drafts, _, _ in drafter.statistics.log]
    assert len(drafted) >= 7
    for position, length in drafted:  # the anchor's; the last rounds have less room
        assert length == min(4, end - position - 2)


def test_same_seed_and_table_give_the_same_text_whatever_the_clock_says(target, prompt, monkeypatch):
    """Decisions read the table, never a clock: one that runs wild changes no choice."""
    table = CostTable.from_costs({1: 1.0, 2: 1.2, 5: 1.4, 8: 2.2}, draft=0.1)
    runs = []
    for speed in (0.0, 1.0, -5.0, 1e6):
        if speed:
            ticks = itertools.count()
            monkeypatch.setattr(time, "perf_counter", lambda: speed * next(ticks))
        drafter = make_drafter(target, cost_table=table)
        torch.manual_seed(11)
        settings = config(do_sample=True, temperature=0.8, max_new_tokens=64, dspark_log=True)
        out = target.generate(prompt, assistant_model=drafter, generation_config=settings)
        statistics = drafter.statistics
        runs.append((out.tolist(), statistics.log, statistics.lengths, statistics.rests))
    assert runs[0][2].total() > 5 and len(runs[0][2]) > 1
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("kind", ["oracle", "never"])
def test_without_a_confidence_head_past_acceptance_decides(target, prompt, kind):
    drafter = scripted(target, prompt, kind, cost_table=CostTable.from_costs({1: 1.0, 8: 2.4}, draft=0.0))
    drafter.confidence_head = None
    settings = config(max_new_tokens=90, dspark_log=True)
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings)
    assert torch.equal(out, plain(target, prompt, max_new_tokens=90))
    first, *_, last = [(len(drafts), confidences) for _, drafts, confidences, _ in drafter.statistics.log]
    assert 0 < first[0] < G and first[1][0] == pytest.approx(2 / 3)
    if kind == "oracle":
        assert max(drafter.statistics.lengths) > first[0] + 2 and last[1][0] > 0.85
    else:
        assert last[0] == 0 and last[1][0] < 0.5


def test_whole_blocks_learn_what_slots_learn(target, prompt, monkeypatch):
    """The forecasts of both ways of drafting come from the same slots, behind a drafted EOS too."""
    text = plain(target, prompt, max_new_tokens=64)[0].tolist()
    eos = next(i for i in range(64) if i not in text)
    examined = {}
    for whole_block in (False, True):
        switch = property(lambda self: whole_block, lambda self, value: None)
        monkeypatch.setattr(DSparkCandidateGenerator, "whole_block", switch, raising=False)
        drafter = following(target, text)
        right = drafter.script
        drafter.script = lambda position: eos if position % 5 == 0 else right(position)
        seen = examined.setdefault(whole_block, [])
        end_round = PrefixScheduler.end_round
        with monkeypatch.context() as patch:
            patch.setattr(PrefixScheduler, "end_round", lambda s, e=None: (seen.append(e), end_round(s, e))[1])
            settings = config(max_new_tokens=40, eos_token_id=eos, dspark_schedule="threshold", dspark_threshold=0.5)
            target.generate(prompt, assistant_model=drafter, generation_config=settings)
    assert len(examined[False]) > 5
    assert [len(confidences) for confidences in examined[True]] == [len(c) for c in examined[False]]
    assert examined[True] == [pytest.approx(confidences) for confidences in examined[False]]
