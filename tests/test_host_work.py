"""What a round costs outside target and drafter forwards, with a vocabulary of 49,152 and a block of 7."""

import time

import pytest
import torch
from conftest import config, make_drafter, make_target


SHARE = 16  # a round's work against a plain token's in the host's own loop; 5 (sampled) to 10 (greedy) was seen


def milliseconds_a_round(target, drafter, prompt, **settings) -> float:
    """Wall time of a call minus target forwards and minus the drafter's forwards (backbone, LM head, both heads)."""
    link, inside = drafter.link(target), 0.0

    def timed(function):
        def wrapper(*args, **kwargs):
            nonlocal inside
            started = time.perf_counter()
            out = function(*args, **kwargs)
            inside += time.perf_counter() - started
            return out

        return wrapper

    parts = [(drafter, "forward"), (link, "base_logits")]
    parts += [(drafter.markov_head, "forward"), (drafter.markov_head, "embed"), (drafter.confidence_head, "forward")]
    for owner, name in parts:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        target.generate(prompt, assistant_model=drafter, generation_config=config(dspark_schedule="fixed", **settings))
    finally:
        for owner, name in parts:
            delattr(owner, name)
    statistics = drafter.statistics
    assert statistics.rounds > 5
    assert statistics.drafted > 30
    return 1000 * (statistics.total_seconds - statistics.verify_seconds - inside) / statistics.rounds


def milliseconds_a_plain_token(target, prompt, **settings) -> float:
    """Wall time of a plain call minus the target's forwards, by token: what the same machine's host loop takes."""
    inside, forward = 0.0, target.forward

    def timed(*args, **kwargs):
        nonlocal inside
        started = time.perf_counter()
        out = forward(*args, **kwargs)
        inside += time.perf_counter() - started
        return out

    target.forward = timed
    try:
        started = time.perf_counter()
        target.generate(prompt, generation_config=config(**settings))
        seconds = time.perf_counter() - started
    finally:
        del target.forward
    return 1000 * (seconds - inside) / settings["max_new_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("settings, limit", [({}, 2.5), ({"do_sample": True, "top_k": 0}, 4.0)])
def test_host_work(settings, limit):
    """Under a few milliseconds, on a slow machine under a few times what the host's own loop takes for a token."""
    target = make_target(vocab_size=49152, num_hidden_layers=2)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0], markov_rank=64)
    prompt = torch.randint(3, 49000, (1, 40), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain, calls = [], []
    for _ in range(6):
        calls.append(milliseconds_a_round(target, drafter, prompt, max_new_tokens=48, **settings))
        plain.append(milliseconds_a_plain_token(target, prompt, max_new_tokens=48, **settings))
    print(f"host work {settings}: " + ", ".join(f"{ms:.2f}" for ms in calls) + " ms a round")
    print("plain decoding: " + ", ".join(f"{ms:.2f}" for ms in plain) + " ms a token")
    assert min(calls) < max(limit, SHARE * min(plain))
