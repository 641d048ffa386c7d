"""Joint output laws of several requests, draw by draw, as `law.py` has them for one.

Two ways. `joint_law` walks `DSparkEngine.step` itself: from every state of the engine each path of the step's draws is
run on a copy, and states that can only go on alike are one. `simulated_joint_law` puts tables in place of the models,
with the project's `GlobalScheduler` in the loop, so that there are more steps, worlds and schedules.
"""

import copy
import itertools
import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from unittest import mock

import torch
from law import acceptance, normalised
from transformers import LogitsProcessor

from dspark.candidate_generator import batch_drafter_dspark, verification_dspark
from dspark.candidate_generator.global_schedule_dspark import GlobalScheduler, Load, Pool


PROMPTS = ([1, 2, 3], [2, 1])


class First(LogitsProcessor):
    """Fixes the first new token behind a prompt: fewer paths, and a law that depends on drafted steps alone."""

    def __init__(self, prompt_length: int, token: int):
        self.prompt_length, self.token = prompt_length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self.prompt_length:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([self.token]), 0.0)


class ByToken(torch.nn.Module):
    """A confidence head that says `chances[x]` behind token `x`, whatever the text."""

    def __init__(self, drafter, chances: list[float]):
        super().__init__()
        self.embeddings = drafter.markov_head.embed(torch.arange(len(chances))).detach()
        self.logits = torch.logit(torch.tensor(chances, dtype=torch.float64))

    def forward(self, hidden, embedding):
        return self.logits[torch.cdist(embedding, self.embeddings).argmin(-1)]


class Searching(GlobalScheduler):
    """What section 5.2 forbids without a delay: the best number of slots by all confidences of this very step."""

    def lengths(self, confidences, limits, load, room, ends=None):
        c = confidences.double()
        pool = Pool(c, torch.arange(c.shape[1]) < limits[:, None], load, self.costs)
        return pool.lengths(min(pool.best(pool.survivals, pool.slots), room))


class Crossed(GlobalScheduler):
    """Verifies one draft of each of two requests if the *other's* draft is the token whose next confidence is high."""

    def lengths(self, confidences, limits, load, room, ends=None):
        if len(confidences) < 2:
            return torch.zeros(len(confidences), dtype=torch.long)
        return torch.minimum((confidences[:, 1] > 0.5).long().flip(0), limits)


def walk(run):
    """`(weight, run(choose))` for every path of choices of positive weight."""
    path: list[list] = []

    def choose(weights):
        nonlocal depth
        if depth == len(path):
            path.append([weights, next(i for i, w in enumerate(weights) if w > 0)])
        depth += 1
        return path[depth - 1][1]

    while True:
        depth, weight = 0, 1.0
        out = run(choose)
        assert depth == len(path), "the run did not repeat its choices: something in it is random"
        for weights, index in path:
            weight *= weights[index]
        yield weight, out
        while path:
            weights, index = path[-1]
            following = [i for i in range(index + 1, len(weights)) if weights[i] > 0]
            if following:
                path[-1][1] = following[0]
                break
            path.pop()
        else:
            return


@contextmanager
def asked(choose, book):
    """Every draw of an engine's step asks `choose`, but for a token at its request's last place: nothing looks at it
    any more, so its whole law goes to `book(request, law)` and 0 is drawn."""
    kept = {}

    def drafts(q, requests):
        return torch.tensor([choose(normalised(row)) for row in q])

    def accepted(ratios, request):
        kept[id(request)] = choose(acceptance(ratios)) if ratios else 0
        return kept[id(request)]

    def tokens(q, requests):
        out = []
        for row, request in zip(q, requests):
            last = len(request.ids) + kept.pop(id(request)) + 1 == request.max_length
            if last:
                book(request, normalised(row))
            out.append(0 if last else choose(normalised(row)))
        return torch.tensor(out)

    def whose(requests, device):
        return requests

    def surprise(*args, **kwargs):
        raise AssertionError("a random number was drawn that the enumeration does not know of")

    with (
        mock.patch.multiple(batch_drafter_dspark, draw_from=drafts, uniforms=whose),
        mock.patch.multiple(verification_dspark, draw_from=tokens, uniforms=whose, accepted_drafts=accepted),
        mock.patch.multiple(torch, rand=surprise, multinomial=surprise),
    ):
        yield


class Seen:
    """What the steps of all paths did.

    Attributes:
        lengths: verified drafts of a block -> blocks.
        together: verified drafts of all that drafted in a step, in ascending order -> steps.
        widths: slots drafted -> steps.
        rests: why a request did not draft -> steps.
    """

    def __init__(self):
        self.lengths, self.together, self.widths, self.rests = Counter(), Counter(), Counter(), Counter()
        self.accepted = self.verified = self.steps = 0

    def step(self, before, after, requests) -> None:
        blocks = after.statistics.lengths - before.statistics.lengths
        self.steps += 1
        self.lengths += blocks
        self.together[tuple(sorted(blocks.elements()))] += 1
        self.widths[after.planner._width] += 1
        self.verified += after.statistics.verified - before.statistics.verified
        self.accepted += after.statistics.accepted - before.statistics.accepted
        earlier = {r.id: r.statistics.rests for r in (*before.active, *before.waiting)}
        for request in requests:
            self.rests += request.statistics.rests - earlier[request.id]


def copied(engine):
    """An engine in the same state on the same models."""
    planner = engine.planner
    shared = [
        *(engine.target, engine.drafter, engine.packed.layers, engine.packed.text_config, engine._changed),
        *(engine._stepping, planner.batch_drafter.link, planner.costs, engine.packed.target),
    ]
    for request in (*engine.active, *engine.waiting):
        shared += [request.processors, request.warpers, request.criteria]
    return copy.deepcopy(engine, {id(thing): thing for thing in shared})


def state_of(scheduler) -> tuple:
    """What a schedule knows of the past."""
    if scheduler.kind == "asynchronous":
        return tuple((tuple(a.tolist()), tuple(slots.tolist())) for a, slots in scheduler._past)
    return tuple(scheduler._sums.tolist()), tuple(scheduler._counts.tolist())


def state_of_engine(engine, steady: bool) -> tuple:
    """Equal for engines that can only go on alike: open texts, and what decides on drafts."""
    planner = engine.planner
    state = tuple((r.id, tuple(r.ids)) for r in engine.active), state_of(planner.scheduler)
    if planner.batch_drafter.drafter.confidence_head is None:
        state += (repr(vars(planner.rates)),)
    if not steady:
        state += (planner._width, planner._age, *((repr(vars(r.rest)), repr(r.expected)) for r in engine.active))
    return state


def joint_law(engine, requests, seen: Seen | None = None, merge: bool = True, steady: bool = True) -> dict:
    """The joint law of the texts of requests that an engine was just given.

    Args:
        merge: `False` walks every path to its end by itself.
        steady: no request rests and the width is chosen once, so that what those depend on is no part of a state.
    """
    seen = Seen() if seen is None else seen
    order = [request.id for request in requests]
    law = defaultdict(float)
    # State -> an engine in it, and the weights of the texts that ended on the way to it.
    states = {(): (engine, {(None,) * len(order): 1.0})}
    while states:
        following: dict = {}
        for here, ended in states.values():

            def run(choose):
                out, laws = copied(here), {}
                going = [*out.active, *out.waiting]
                with asked(choose, lambda request, law: laws.update({request.id: law})):
                    out.step()
                return out, going, laws

            for weight, (out, going, laws) in walk(run):
                seen.step(here, out, going)
                finished = {r.id: endings(r, laws.get(r.id)) for r in going if r.finished is not None}
                assert all(r.error is None for r in going)
                key = state_of_engine(out, steady) if merge else len(following)
                weights = following.setdefault(key, (out, defaultdict(float)))[1]
                for texts, before in ended.items():
                    choices = [finished.get(i, [(text, 1.0)]) for i, text in zip(order, texts)]
                    for ending in itertools.product(*choices):
                        share = before * weight * math.prod(chance for _, chance in ending)
                        weights[tuple(text for text, _ in ending)] += share
        states = {}
        for key, (out, weights) in following.items():
            if out.busy:
                states[key] = out, weights
                continue
            for texts, weight in weights.items():
                law[texts] += weight
    if steady:
        assert "drafting did not pay" not in seen.rests
    return dict(law)


def endings(request, last: list[float] | None) -> list[tuple[tuple, float]]:
    """The texts a finished request may have, with the law of its last token where that is open."""
    text = tuple(request.new_ids)
    if len(request.ids) < request.max_length:
        return [(text, 1.0)]
    return [((*text[:-1], token), chance) for token, chance in enumerate(last) if chance > 0]


def endings_of(text: list[int], last: list[float] | None, new_tokens: int, eos: int | None):
    """The same for a row of what `generate` returned, padding included."""
    end = next((i + 1 for i, token in enumerate(text[: new_tokens - 1]) if token == eos), None)
    if end is not None:
        return [(tuple(text[:end]), 1.0)]
    assert len(text) == new_tokens
    return [((*text[:-1], token), chance) for token, chance in enumerate(last) if chance > 0]


def product(*laws: dict) -> dict[tuple, float]:
    """The joint law of independent texts."""
    out = {}
    for items in itertools.product(*(law.items() for law in laws)):
        out[tuple(text for text, _ in items)] = math.prod(share for _, share in items)
    return out


def marginal(law: dict, which: int) -> dict[tuple, float]:
    out = defaultdict(float)
    for texts, weight in law.items():
        out[texts[which]] += weight
    return dict(out)


def plain_law(
    target, prompt, new_tokens: int, temperature=1.0, top_k=0, eos=(), first: int | None = None
) -> dict[tuple, float]:
    """A target's law of `new_tokens` ids behind a prompt: softmaxes multiplied, from one forward over all texts."""
    if first is not None:
        law = plain_law(target, [*prompt, first], new_tokens - 1, temperature, top_k, eos)
        return {(first, *text): weight for text, weight in law.items()}
    texts = list(itertools.product(range(target.config.vocab_size), repeat=new_tokens))
    ids = torch.tensor([[*prompt, *text] for text in texts])
    with torch.no_grad():
        logits = target(ids).logits[:, len(prompt) - 1 : -1].double() / temperature
    if top_k:
        least = logits.sort(dim=-1, descending=True).values[..., top_k - 1 : top_k]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = logits.softmax(-1).gather(2, torch.tensor(texts)[..., None]).prod(dim=1)[:, 0].tolist()
    law = defaultdict(float)
    for text, chance in zip(texts, chances):
        end = next((i + 1 for i, token in enumerate(text) if token in eos), new_tokens)
        law[text[:end]] += chance
    return {text: weight for text, weight in law.items() if weight > 0}


def simulated_joint_law(
    worlds, new_tokens, scheduler, eos=(), room: int = 99, other_tokens: int = 0, seen: Counter | None = None
) -> dict[tuple, float]:
    """The joint law of one request a world, all of them decoded together by a schedule.

    Args:
        new_tokens: by request.
        scheduler: makes a fresh one.
        eos: ids that end a text; a draft is cut behind one, never before it.
        room, other_tokens: of every step, see [`GlobalScheduler`].
        seen: a counter of the lengths chosen in a step, together.
    """
    seen = Counter() if seen is None else seen
    width = worlds[0].block_size
    first = scheduler()
    schedulers, answers = {state_of(first): first}, {}
    law, states = defaultdict(float), {(((0,),) * len(worlds), state_of(first)): 1.0}

    def ended(text, most):
        return len(text) > most or (len(text) > 1 and text[-1] in eos)

    def blocks(world, text, most):
        """Every block a request may draft: weight, drafts, laws, confidences, its limit, and where it ends."""
        out = [(1.0, (), (), ())]
        for _ in range(width):
            out = [
                (
                    weight * share,
                    (*drafts, token),
                    (*laws, world.draft(text, drafts)),
                    (*seen_c, world.confidence(text, drafts)),
                )
                for weight, drafts, laws, seen_c in out
                for token, share in enumerate(world.draft(text, drafts))
                if share > 0
            ]
        limit = min(width, most - len(text))
        ends = [next((j + 1 for j, token in enumerate(drafts) if token in eos), width) for _, drafts, _, _ in out]
        return [(*block, limit, end) for block, end in zip(out, ends)]

    def outcomes(world, text, drafts, laws, most):
        """Texts behind a verified block."""
        p = [world.target(text + drafts[:k]) for k in range(len(drafts) + 1)]
        shares = acceptance([p[k][x] / laws[k][x] for k, x in enumerate(drafts)])
        out = defaultdict(float)
        for accepted, share in enumerate(shares):
            rest = p[accepted]
            if accepted < len(drafts):
                rest = [max(0.0, a - b) for a, b in zip(rest, laws[accepted])]
            for token, weight in enumerate(rest):
                if share * weight > 0:
                    longer = text
                    for new in (*drafts[:accepted], token):
                        longer += (new,)
                        if ended(longer, most):
                            break
                    out[longer] += share * weight / sum(rest)
        return out

    def answer(state, confidences, limits, ends, load):
        key = state, confidences, limits, ends, repr(load)
        if key not in answers:
            plan = copy.deepcopy(schedulers[state], {id(first.costs): first.costs})
            c = torch.tensor(confidences, dtype=torch.float64)
            lengths = plan.lengths(c, torch.tensor(limits), load, room, torch.tensor(ends)).tolist()
            assert all(0 <= n <= min(most) for n, *most in zip(lengths, limits, ends)) and sum(lengths) <= room
            schedulers.setdefault(state_of(plan), plan)
            answers[key] = tuple(lengths), state_of(plan)
        return answers[key]

    while states:
        following = defaultdict(float)
        for (texts, state), weight in states.items():
            going = [r for r, text in enumerate(texts) if not ended(text, new_tokens[r])]
            if not going:
                law[tuple(text[1:] for text in texts)] += weight
                continue
            drafting = [r for r in going if new_tokens[r] > len(texts[r])]
            keys = max(len(texts[r]) for r in going)
            load = Load(len(going) + other_tokens, len(going), keys, width * len(drafting))
            for drawn in itertools.product(*(blocks(worlds[r], texts[r], new_tokens[r]) for r in drafting)):
                lengths, after = (), state
                if drawn:
                    *_, confidences, limits, ends = zip(*drawn)
                    lengths, after = answer(state, confidences, limits, ends, load)
                    seen[lengths] += 1
                share = weight * math.prod(block[0] for block in drawn)
                ways = []
                for r in range(len(worlds)):
                    drafts, laws = (), ()
                    if r in drafting:
                        at = drafting.index(r)
                        drafts, laws = drawn[at][1][: lengths[at]], drawn[at][2]
                    ways.append(
                        outcomes(worlds[r], texts[r], drafts, laws, new_tokens[r]) if r in going else {texts[r]: 1.0}
                    )
                for ending in itertools.product(*(way.items() for way in ways)):
                    chance = math.prod(one for _, one in ending)
                    following[tuple(text for text, _ in ending), after] += share * chance
        states = following
    return dict(law)
