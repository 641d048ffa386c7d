"""The joint law of several requests, exactly: it is the product of the target's laws, whatever the schedule.

Part one walks the engine itself, `DSparkEngine.step` and `generate` on a batch, draw by draw. Part two walks many
more worlds and steps with tables in place of the models. A schedule may only look at admitted tokens, of any request,
and at older ones; the controls break that rule in two ways, one of which no request could see by itself.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from conftest import config
from joint import (
    PROMPTS,
    ByToken,
    Crossed,
    First,
    Searching,
    Seen,
    asked,
    endings_of,
    joint_law,
    marginal,
    plain_law,
    product,
    simulated_joint_law,
    walk,
)
from law import World, small_drafter, small_target, target_law, total_variation

from dspark.candidate_generator import engine_dspark
from dspark.candidate_generator.draft_plan_dspark import DraftPlanner
from dspark.candidate_generator.engine_costs_dspark import EngineCosts
from dspark.candidate_generator.engine_dspark import DSparkEngine
from dspark.candidate_generator.global_schedule_dspark import GlobalScheduler, Pool
from dspark.candidate_generator.schedule_dspark import RestPolicy


EXACT = 1e-6  # the engine computes probabilities in fp32
FIRST = (2, 1)  # the first new token of each request, where it is fixed
# By packed tokens: two of them are the anchors of two requests.
COSTS = {
    "smooth": EngineCosts({2: 1.0, 3: 1.2, 4: 1.4, 5: 1.55, 6: 1.7, 8: 2.0}, {1: 0.05}),
    "cliff": EngineCosts({2: 1.0, 3: 1.4, 6: 1.45}, {1: 0.05}),
    "high cliff": EngineCosts({2: 1.0, 3: 1.55, 6: 1.6}, {1: 0.05}),
    "straight": EngineCosts({2: 1.0, 3: 1.3, 4: 1.6, 5: 1.9, 6: 2.2}, {1: 0.05}),
    "steep": EngineCosts({2: 1.0, 3: 1.5, 4: 1.62, 5: 1.7, 6: 1.75}, {1: 0.05}),
    "jagged": EngineCosts({1: 0.95, 2: 1.0, 3: 1.02, 4: 1.4, 5: 1.42, 6: 1.8, 8: 1.85}, {1: 0.05}),
    "blocks": EngineCosts({1: 1.0, 2: 1.0, 3: 1.1, 6: 1.4}, {1: 0.05}, read=0.01, cell=0.02),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Forwards this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tireless(monkeypatch):
    """No request rests, so that states which differ in what drafting paid are one."""
    monkeypatch.setattr(RestPolicy, "CREDIT", 1e9)
    monkeypatch.setattr(RestPolicy, "RESERVE", 1e9)


def assert_product(
    target,
    drafter,
    new_tokens=(4, 3),
    first=FIRST,
    settings=None,
    eos=(),
    law=joint_law,
    near=EXACT,
    **engine_settings,
) -> Seen:
    """Two requests through an engine have the joint law that plain decoding gives them one by one.

    Args:
        first: each one's first new token, or `None`.
        settings: of sampling.
        law: `joint_law` or what stands for it.
        near: the largest total variation.
    """
    seen = Seen()
    settings = {"top_k": 2, **(settings or {})}
    engine = DSparkEngine(target, drafter, backend="packed", **engine_settings)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        how = config(do_sample=True, max_new_tokens=new_tokens[i], eos_token_id=list(eos) or None, **settings)
        fixed = {"logits_processor": [First(len(prompt), first[i])]} if first else {}
        requests.append(engine.submit(prompt, how, **fixed))
    assisted = law(engine, requests, seen)
    expected = product(
        *(
            plain_law(target, prompt, new_tokens[i], eos=eos, first=first[i] if first else None, **settings)
            for i, prompt in enumerate(PROMPTS)
        )
    )
    assert sum(expected.values()) == pytest.approx(1.0, abs=EXACT)
    assert len(expected) > 8
    assert total_variation(assisted, expected) < near
    return seen


THROUGHPUT = {
    f"{name}{'' if bridging else ', plain'}": {"schedule": "throughput", "costs": costs, "bridging": bridging}
    for name, costs in COSTS.items()
    for bridging in (False, True)
    if (name, bridging) in {("smooth", False), ("jagged", False), ("cliff", True), ("jagged", True), ("blocks", True)}
}
SCHEDULES = {**THROUGHPUT, "fixed": {"schedule": "fixed"}, "threshold": {"schedule": "threshold", "threshold": 0.5}}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_keeps_the_joint_law(name, tireless):
    target = small_target(1)
    new_tokens = (4, 4) if name == "cliff" else (4, 3)
    seen = assert_product(target, small_drafter(target, block_size=2), new_tokens, **SCHEDULES[name])
    assert 0 < seen.accepted < seen.verified
    assert len(seen.lengths) > 1, seen.lengths
    assert len(seen.together) > 2, seen.together


def test_a_delayed_budget_keeps_the_joint_law(tireless, monkeypatch):
    """Enough steps that the budget comes from the confidences of two steps ago."""
    budgets, best = Counter(), Pool.best

    def watched(self, survivals, slots):
        budgets[best(self, survivals, slots)] += 1
        return best(self, survivals, slots)

    monkeypatch.setattr(Pool, "best", watched)
    target = small_target(1)
    drafter = small_drafter(target, block_size=1)
    settings = {"schedule": "asynchronous", "costs": EngineCosts({2: 1.0, 3: 1.2, 4: 1.5}, {1: 0.05})}
    seen = assert_product(target, drafter, new_tokens=(5, 5), **settings)
    assert len(seen.lengths) == 2 and 0 < seen.accepted < seen.verified
    assert GlobalScheduler.DELAY == 2 and len(budgets) > 1, budgets


def test_no_drafts_keep_the_joint_law():
    target = small_target(1)
    seen = assert_product(
        target, small_drafter(target, block_size=2), (2, 3), first=None, settings={"top_k": 0}, schedule="none"
    )
    assert seen.verified == 0 and not seen.lengths


def test_all_ids_keep_the_joint_law(tireless):
    """No top-k: every id is drafted, refused and drawn."""
    target = small_target(1)
    drafter = small_drafter(target, seed=2, block_size=2)
    settings = {"schedule": "throughput", "costs": COSTS["straight"], "settings": {"top_k": 0}}
    seen = assert_product(target, drafter, (3, 3), **settings)
    assert 0 < seen.accepted < seen.verified and len(seen.lengths) > 1


@pytest.mark.parametrize("schedule", ["throughput", "threshold", "asynchronous"])
def test_an_eos_keeps_the_joint_law(schedule, tireless):
    target = small_target(1)
    drafter = small_drafter(target, block_size=2)
    seen = assert_product(target, drafter, eos=(3,), schedule=schedule, costs=COSTS["cliff"])
    assert 0 < seen.accepted < seen.verified and len(seen.lengths) > 1


def test_a_temperature_and_free_first_tokens_keep_the_joint_law(tireless):
    """Both requests share their processors, so they are judged as one group."""
    target = small_target(1)
    settings = {"temperature": 1.7, "top_k": 2}
    drafter = small_drafter(target, seed=2, block_size=2)
    seen = assert_product(
        target, drafter, (3, 3), first=None, settings=settings, schedule="throughput", costs=COSTS["straight"]
    )
    assert 0 < seen.accepted < seen.verified and len(seen.lengths) > 1


def test_a_reduced_vocabulary_keeps_the_joint_law(tireless):
    target = small_target(1)
    drafter = small_drafter(target, seed=2, block_size=2, draft_vocab_size=2)
    drafter.d2t.copy_(torch.tensor([1, 2]))  # ids 1, 3
    settings = {"schedule": "throughput", "costs": COSTS["straight"], "settings": {"top_k": 0}}
    seen = assert_product(target, drafter, (3, 3), **settings)
    assert 0 < seen.accepted < seen.verified and len(seen.lengths) > 1


def test_running_acceptance_rates_keep_the_joint_law(tireless):
    """What one request's drafts taught decides on the other's."""
    target = small_target(1)
    drafter = small_drafter(target, block_size=1, enable_confidence_head=False)
    costs = EngineCosts({2: 1.0, 3: 1.3, 4: 1.62}, {1: 0.05})
    seen = assert_product(target, drafter, (5, 4), schedule="throughput", costs=costs)
    assert len(seen.together) > 3 and 0 < seen.accepted < seen.verified


def test_rests_and_chosen_widths_keep_the_joint_law(monkeypatch):
    monkeypatch.setattr(RestPolicy, "CREDIT", 0.3)
    monkeypatch.setattr(RestPolicy, "FIRST_PAUSE", 1)
    monkeypatch.setattr(DraftPlanner, "WIDTH_STEPS", 1)
    target = small_target(1)
    drafter = small_drafter(target, block_size=2)
    costs = EngineCosts({2: 1.0, 3: 1.2, 4: 1.4, 6: 1.8}, {1: 0.0, 2: 0.02, 4: 0.3})
    law = partial(joint_law, steady=False)
    seen = assert_product(target, drafter, schedule="throughput", costs=costs, law=law)
    assert seen.rests["drafting did not pay"] > 0 and len(seen.widths) > 1, (seen.rests, seen.widths)
    assert 0 < seen.accepted < seen.verified


def test_merged_states_and_single_paths_agree(tireless):
    """The enumeration's own check: what it calls one state goes on alike."""
    target = small_target(1)
    for merge in (True, False):
        drafter = small_drafter(target, block_size=2)
        law = partial(joint_law, merge=merge)
        assert_product(target, drafter, (3, 3), schedule="throughput", costs=COSTS["cliff"], law=law)


def test_a_search_bends_the_joint_law_of_the_engine(tireless, monkeypatch):
    """The control: confidences that name the draft before, and a jump of cost that only two good slots can pay for."""
    target = small_target(1)
    drafter = small_drafter(target, block_size=2)
    drafter.confidence_head = ByToken(drafter, [0.95, 0.6, 0.6, 0.05])
    settings = {"schedule": "throughput", "costs": EngineCosts({2: 1.0, 3: 1.8, 6: 1.85}, {1: 0.05})}
    assert_product(target, drafter, **settings)
    monkeypatch.setattr(engine_dspark, "GlobalScheduler", Searching)
    with pytest.raises(AssertionError, match="total_variation"):
        assert_product(target, drafter, near=0.05, **settings)


@pytest.mark.parametrize("eos", [None, 3])
def test_a_batch_through_generate_has_the_joint_law(eos, monkeypatch):
    """The hook, left padding, and rows that end at different steps."""
    target = small_target(1)
    drafter = small_drafter(target, seed=2, block_size=2, table=COSTS["straight"])
    batch = torch.tensor([PROMPTS[0], [0, *PROMPTS[1]]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    how = config(do_sample=True, top_k=2, max_new_tokens=3, eos_token_id=eos)
    seen, verified = Counter(), Counter()

    def call(choose):
        laws = {}
        with asked(choose, lambda request, law: laws.update({request.row: law})):
            out = target.generate(batch, attention_mask=mask, assistant_model=drafter, generation_config=how)
        statistics = drafter.statistics
        seen.update(statistics.lengths)
        verified.update(verified=statistics.verified, accepted=statistics.accepted)
        return [endings_of(row, laws.get(i), 3, eos) for i, row in enumerate(out[:, batch.shape[1] :].tolist())]

    law = Counter()
    for weight, (one, two) in walk(call):
        for text, chance in one:
            for other, share in two:
                law[text, other] += weight * chance * share
    ends = () if eos is None else (eos,)
    expected = product(*(plain_law(target, prompt, 3, top_k=2, eos=ends) for prompt in PROMPTS))
    assert len({len(text) for texts in expected for text in texts}) == (1 if eos is None else 2)
    assert total_variation(law, expected) < EXACT
    assert len(seen) > 1 and 0 < verified["accepted"] < verified["verified"]


# Part two: tables instead of models.

KINDS = {
    **{f"{name}, plain": partial(GlobalScheduler, "throughput", 2, c, bridging=False) for name, c in COSTS.items()},
    **{f"{name}, bridging": partial(GlobalScheduler, "throughput", 2, c) for name, c in COSTS.items()},
    **{f"{name}, asynchronous": partial(GlobalScheduler, "asynchronous", 2, c) for name, c in COSTS.items()},
    "straight, delay 1": partial(GlobalScheduler, "asynchronous", 2, COSTS["straight"], delay=1),
    "fixed": partial(GlobalScheduler, "fixed", 2),
    "fixed length": partial(GlobalScheduler, "fixed", 2, length=1),
    "threshold": partial(GlobalScheduler, "threshold", 2, threshold=0.5),
    "none": partial(GlobalScheduler, "none", 2),
}
EOS = 1


def pair(seed: int) -> list[World]:
    """Two requests over two ids: all a leak needs."""
    return [World(seed, 2, 2), World(seed + 100, 2, 2)]


def product_law(worlds, new_tokens, eos=()):
    def ended(text):
        return bool(text) and text[-1] in eos

    return product(*(target_law(world, n, ended=ended) for world, n in zip(worlds, new_tokens)))


@pytest.mark.parametrize("eos", [(), (EOS,)], ids=["", "EOS"])
@pytest.mark.parametrize("name", KINDS)
def test_schedules_keep_the_joint_law_in_random_worlds(name, eos):
    seen = Counter()
    for seed in (1, 2, 8, 12):
        worlds = pair(seed)
        law = simulated_joint_law(worlds, (3, 3), KINDS[name], eos=eos, seen=seen)
        assert total_variation(law, product_law(worlds, (3, 3), eos)) < 1e-12
    # Algorithm 1 by itself stops in front of a high cliff.
    assert len(seen) > 2 or name in ("none", "fixed length", "high cliff, plain", "high cliff, asynchronous"), seen


@pytest.mark.parametrize("kind", ["smooth, asynchronous", "jagged, asynchronous", "cliff, bridging"])
def test_later_steps_keep_the_joint_law(kind, monkeypatch):
    """Budgets of two steps ago, and forecasts from drafts of earlier rounds."""
    budgets, best = Counter(), Pool.best

    def watched(self, survivals, slots):
        budgets[best(self, survivals, slots)] += 1
        return best(self, survivals, slots)

    monkeypatch.setattr(Pool, "best", watched)
    worlds = pair(8)
    law = simulated_joint_law(worlds, (4, 4), KINDS[kind])
    assert total_variation(law, product_law(worlds, (4, 4))) < 1e-12
    assert len(budgets) > 1 or "bridging" in kind, budgets


@pytest.mark.parametrize("kind", ["smooth, bridging", "jagged, asynchronous", "threshold", "fixed"])
def test_little_room_and_prompts_beside_keep_the_joint_law(kind):
    seen, worlds = Counter(), pair(2)
    for room, other in ((1, 0), (3, 0), (3, 2)):
        law = simulated_joint_law(worlds, (3, 3), KINDS[kind], room=room, other_tokens=other, seen=seen)
        assert total_variation(law, product_law(worlds, (3, 3))) < 1e-12
    assert {1, 3} & {sum(lengths) for lengths in seen}


@pytest.mark.parametrize("kind", ["smooth, plain", "cliff, bridging", "threshold"])
def test_three_requests_keep_the_joint_law(kind):
    seen = Counter()
    worlds = [World(seed, 1, 2) for seed in (2, 5, 8)]
    law = simulated_joint_law(worlds, (3, 2, 3), KINDS[kind], seen=seen)
    assert total_variation(law, product_law(worlds, (3, 2, 3))) < 1e-12
    assert len(seen) > 2


@pytest.mark.parametrize(("name", "seed"), [("high cliff", 1), ("steep", 8), ("cliff", 12)])
def test_a_search_without_a_delay_bends_the_law(name, seed):
    worlds = pair(seed)
    law = simulated_joint_law(worlds, (3, 3), partial(Searching, "throughput", 2, COSTS[name]))
    assert total_variation(law, product_law(worlds, (3, 3))) > 0.05


class Crossing:
    """Ids A = 0 and B = 1; the second confidence tells what the first draft was."""

    block_size = 2

    @staticmethod
    def target(text):
        return [0.7, 0.3]

    @staticmethod
    def draft(text, drafts):
        return [0.5, 0.5]

    @staticmethod
    def confidence(text, drafts):
        return 0.8 if not drafts else (0.9 if drafts[0] == 0 else 0.1)


def test_a_look_at_the_other_requests_draft_keeps_the_marginals_and_bends_the_joint_law():
    """No request by itself shows it: a joint test is needed."""
    worlds, expected = [Crossing, Crossing], product_law([Crossing, Crossing], (2, 2))
    law = simulated_joint_law(worlds, (2, 2), partial(Crossed, "fixed", 2))
    for which in (0, 1):
        assert total_variation(marginal(law, which), marginal(expected, which)) < 1e-12
    both = sum(weight for texts, weight in law.items() if texts[0][0] == texts[1][0] == 0)
    assert both == pytest.approx(0.5125, abs=1e-12)
    assert total_variation(law, expected) > 0.04
    for kind in ("smooth, plain", "cliff, bridging", "jagged, asynchronous", "fixed"):
        assert total_variation(simulated_joint_law(worlds, (2, 2), KINDS[kind]), expected) < 1e-12


class Ending(Crossing):
    """Confident of everything, and every second draft is an EOS."""

    @staticmethod
    def confidence(text, drafts):
        return 0.9


class Foreseeing(GlobalScheduler):
    """Takes a drafted EOS for a limit known before, so that a slot is worth less for being one."""

    def lengths(self, confidences, limits, load, room, ends=None):
        return super().lengths(confidences, torch.minimum(limits, ends), load, room)


@pytest.mark.parametrize(("scheduler", "bent"), [(GlobalScheduler, False), (Foreseeing, True)])
def test_an_eos_that_is_not_admitted_decides_nothing(scheduler, bent):
    """Nothing behind an EOS is worth anything, yet whether a slot is verified may not depend on its being one."""
    worlds = [Ending, Ending]
    costs = EngineCosts({2: 1.0, 3: 2.0, 6: 2.1}, {1: 0.05})
    law = simulated_joint_law(worlds, (3, 3), partial(scheduler, "throughput", 2, costs), eos=(EOS,))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    distance = total_variation(law, product_law(worlds, (3, 3), (EOS,)))
    assert distance > 0.02 if bent else distance < 1e-12
