"""The sampling law by counting: thousands of sampled calls through `generate`, a chi-square test against the target.

What `test_law.py` shows draw by draw, without its scaffolding: real random numbers, fixed seeds. Two controls show
that the test would notice: a schedule that looks at a drawn token, and a reported law that is not the one drawn from.
"""

import itertools
from collections import Counter

import pytest
import torch
from conftest import config, make_drafter, make_target
from law import PROMPT, VOCAB, Opening, small_drafter, small_target

from dspark.candidate_generator import CostTable, DSparkCandidateGenerator, candidate_generator_dspark


G = 3
NEW = G + 3
TABLE = CostTable.from_costs({1: 1.0, 2: 1.5, 3: 1.8, 4: 2.0}, draft=0.05)
SETTINGS = {
    "temperature 1": {"temperature": 1.0, "top_k": 0},
    "temperature 0.7, top-k": {"temperature": 0.7, "top_k": 3},
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Forwards this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def p_value(counts: Counter, law: dict) -> float:
    """Chi-square test of counts against a law; outcomes expected fewer than five times share a cell."""
    total, cells, rest = counts.total(), [], [0.0, 0.0]
    assert all(law[outcome] > 0 for outcome in counts)
    for outcome, probability in law.items():
        expected, seen = probability * total, counts[outcome]
        if expected < 5:
            rest = [rest[0] + expected, rest[1] + seen]
        else:
            cells.append((expected, seen))
    if rest[0] >= 5:
        cells.append(tuple(rest))
    else:
        assert rest[1] < 20  # too rare for a cell, too many for chance
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def exact_law(target, temperature: float, top_k: int) -> dict[tuple, float]:
    """The target's law of `NEW` tokens: every text, its softmaxes multiplied, from one forward over all texts."""
    texts = list(itertools.product(range(VOCAB), repeat=NEW))
    ids = torch.cat([PROMPT.expand(len(texts), -1), torch.tensor(texts)], dim=1)
    with torch.no_grad():
        logits = target(ids).logits[:, PROMPT.shape[1] - 1 : -1].double() / temperature
    if top_k:
        least = logits.sort(dim=-1, descending=True).values[..., top_k - 1 : top_k]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = logits.softmax(-1).gather(2, torch.tensor(texts)[..., None]).prod(dim=1)[:, 0]
    return dict(zip(texts, chances.tolist()))


def marginal(law, first: int, last: int) -> Counter:
    """The joint law, or counts, of tokens `first..last`, counted from 1."""
    out = Counter()
    for text, weight in law.items():
        out[text[first - 1 : last]] += weight
    return out


def sampled(target, drafter, calls: int, seed: int, **settings) -> tuple[Counter, Counter]:
    """Texts of many calls, and the lengths chosen in their first drafted rounds, where all slots have room."""
    torch.manual_seed(seed)
    texts, lengths = Counter(), Counter()
    how = config(do_sample=True, max_new_tokens=NEW, dspark_log=True, **settings)
    for _ in range(calls):
        out = target.generate(PROMPT, assistant_model=drafter, generation_config=how)
        texts[tuple(out[0, PROMPT.shape[1] :].tolist())] += 1
        if drafter.statistics.log:
            lengths[len(drafter.statistics.log[0][1])] += 1
    return texts, lengths


PARTS = [(1, 3), (4, 6), (2, 2), (NEW, NEW)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("whole_block", [False, True], ids=["slots", "blocks"])
def test_the_law_of_many_calls_is_the_targets(name, whole_block, monkeypatch):
    switch = property(lambda self: whole_block, lambda self, value: None)
    monkeypatch.setattr(DSparkCandidateGenerator, "whole_block", switch, raising=False)
    target = small_target(1)
    texts, lengths = sampled(target, small_drafter(target, TABLE), 2000, seed=3, **SETTINGS[name])
    assert len(lengths) >= 3 and min(lengths.values()) > 20, lengths
    law = exact_law(target, **SETTINGS[name])
    assert sum(law.values()) == pytest.approx(1.0)
    for part in PARTS:
        assert p_value(marginal(texts, *part), marginal(law, *part)) > 0.001, part


@pytest.mark.slow
def test_a_schedule_that_looks_at_the_drawn_token_is_noticed(monkeypatch):
    honest = DSparkCandidateGenerator._draw_slot_by_slot

    def peeking(self, chain, limit):
        tokens, laws, *rest = honest(self, chain, limit)
        return ([], [], *rest) if tokens and tokens[0] != 1 else (tokens, laws, *rest)

    monkeypatch.setattr(DSparkCandidateGenerator, "_draw_slot_by_slot", peeking)
    target = small_target(1)
    texts, _ = sampled(target, small_drafter(target, TABLE), 700, seed=3, **SETTINGS["temperature 1"])
    law = exact_law(target, **SETTINGS["temperature 1"])
    assert p_value(marginal(texts, 1, 3), marginal(law, 1, 3)) < 1e-6


@pytest.mark.slow
def test_a_reported_law_that_is_not_the_one_drawn_from_is_noticed(monkeypatch):
    honest = candidate_generator_dspark.draw_from
    monkeypatch.setattr(candidate_generator_dspark, "draw_from", lambda q: honest(q**2 / (q**2).sum()))
    target = small_target(1)
    texts, _ = sampled(target, small_drafter(target, TABLE), 700, seed=3, **SETTINGS["temperature 1"])
    law = exact_law(target, **SETTINGS["temperature 1"])
    assert p_value(marginal(texts, 1, 3), marginal(law, 1, 3)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduced", "settings"), [(None, {"top_k": 0}), (12, {"temperature": 0.8, "top_k": 8, "top_p": 0.95})]
)
def test_drafts_are_as_frequent_as_the_law_handed_over_says(reduced, settings, monkeypatch):
    """Over a vocabulary of 64: the first draft of a round with the same anchor and context every time."""
    target = make_target(bos_token_id=None)
    drafter = make_drafter(target, block_size=1, draft_vocab_size=reduced)
    if reduced:
        drafter.d2t.copy_(torch.arange(reduced) * 3 + 1)  # ids 1, 5, 9, ..
    handed = []
    honest = DSparkCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        candidates, log_q = honest(self, input_ids, *args, **kwargs)
        if log_q is not None:
            handed.append((int(candidates[0, -1]), log_q[0, 0].exp()))
        return candidates, log_q

    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", watched)
    torch.manual_seed(0)
    how = config(do_sample=True, max_new_tokens=3, dspark_schedule="fixed", **settings)
    for _ in range(1000):
        target.generate(PROMPT, assistant_model=drafter, generation_config=how, logits_processor=[Opening(2)])
    law = handed[0][1]
    assert all(torch.allclose(law, row, atol=1e-6) for _, row in handed[:50])
    assert (law > 0).sum() >= 3
    counts = Counter(draft for draft, _ in handed)
    assert counts.total() == 1000
    assert p_value(counts, {i: q for i, q in enumerate(law.tolist()) if q > 0}) > 0.001
