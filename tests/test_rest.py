"""When a call stops drafting for a while: the rest policy in a simulated call, and through `generate`."""

import random
import time

import pytest
import torch
from conftest import FLAT_COSTS, VOCAB, config, following, lively_target, plain, scripted

from dspark.candidate_generator import CostTable, PrefixScheduler
from dspark.candidate_generator.schedule_dspark import RestPolicy


G = 7
TABLES = [
    CostTable.from_costs({1: 1.0, 2: 1 + cliff + slope, 8: 1 + cliff + 7 * slope}, draft=draft)
    for draft in (0.01, 0.05, 0.1, 0.2, 0.5)
    for slope in (0.0, 0.01, 0.05, 0.2, 1.0)
    for cliff in (0.0, 0.9)
]


class Run:
    """A call of `tokens` tokens with the throughput schedule; draft at position `i` is right when `hits(i)`.

    `rounds` holds (drafted, verified, accepted) of each, `loss` the tokens that plain decoding would have been ahead
    by the table (negative: behind).
    """

    def __init__(self, table: CostTable, hits, tokens: int, confidence: float = 0.9):
        scheduler, rest = PrefixScheduler("throughput", G, table), RestPolicy(table)
        self.rounds, spent, at = [], 0.0, 0
        while at < tokens:
            limit, verified, accepted = min(G, tokens - at - 1), 0, 0
            drafts = limit > 0 and rest.drafts()
            if drafts:
                scheduler.start_round(limit, at)
                while scheduler.admits(confidence):
                    verified += 1
                scheduler.end_round()
                while accepted < verified and hits(at + accepted):
                    accepted += 1
                rest.record(verified, accepted, at)
                spent += table.draft_seconds(at)
            spent += table.verify_seconds(1 + verified, at)
            self.rounds.append((drafts, verified, accepted))
            at += 1 + accepted
        self.loss = spent / table.verify_seconds(1) - tokens

    @property
    def drafted(self) -> int:
        return sum(drafts for drafts, _, _ in self.rounds)


@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.9, 0.99])
def test_a_drafter_that_never_hits_drafts_at_most_twelve_rounds(confidence):
    for table in TABLES:
        run = Run(table, lambda at: False, 256, confidence)
        assert 1 <= run.drafted <= 12
        # Every stint ends on its first loss beyond its credit: 4 stints fit into 256 tokens (pauses 8, 24, 72).
        dearest = table.draft_seconds() + table.verify_seconds(8) - 1
        assert run.loss <= RestPolicy.CREDIT + 3 * RestPolicy.TRIAL_CREDIT + 4 * dearest
        if dearest <= 1.0:
            assert run.loss <= 0.05 * 256


def test_an_oracle_drafts_full_blocks_and_never_rests():
    for table in TABLES:
        if table.verify_seconds(8) + table.draft_seconds() > 7.5:
            continue  # eight tokens at the price of eight
        run = Run(table, lambda at: True, 256, confidence=0.99)
        assert all(drafts for drafts, _, _ in run.rounds[:-1])
        assert [verified for _, verified, _ in run.rounds[:-1]] == [G] * (len(run.rounds) - 1)


@pytest.mark.parametrize("rate", [0.6, 0.8])
def test_a_good_drafter_is_rarely_rested(rate):
    """Acceptance `rate` a slot, drafted by a table of a small GPU: under 1 % of the rounds, measured 0.6 % at 0.6 and
    0.04 % at 0.8; and the reserve keeps most of the saving that drafting without pause would have."""
    rng = random.Random(0)
    runs = [Run(FLAT_COSTS, lambda at: rng.random() < rate, 256, confidence=rate) for _ in range(100)]
    rounds = sum(len(run.rounds) - 1 for run in runs)
    rested = rounds - sum(run.drafted for run in runs)
    assert rested < 0.01 * rounds
    assert sum(run.loss for run in runs) / len(runs) < -100


def test_a_drafter_that_costs_more_than_it_brings_is_rested():
    """Two thirds of a token a round: worth a tenth of a forward, not a whole one."""
    rng = random.Random(0)
    shares = []
    for draft in (0.1, 1.0):
        table = CostTable.from_costs({1: 1.0, 8: 1.0}, draft=draft)
        runs = [Run(table, lambda at: rng.random() < 0.4, 256) for _ in range(40)]
        shares.append(sum(run.drafted for run in runs) / sum(len(run.rounds) for run in runs))
    assert shares[1] < 0.2 < 0.8 < shares[0]


def test_a_dearer_draft_rests_no_later():
    """The same outcomes, charged with more."""
    rng = random.Random(0)
    for _ in range(500):
        table = rng.choice(TABLES)
        policies = [RestPolicy(table), RestPolicy(CostTable(table.verify, {0: 2 * table.draft_seconds()}))]
        rested = [False, False]
        for _ in range(50):
            verified = rng.randint(0, G)
            accepted = rng.randint(0, verified)
            for i, policy in enumerate(policies):
                rested[i] = rested[i] or not policy.drafts()
                policy.record(verified, accepted, 0)
            assert rested[1] or not rested[0]


def test_drafting_resumes_when_the_text_turns_easy():
    for turn in (16, 64, 300):
        run = Run(FLAT_COSTS, lambda at: at >= turn, 1000)
        at, drafted_at = 0, []
        for drafts, _, accepted in run.rounds:
            drafted_at += [at] * drafts
            at += 1 + accepted
        resumed = next(i for i in drafted_at if i >= turn)
        assert resumed - turn <= min(RestPolicy.LONGEST_PAUSE, 3 * turn + RestPolicy.FIRST_PAUSE)
        assert run.rounds[-20:-1] == [(True, G, G)] * 19  # and stays


def test_a_spell_of_luck_ends_the_back_off():
    """Behind a profitable stretch the first pause is short again."""
    run = Run(FLAT_COSTS, lambda at: 100 <= at < 300, 700)
    flags = "".join("D" if drafts else "." for drafts, _, _ in run.rounds)
    pauses = [len(pause) for pause in flags.split("D") if pause]
    assert pauses[0] == RestPolicy.FIRST_PAUSE
    assert pauses.count(RestPolicy.FIRST_PAUSE) == 2


def test_no_decision_reads_a_clock(monkeypatch):
    def raises(*args):
        raise AssertionError("a decision read the clock")

    for name in ("perf_counter", "monotonic", "time", "process_time", "perf_counter_ns", "monotonic_ns", "time_ns"):
        monkeypatch.setattr(time, name, raises)
    run = Run(FLAT_COSTS, lambda at: at % 3 > 0, 128)
    scheduler = PrefixScheduler("throughput", G, FLAT_COSTS)
    assert int(scheduler.length(torch.full((G,), 0.9))) == G
    monkeypatch.undo()
    assert run.drafted > 10


# Through generate.


@pytest.fixture(scope="module")
def target():
    return lively_target()


@pytest.mark.parametrize("table", [TABLES[0], TABLES[13], TABLES[26], TABLES[38], TABLES[49]], ids=range(5))
def test_a_drafter_that_never_hits_through_generate(target, prompt, table):
    drafter = scripted(target, prompt, "never", tokens=256, cost_table=table)
    out = target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=256))
    assert torch.equal(out, plain(target, prompt, max_new_tokens=256))
    statistics = drafter.statistics
    assert 1 <= statistics.rounds <= 12 and statistics.accepted == 0
    assert (
        statistics.rests["drafting did not pay"] == statistics.plain_rounds - statistics.rests["at the length limit"]
    )
    assert statistics.rounds + statistics.plain_rounds == 255  # the first token is the prompt's


def test_a_text_that_turns_easy_through_generate(target, prompt):
    text = plain(target, prompt, max_new_tokens=256)[0].tolist()
    drafter = following(target, text)
    right = drafter.script
    drafter.script = lambda position: right(position) if position >= 80 else (right(position) + 1) % VOCAB
    out = target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=256))
    assert out[0].tolist() == text
    statistics = drafter.statistics
    assert statistics.rests["drafting did not pay"] > 30
    assert statistics.accepted > 80 and statistics.lengths[G] > 10


def test_an_oracle_through_generate(target, prompt):
    drafter = scripted(target, prompt, "oracle", tokens=161)
    drafter.confidence = lambda slot: 0.95
    target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=161))
    assert drafter.statistics.lengths == {G: 20} and not drafter.statistics.rests
    assert drafter.statistics.acceptance_length == 8.0
