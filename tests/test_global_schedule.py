"""The schedules of many requests: what they admit, what they may not look at, and what they reckon with."""

import copy
import random
import statistics
import time

import pytest
import torch

from dspark.candidate_generator import CostTable, PrefixScheduler
from dspark.candidate_generator.engine_costs_dspark import EngineCosts
from dspark.candidate_generator.global_schedule_dspark import GLOBAL_SCHEDULES, GlobalScheduler, Load


G = 7
FLAT = EngineCosts({1: 1.0, 64: 1.2}, {1: 0.1})
KINDS = {
    "throughput": {"kind": "throughput", "bridging": False},
    "bridging": {"kind": "throughput"},
    "asynchronous": {"kind": "asynchronous"},
    "fixed": {"kind": "fixed"},
    "fixed length": {"kind": "fixed", "length": 3},
    "threshold": {"kind": "threshold", "threshold": 0.5},
    "none": {"kind": "none"},
}


def scheduler(name: str, width: int = G, costs: EngineCosts = FLAT) -> GlobalScheduler:
    return GlobalScheduler(block_size=width, costs=costs, **KINDS[name])


def load_of(requests: int, drafting: int = 1, other: int = 0, keys: int = 0) -> Load:
    return Load(requests + other, requests, keys, drafting)


def ask(plan: GlobalScheduler, c, limits=None, load: Load | None = None, room: int = 10_000, ends=None) -> list[int]:
    c = torch.as_tensor(c, dtype=torch.float32)
    limits = torch.full((len(c),), c.shape[1]) if limits is None else torch.as_tensor(limits)
    ends = None if ends is None else torch.as_tensor(ends)
    return plan.lengths(c, limits, load or load_of(len(c), c.numel()), room, ends).tolist()


def random_costs(rng, most: int, steps=(0, 0, 1, 2, 8, 40)) -> EngineCosts:
    """A jagged table whose seconds are multiples of 1/64, so that ties are ties in floating point too."""
    seconds, verify = 64, {}
    for tokens in range(1, most + 1):
        seconds += rng.choice(steps)
        verify[tokens] = seconds / 64
    rectangle = {"read": rng.choice((0, 2**-10)), "cell": rng.choice((0, 2**-12))}
    return EngineCosts(verify, {1: rng.choice((0.0, 0.25, 1.0))}, **rectangle)


def random_case(rng, most_requests: int = 16):
    """Confidences with ties, certainties and zeros among them, limits, load and costs."""
    requests, width = rng.randint(1, most_requests), rng.randint(1, G)
    values = rng.choice(([0.5, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0], [0.75, 1.0, 1.0], None))
    c = [[rng.random() if values is None else rng.choice(values) for _ in range(width)] for _ in range(requests)]
    c = torch.tensor(c)
    limits = [rng.choice((width, width, rng.randint(0, width))) for _ in range(requests)]
    undrafted, prompt, keys = rng.choice((0, 0, 3)), rng.choice((0, 0, 5)), rng.choice((0, 16))
    load = Load(requests + undrafted + prompt, requests + undrafted, keys, requests * width)
    return c, limits, load, random_costs(rng, load.tokens + requests * width)


def seconds_of(costs: EngineCosts, load: Load, lengths: list[int]) -> float:
    verify = costs.verify_seconds(load.tokens + sum(lengths), load.requests, 1 + max(lengths), load.keys)
    return costs.draft_seconds(load.drafting) + verify


def candidates(c: torch.Tensor, limits: list[int]) -> list[tuple[float, int, int]]:
    """`(-a, j, r)`, sorted."""
    pool = []
    for r, row in enumerate(c.double().tolist()):
        survival = 1.0
        for j in range(limits[r]):
            survival *= row[j]
            pool.append((-survival, j, r))
    return sorted(pool)


def algorithm_1(c, limits, load: Load, costs: EngineCosts, room: int = 10_000) -> list[int]:
    """The paper's pseudo-code as it stands: the whole pool sorted, one candidate at a time, the first that does not
    raise Theta ends it."""
    lengths, tokens = [0] * len(c), float(load.requests)
    theta = tokens / seconds_of(costs, load, lengths)
    for minus_survival, _, r in candidates(c, limits):
        longer = [*lengths[:r], lengths[r] + 1, *lengths[r + 1 :]]
        new = (tokens - minus_survival) / seconds_of(costs, load, longer)
        if not new > theta or sum(longer) > room:
            break
        lengths, tokens, theta = longer, tokens - minus_survival, new
    return lengths


# What is admitted.


def test_throughput_is_algorithm_1_word_by_word():
    rng, totals, ties = random.Random(0), set(), 0
    for _ in range(2_000):
        c, limits, load, costs = random_case(rng)
        room = rng.choice((10_000, 10_000, rng.randint(1, 20)))
        expected = algorithm_1(c, limits, load, costs, room)
        assert ask(scheduler("throughput", c.shape[1], costs), c, limits, load, room) == expected
        totals.add(sum(expected))
        pool = [a for a, _, _ in candidates(c, limits)]
        ties += len(set(pool)) < len(pool) and 0 < sum(expected) < len(pool)
    assert len(totals) > 20 and ties > 100


def test_ties_go_to_the_earlier_slot_and_then_to_the_earlier_request():
    costs = EngineCosts({2: 1.0, 3: 1.01, 4: 1.02, 5: 50.0}, {1: 0.0})
    assert ask(scheduler("throughput", 2, costs), [[1.0, 1.0], [1.0, 1.0]]) == [1, 1]
    costs = EngineCosts({2: 1.0, 3: 1.01, 4: 50.0}, {1: 0.0})
    assert ask(scheduler("throughput", 2, costs), [[1.0, 1.0], [1.0, 1.0]]) == [1, 0]
    assert ask(scheduler("throughput", 2, costs), [[0.5, 1.0], [0.75, 0.5]]) == [0, 1]


def test_one_request_is_scheduled_as_alone():
    rng, lengths = random.Random(1), set()
    for _ in range(1_000):
        c, limits, _, costs = random_case(rng, most_requests=1)
        width = c.shape[1]
        table = CostTable.from_costs(costs.verify, costs.draft[1])
        alone = PrefixScheduler("throughput", width, table, bridging=False)
        alone.start_round(limits[0], 0)
        expected = int(alone.length(c[0, : limits[0]])) if limits[0] else 0
        plan = scheduler("throughput", width, EngineCosts.from_table(table))
        assert ask(plan, c, limits, load_of(1, width)) == [expected]
        lengths.add(expected)
    assert lengths == set(range(G + 1))


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_threshold_is_rounded_as_for_one_request(threshold):
    """Confidences are fp32: one that prints as the threshold passes it."""
    exact = torch.tensor(threshold)
    zero, one = torch.zeros(()), torch.ones(())
    near = [exact, torch.nextafter(exact, zero), torch.nextafter(exact, one)]
    plan, alone = (
        GlobalScheduler("threshold", 2, threshold=threshold),
        PrefixScheduler("threshold", 2, None, threshold),
    )
    alone.start_round(2, 0)
    for first in near:
        for second in near:
            c = torch.stack([first, second])
            assert ask(plan, c[None]) == [int(alone.length(c))]
    assert ask(plan, torch.stack(near)[:, None]) == [1, 0, 1]


def test_fixed_and_none_do_what_they_say():
    rng = random.Random(2)
    for _ in range(200):
        c, limits, load, costs = random_case(rng)
        assert ask(scheduler("fixed"), c, limits, load) == limits
        assert ask(scheduler("fixed length"), c, limits, load) == [min(3, limit) for limit in limits]
        assert ask(scheduler("none"), c, limits, load) == [0] * len(c)


def test_an_asynchronous_budget_is_the_optimum_of_two_steps_ago():
    """How many: the unconstrained search over the old survivals, by today's load. Who: this step's order."""
    rng, differed, beyond = random.Random(3), 0, 0
    for case in range(60):
        delay = case % 3 or GlobalScheduler.DELAY
        requests, width = rng.randint(1, 8), rng.randint(1, G)
        costs = random_costs(rng, 40 + 9 * requests * width, steps=(0, 1, 2, 2, 40))
        plan, past = GlobalScheduler("asynchronous", width, costs, **({"delay": delay} if case % 3 else {})), []
        for step in range(6):
            now = max(1, requests - step % 3)
            c = torch.rand(now, width, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
            limits = [rng.randint(0, width) for _ in range(now)]
            load = Load(now + rng.choice((0, 7)), now, rng.choice((0, 16)), now * width)
            lengths = ask(plan, c, limits, load)
            pool = candidates(c, limits)
            if step < delay:
                assert lengths == algorithm_1(c, limits, load, costs)
            else:
                old, best, budget = past[step - delay][: now * width], None, None
                tokens, longest = float(load.requests), 0
                for count in range(len(old) + 1):
                    if count:
                        tokens, longest = tokens - old[count - 1][0], max(longest, old[count - 1][1] + 1)
                    verify = costs.verify_seconds(load.tokens + count, load.requests, 1 + longest, load.keys)
                    theta = tokens / (costs.draft_seconds(load.drafting) + verify)
                    if best is None or theta > best:
                        best, budget = theta, count
                takers = [r for _, _, r in pool[:budget]]
                assert lengths == [takers.count(r) for r in range(now)]
                differed += lengths != algorithm_1(c, limits, load, costs)
                beyond += sum(lengths) > sum(algorithm_1(c, limits, load, costs))
            past.append(pool)
    assert GlobalScheduler.DELAY == 2 and differed > 40 and beyond > 10


def test_bridging_crosses_a_jump_and_leaves_hopeless_slots():
    for requests in (1, 2, 5, 16):
        jump = 1 + 1 / requests
        cliff = EngineCosts({requests: 1.0, requests + 1: jump, 8 * requests: 1.02 * jump}, {1: 0.05})
        for confidence, length in ((0.9, G), (0.02, 0)):
            c = [[confidence] * G] * requests
            assert ask(scheduler("throughput", G, cliff), c) == [0] * requests
            assert ask(scheduler("bridging", G, cliff), c) == [length] * requests


def test_bridging_admits_the_good_request_only():
    cliff = EngineCosts({2: 1.0, 3: 1.4, 6: 1.42, 7: 3.0}, {1: 0.05})
    assert ask(scheduler("bridging", 4, cliff), [[0.95] * 4, [0.05] * 4]) == [4, 0]


def test_forecasts_of_past_rounds_decide_at_a_jump():
    """A good first slot does not cross it once the slots behind have turned out to be hopeless."""
    cliff = EngineCosts({2: 1.0, 3: 2.3, 16: 2.4}, {1: 0.05})
    plan, hopeless = scheduler("bridging", 4, cliff), [[0.9, 1e-6, 1e-6, 1e-6]] * 2
    assert sum(ask(plan, hopeless)) > 1
    assert ask(plan, [[0.9, 0.9, 0.9, 0.9]] * 2) == [0, 0]
    assert ask(scheduler("bridging", 4, cliff), [[0.9, 0.9, 0.9, 0.9]] * 2) == [4, 4]


def test_bridging_without_a_jump_is_algorithm_1():
    """On a smooth table whose steps only grow dearer, a slot that does not pay has nothing behind it that does."""
    rng = random.Random(4)
    costs = EngineCosts({n: 1.02**n for n in range(1, 200)}, {1: 0.1})
    for _ in range(200):
        c, limits, load, _ = random_case(rng, most_requests=8)
        plain = ask(scheduler("throughput", c.shape[1], costs), c, limits, load)
        assert ask(scheduler("bridging", c.shape[1], costs), c, limits, load) == plain


# What is not looked at.


def behind(c: torch.Tensor, lengths: list[int], draw) -> torch.Tensor:
    """Other confidences behind the first refused slot of every request; `draw(shape)` gives them."""
    unseen = torch.arange(c.shape[1]) > torch.tensor(lengths)[:, None]
    return torch.where(unseen, draw(c.shape), c)


def rounds(name: str, seed: int, cases: int = 60, steps: int = 3):
    """`(scheduler before the step, c, limits, load, lengths)` of several steps of many runs."""
    rng = random.Random(seed)
    for _ in range(cases):
        requests, width = rng.randint(1, 6), rng.randint(2, G)
        most = requests * (width + 1)
        jump = 1 + 2.5 * rng.random()
        cliff = EngineCosts({requests: 1.0, requests + 1: jump, most: 1.05 * jump}, {1: 0.1})
        plan = scheduler(name, width, rng.choice((cliff, random_costs(rng, most))))
        for _ in range(steps):
            c = torch.rand(requests, width, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
            c = c.clamp(min=0.01) ** rng.choice((0.1, 0.5, 1.0))
            limits = [rng.randint(1, width) for _ in range(requests)]
            load, before = load_of(requests, requests * width), copy.deepcopy(plan)
            yield before, c, limits, load, ask(plan, c, limits, load)


LOOKING = ["throughput", "bridging", "asynchronous", "threshold", "fixed"]


@pytest.mark.parametrize("name", LOOKING)
def test_confidences_behind_the_first_refused_slot_decide_nothing(name):
    generator, stopped = torch.Generator().manual_seed(0), 0
    for before, c, limits, load, lengths in rounds(name, 5):
        for _ in range(2):
            other = behind(c, lengths, lambda shape: torch.rand(shape, generator=generator).clamp(min=0.01))
            assert ask(copy.deepcopy(before), other, limits, load) == lengths
            stopped += 0 < sum(lengths) < sum(limits) and not torch.equal(other, c)
    assert stopped > 40 or name == "fixed"


@pytest.mark.parametrize("name", LOOKING)
def test_certain_failures_behind_the_first_refused_slot_decide_nothing(name):
    generator, changed = torch.Generator().manual_seed(0), 0

    def draw(shape):
        return torch.rand(shape, generator=generator).clamp(min=0.01) * (torch.rand(shape, generator=generator) > 0.4)

    for before, c, limits, load, _ in rounds(name, 6):
        c = behind(c, [0] * len(c), draw)
        lengths = ask(copy.deepcopy(before), c, limits, load)
        for _ in range(3):
            other = behind(c, lengths, draw)
            changed += not torch.equal(other, c)
            assert ask(copy.deepcopy(before), other, limits, load) == lengths
    assert changed > 40


@pytest.mark.parametrize("name", LOOKING)
def test_an_eos_at_a_refused_slot_decides_nothing(name):
    """A drafted EOS takes away the slots behind it. Where it was not admitted, nobody may know of it."""
    rng, changed = random.Random(0), 0
    for before, c, limits, load, _ in rounds(name, 7):
        width = c.shape[1]
        ends = [rng.randint(1, width) for _ in limits]
        lengths = ask(copy.deepcopy(before), c, limits, load, ends=ends)
        for _ in range(3):
            other = [end if n == end else rng.randint(n + 1, width) for n, end in zip(lengths, ends)]
            changed += other != ends
            assert ask(copy.deepcopy(before), c, limits, load, ends=other) == lengths
    assert changed > 40


@pytest.mark.parametrize("name", LOOKING)
def test_nothing_behind_an_admitted_eos_is_verified(name):
    rng, cut = random.Random(0), 0
    for before, c, limits, load, lengths in rounds(name, 8):
        ends = [rng.randint(1, c.shape[1]) for _ in lengths]
        ended = ask(copy.deepcopy(before), c, limits, load, ends=ends)
        assert all(n <= min(limit, end) for n, limit, end in zip(ended, limits, ends))
        cut += any(n == end < free for n, end, free in zip(ended, ends, lengths))
    assert cut > 20


# Room, load, and what blocks cost each other.


@pytest.mark.parametrize("name", KINDS)
def test_limits_and_room_hold(name):
    rng, cut = random.Random(8), 0
    for _ in range(120):
        c, limits, load, costs = random_case(rng)
        plan, room = scheduler(name, c.shape[1], costs), rng.randint(1, 12)
        for _ in range(2):
            same = copy.deepcopy(plan)
            lengths, free = ask(plan, c, limits, load, room), ask(same, c, limits, load)
            assert all(0 <= n <= limit for n, limit in zip(lengths, limits)) and sum(lengths) <= room
            assert all(n <= most for n, most in zip(lengths, free)) or name == "bridging"
            if sum(free) > room and name != "bridging":
                assert sum(lengths) == room
                cut += 1
    assert cut > 30 or name in ("none", "bridging")


def test_little_room_goes_to_first_slots_first():
    assert ask(scheduler("fixed"), [[0.9] * G] * 3, room=5) == [2, 2, 1]
    assert ask(scheduler("threshold"), [[0.9] * G, [0.1] * G, [0.9] * G], room=3) == [2, 0, 1]
    assert ask(scheduler("throughput"), [[0.9] * G, [0.8] * G], room=3) == [2, 1]


def test_one_long_block_is_dear_for_all():
    c = [[0.95] * 6, *[[0.5] * 6] * 7]
    lengths = {}
    for cell, keys in ((0.0, 100), (1.6e-4, 1), (1.6e-4, 100), (1.6e-4, 500)):
        costs = EngineCosts({1: 1.0, 8: 1.0, 56: 1.6}, {1: 0.1}, cell=cell)
        lengths[cell, keys] = max(ask(scheduler("throughput", 6, costs), c, load=load_of(8, 48, keys=keys)))
    assert list(lengths.values()) == [6, 6, 1, 0]


def test_keys_that_are_read_anyway_make_drafts_worth_more():
    costs = EngineCosts({2: 1.0, 3: 1.9, 16: 13.6}, {1: 0.0}, read=0.01)
    near, far = (
        ask(scheduler("throughput", 4, costs), [[0.7] * 4] * 2, load=load_of(2, 8, keys=keys)) for keys in (1, 1000)
    )
    assert near == [0, 0] and sum(far) > 2


def test_load_shortens_blocks():
    """On a table on which every further token costs a larger share than the one before."""
    costs = EngineCosts({n: 2.0 ** ((n / 24) ** 2) for n in range(1, 200)}, {1: 0.2})
    for confidence in (0.6, 0.8, 0.95):
        for name in ("throughput", "bridging"):
            prompts = [
                sum(ask(scheduler(name, G, costs), [[confidence] * G] * 4, load=load_of(4, 28, other)))
                for other in range(0, 64, 4)
            ]
            assert prompts == sorted(prompts, reverse=True) and prompts[0] > prompts[-1]
            shares = [
                sum(ask(scheduler(name, G, costs), [[confidence] * G] * requests)) / requests
                for requests in (1, 2, 4, 8, 16, 24)
            ]
            assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]


def test_a_decision_takes_little_time():
    """For 256 requests of 7 slots."""
    generator = torch.Generator().manual_seed(0)
    costs = EngineCosts({1: 1.0, 256: 1.2, 384: 1.25, 385: 1.5, 2048: 9.0}, {1: 0.1}, cell=1e-10, read=1e-7)
    for name in ("throughput", "bridging", "asynchronous"):
        plan, samples = scheduler(name, G, costs), []
        for _ in range(40):
            c = torch.rand(256, G, generator=generator) ** 0.3
            started = time.thread_time()
            lengths = ask(plan, c, load=load_of(256, 256 * G, keys=500))
            samples.append(1000 * (time.thread_time() - started))
        median = statistics.median(samples)
        print(f"{name}: {median:.2f} ms for 256 requests, {sum(lengths)} drafts admitted")
        assert 0 < sum(lengths) < 256 * G
        assert median < 3


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'best'.*" + ", ".join(GLOBAL_SCHEDULES)):
        GlobalScheduler("best", G)
    for kind in ("throughput", "asynchronous"):
        with pytest.raises(ValueError, match=f"'{kind}'.*`costs`"):
            GlobalScheduler(kind, G)
    with pytest.raises(ValueError, match="`delay` is 0"):
        GlobalScheduler("asynchronous", G, FLAT, delay=0)
