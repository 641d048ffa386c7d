"""Output laws without sampling: every draw of a call is a fork, and every path through the forks is walked once.

`law_of(experiment)` runs an experiment once a path and hands it a `choose(weights)` to ask instead of a random number.
`generate_law` is that for a real `generate` call: the drafter's draws, the host's acceptance test and the host's draws
all ask. `statistics_of_paths` of an assisted call show which rounds the paths went through.
"""

import random
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
from conftest import config, make_drafter, make_target
from transformers import LogitsProcessor

from dspark.candidate_generator import CostTable, PrefixScheduler, candidate_generator_dspark


VOCAB = 4
PROMPT = torch.tensor([[1, 2, 3]])  # without the padding id 0, which generate would mask
MASK = 3  # an id like any other: the text may hold it


def law_of(experiment, full_length: int) -> dict[tuple, float]:
    """The law of `experiment(choose)`, a tuple of ids, by walking every path of choices of positive weight.

    `choose(weights)` takes weights that add up to 1 and returns an index. An output of `full_length` ids must end with
    the id its last choice named: all values of that choice are booked at once, which saves the widest forks.
    """
    law: dict[tuple, float] = defaultdict(float)
    path: list[list] = []  # [weights, index taken] of every choice so far

    def choose(weights):
        nonlocal depth
        if depth == len(path):
            path.append([weights, next(i for i, w in enumerate(weights) if w > 0)])
        depth += 1
        return path[depth - 1][1]

    while True:
        depth = 0
        output = experiment(choose)
        assert depth == len(path), "the experiment did not repeat its choices: something in it is random"
        *before, (last, taken) = path
        weight = 1.0
        for weights, index in before:
            weight *= weights[index]
        if len(output) == full_length:
            assert output[-1] == taken
            for token, share in enumerate(last):
                if share > 0:
                    law[(*output[:-1], token)] += weight * share
            path.pop()
        else:
            law[output] += weight * last[taken]
        while path:
            weights, index = path[-1]
            following = [i for i in range(index + 1, len(weights)) if weights[i] > 0]
            if following:
                path[-1][1] = following[0]
                break
            path.pop()
        else:
            return dict(law)


def total_variation(one: dict, other: dict) -> float:
    """Half the summed difference of two laws over the same outcomes."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def normalised(weights: torch.Tensor) -> list[float]:
    weights = weights.flatten().double()
    return (weights / weights.sum()).tolist()


def acceptance(ratios: list[float]) -> list[float]:
    """Chance of taking the first 0, 1, .., l of `l` drafts when draft `k` is taken with `min(1, p_k / q_k)`."""
    weights, alive = [], 1.0
    for ratio in ratios:
        taken = min(1.0, ratio)
        weights.append(alive * (1 - taken))
        alive *= taken
    return [*weights, alive]


@contextmanager
def asked(choose):
    """Every random draw of a sampled call asks `choose`: drafts, acceptance, and what the host draws itself."""

    def multinomial(weights, num_samples, **kwargs):
        assert weights.shape[0] == num_samples == 1
        return torch.tensor([[choose(normalised(weights))]])

    def draft(q):
        return torch.tensor([choose(normalised(q))])

    def uniform(ratios, **kwargs):
        taken = choose(acceptance(ratios.flatten().double().tolist()))
        return torch.cat([torch.zeros(taken), torch.ones(ratios.numel() - taken)]).to(ratios.dtype).view_as(ratios)

    def surprise(*args, **kwargs):
        raise AssertionError("a random number was drawn that the enumeration does not know of")

    with (
        mock.patch.object(torch, "multinomial", multinomial),
        mock.patch.object(torch, "rand_like", uniform),
        mock.patch.object(torch, "rand", surprise),
        mock.patch.object(candidate_generator_dspark, "draw_from", draft),
    ):
        yield


class PathStatistics:
    """What the rounds of all paths of a law did."""

    def __init__(self):
        self.lengths, self.rests = Counter(), Counter()
        self.accepted = self.verified = 0

    def add(self, statistics) -> None:
        self.lengths += statistics.lengths
        self.rests += statistics.rests
        self.accepted += statistics.accepted
        self.verified += statistics.verified


def generate_law(target, new_tokens: int, drafter=None, seen: PathStatistics | None = None, extra=None, **settings):
    """The law of the new tokens of `target.generate`, assisted or plain, through the host's own loop.

    Args:
        extra: further arguments of `generate`, such as criteria.
        settings: of the generation config.
    """
    call = {"assistant_model": drafter, **(extra or {})}

    def experiment(choose):
        with asked(choose):
            how = config(do_sample=True, max_new_tokens=new_tokens, **settings)
            out = target.generate(PROMPT, generation_config=how, **call)
        if seen is not None:
            seen.add(drafter.statistics)
        return tuple(out[0, PROMPT.shape[1] :].tolist())

    return law_of(experiment, new_tokens)


def small_target(seed: int = 0, **overrides):
    """A target over four ids, in float64, so that forwards of different widths agree to the last digit of fp32."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    values = {"vocab_size": VOCAB, "num_hidden_layers": 2, "bos_token_id": None, "spread": 20.0, **sizes}
    return make_target(seed=seed, **{**values, **overrides}).double()


def small_drafter(target, table: CostTable | None = None, seed: int = 1, sharpness: float = 12.0, **overrides):
    """A drafter over four ids whose confidences swing with the token before: what a bad schedule would leak."""
    values = {"num_hidden_layers": 1, "target_layer_ids": [0], "block_size": 3, "mask_token_id": MASK, "head_dim": 8}
    drafter = make_drafter(target, seed=seed, cost_table=table, **{**values, **overrides}).double()
    if drafter.confidence_head is not None:
        with torch.no_grad():
            drafter.confidence_head.proj.weight.mul_(sharpness)
    return drafter


class Searching(PrefixScheduler):
    """What Algorithm 1 forbids: looks at every confidence of the block, then takes the best prefix."""

    def length(self, confidences):
        tokens = 1 + confidences.double().cumprod(0).cumsum(0)
        values = torch.cat([tokens.new_ones(1), tokens]) / torch.tensor(self.seconds, dtype=torch.float64)
        return values.argmax()


class Opening(LogitsProcessor):
    """Fixes the first new token: a quarter of the paths, and a law that depends on the rounds alone."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > PROMPT.shape[1]:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([self.token]), 0.0)


class World:
    """Random tables for a simulated call: the target's law by text, draft laws and confidences by anchor and drafts.

    A confidence tells nothing about the drafts' worth but much about their ids: a schedule that peeks at it shows.
    """

    def __init__(self, seed: int, block_size: int = 3, ids: int = VOCAB):
        self.seed, self.block_size, self.ids = seed, block_size, ids
        self.target, self.draft, self.confidence = cache(self.target), cache(self.draft), cache(self.confidence)

    def _law(self, *key) -> list[float]:
        weights = [
            random.Random(repr((self.seed, key))).gammavariate(0.5, 1.0)
            for key in ((*key, i) for i in range(self.ids))
        ]
        return [w / sum(weights) for w in weights]

    def target(self, text: tuple) -> list[float]:
        return self._law("target", text)

    def draft(self, text: tuple, drafts: tuple) -> list[float]:
        return self._law("draft", text[-1:], drafts)

    def confidence(self, text: tuple, drafts: tuple) -> float:
        return random.Random(repr((self.seed, "confidence", text[-1:], drafts))).betavariate(0.8, 0.5)


def never(text: tuple) -> bool:
    return False


def target_law(world, new_tokens: int, ended=never, start: tuple = (0,)) -> dict[tuple, float]:
    """The law of plain decoding behind `start`, multiplied out."""
    open_texts, law = {(): 1.0}, {}
    while open_texts:
        text, weight = open_texts.popitem()
        for token, share in enumerate(world.target(start + text)):
            longer = (*text, token)
            done = len(longer) == new_tokens or ended(longer)
            (law if done else open_texts)[longer] = weight * share
    return law


def simulated_law(
    world, new_tokens: int, scheduler, rest=None, whole_block=False, ended=lambda text: False, seen=None
):
    """The law of an assisted call in a world, with the project's scheduler and rest policy in the loop.

    Args:
        scheduler, rest: make a fresh one for every call.
        whole_block: draw all slots, then ask `length`, as an accelerator does; otherwise ask `admits` slot by slot.
        seen: a counter of chosen lengths, `None` for a round that rested.
    """
    seen = Counter() if seen is None else seen

    def drafts_of(plan, text, limit, choose):
        drafts, laws, confidences = (), [], []
        for _ in range(limit):
            confidences.append(world.confidence(text, drafts))
            if not (whole_block or plan.admits(confidences[-1])):
                break
            laws.append(world.draft(text, drafts))
            drafts += (choose(laws[-1]),)
        if whole_block:
            drafts = drafts[: int(plan.length(torch.tensor(confidences, dtype=torch.float64)))]
        plan.end_round(confidences[: len(drafts) + 1])
        return drafts, laws

    def experiment(choose):
        plan, pause = scheduler(), rest() if rest is not None else None
        text = (0,)  # the anchor
        while len(text) <= new_tokens and not ended(text[1:]):
            limit, drafts, laws = min(world.block_size, new_tokens - len(text)), (), []
            rests = limit > 0 and pause is not None and not pause.drafts()
            if limit > 0 and not rests:
                plan.start_round(limit, len(text))
                drafts, laws = drafts_of(plan, text, limit, choose)
            p = [world.target(text + drafts[:k]) for k in range(len(drafts) + 1)]
            accepted = choose(acceptance([p[k][x] / laws[k][x] for k, x in enumerate(drafts)])) if drafts else 0
            last = p[accepted]
            if accepted < len(drafts):
                last = [max(0.0, a - b) for a, b in zip(last, laws[accepted])]
            block = (*drafts[:accepted], choose([w / sum(last) for w in last]))
            if limit > 0:
                seen[None if rests else len(drafts)] += 1
                if pause is not None and not rests:
                    pause.record(len(drafts), accepted, len(text))
            for token in block:
                text += (token,)
                if ended(text[1:]):
                    break
        return text[1:]

    return law_of(experiment, new_tokens)
