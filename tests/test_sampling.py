"""Sampling with a drafter: what drafts are drawn from, and that settings and seeds mean what they mean without one.

That the output law is the target's is for the tests of the law to show.
"""

import copy

import pytest
import torch
from conftest import VOCAB, config, following, lively_target, make_drafter, plain
from transformers.generation import LogitsProcessor

from dspark.candidate_generator import DSparkCandidateGenerator


@pytest.fixture(scope="module")
def target():
    return lively_target()


def assisted(target, prompt, drafter, **kwargs):
    """With `max_new_tokens=24` and the fixed schedule unless told otherwise."""
    settings = {"max_new_tokens": 24, "dspark_schedule": "fixed", **kwargs}
    return target.generate(prompt, assistant_model=drafter, generation_config=config(**settings))


@pytest.fixture(params=[False, True], ids=["slots", "blocks"])
def whole_block(request, monkeypatch) -> bool:
    """Both ways of drafting: slot by slot as on a CPU, whole blocks as on an accelerator."""
    switch = property(lambda self: request.param, lambda self, value: None)
    monkeypatch.setattr(DSparkCandidateGenerator, "whole_block", switch, raising=False)
    return request.param


@pytest.mark.parametrize("temperature", [1e-6, 1e-4])
@pytest.mark.parametrize("kind", ["oracle", "alternating", "random"])
def test_tiny_temperatures_are_greedy(target, prompt, whole_block, temperature, kind):
    text = plain(target, prompt, max_new_tokens=64)[0].tolist()
    drafter = make_drafter(target) if kind == "random" else following(target, text, kind)
    torch.manual_seed(0)
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0}
    sampled = target.generate(
        prompt,
        assistant_model=drafter,
        generation_config=config(
            max_new_tokens=24, dspark_schedule="fixed", dspark_log=True, output_scores=True,
            return_dict_in_generate=True, **settings,
        ),
    )  # fmt: skip
    assert sampled.sequences[0].tolist() == text[:33]
    assert not any(scores.isnan().any() for scores in sampled.scores)
    assert drafter.statistics.drafted > 0
    greedy_drafts = drafter.statistics.log
    assisted(target, prompt, drafter, dspark_log=True)
    assert [r[:2] for r in greedy_drafts] == [r[:2] for r in drafter.statistics.log]
    if kind == "oracle":
        assert drafter.statistics.accepted == drafter.statistics.verified


@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize("reduced", [None, 40])
def test_sampling_without_any_warper(target, prompt, whole_block, block, reduced):
    drafter = make_drafter(target, block_size=block, draft_vocab_size=reduced)
    torch.manual_seed(0)
    out = assisted(target, prompt, drafter, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=30)
    assert out.shape == (1, 39) and drafter.statistics.drafted > 0 and max(drafter.statistics.lengths) == block


WARPERS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.05, "top_k": 0},
    "eta": {"eta_cutoff": 0.05, "top_k": 0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("reduced", [None, 40])
@pytest.mark.parametrize("name", WARPERS)
def test_drafts_obey_the_warpers(target, prompt, monkeypatch, whole_block, name, reduced):
    """The verifier is handed the law that the warpers make of the draft logits, in the target's ids, row by row."""
    handed = []
    original = DSparkCandidateGenerator.get_candidates

    def spy(self, ids, *args, **kwargs):
        candidates, log_q = original(self, ids, *args, **kwargs)
        handed.append((candidates[0, ids.shape[1] :], log_q))
        return candidates, log_q

    logits, draw = [], DSparkCandidateGenerator._draw
    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", spy)
    monkeypatch.setattr(DSparkCandidateGenerator, "_draw", lambda self, row: (logits.append(row), draw(self, row))[1])
    settings = config(max_new_tokens=30, do_sample=True, dspark_schedule="fixed", **WARPERS[name])
    torch.manual_seed(0)
    drafter, kept = make_drafter(target, draft_vocab_size=reduced), torch.arange(VOCAB)
    if reduced:
        kept = torch.arange(VOCAB - reduced, VOCAB)
        drafter.d2t.copy_(kept - torch.arange(reduced))
    target.generate(prompt, assistant_model=drafter, generation_config=settings)

    complete = copy.deepcopy(settings)
    complete.update(**target.generation_config._get_default_generation_params(), defaults_only=True)
    warpers = target._get_logits_processor(
        complete, input_ids_seq_length=9, encoder_input_ids=prompt, prefix_allowed_tokens_fn=None,
        logits_processor=[], device="cpu",
    )  # fmt: skip
    rows = [(draft, row) for drafts, log_q in handed if len(drafts) for draft, row in zip(drafts, log_q[0])]
    assert len(rows) == len(logits) > 20
    for (draft, row), raw in zip(rows, logits):
        expected = torch.full((VOCAB,), float("-inf"))
        expected[kept] = torch.log_softmax(warpers(prompt, raw.clone()), dim=-1)[0]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(row.exp().sum(), torch.tensor(1.0))
        assert row[draft] > float("-inf")
    assert name == "temperature" or any((row[kept] == float("-inf")).any() for _, row in rows)


def test_custom_processors_act_on_the_target_only(target, prompt):
    """A ban by a processor of the user's own: never in the text, whatever is drafted."""

    class Ban(LogitsProcessor):
        def __call__(self, ids, scores):
            scores = scores.clone()
            scores[:, 5:50] = float("-inf")
            return scores

    drafter = make_drafter(target)
    torch.manual_seed(0)
    settings = config(max_new_tokens=40, do_sample=True, dspark_schedule="fixed", dspark_log=True)
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings, logits_processor=[Ban()])
    assert not ((out[0, 9:] >= 5) & (out[0, 9:] < 50)).any()
    assert any(5 <= token < 50 for _, drafts, _, _ in drafter.statistics.log for token in drafts)


@pytest.mark.parametrize("schedule", ["fixed", "threshold", "throughput"])
def test_a_seed_gives_the_same_text_twice(target, prompt, whole_block, schedule):
    outs = set()
    drafter = make_drafter(target)
    for seed in (0, 1, 0, 1):
        torch.manual_seed(seed)
        values = {"do_sample": True, "temperature": 2.0, "top_k": 0, "dspark_schedule": schedule}
        outs.add(
            (seed, tuple(assisted(target, prompt, drafter, **values)[0].tolist()), str(drafter.statistics.lengths))
        )
    assert len(outs) == 2 and len({text for _, text, _ in outs}) == 2
    assert drafter.statistics.drafted > 0


def test_a_drafter_that_is_the_target_is_always_believed(target, prompt):
    """Its own law put in the drafter's mouth, q = p: every sampled draft is accepted."""
    drafter, quiet = make_drafter(target, markov_rank=0), copy.deepcopy(target)
    generator_type = DSparkCandidateGenerator
    original, drawn, prefix = generator_type._draft, generator_type._draw, {}

    def draft(self, ids, limit):
        prefix["ids"] = ids
        return original(self, ids, limit)

    def draw(self, logits):
        token, law = drawn(self, quiet(prefix["ids"]).logits[:, -1])
        prefix["ids"] = torch.cat([prefix["ids"], token[:, None]], dim=1)
        return token, law

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_type, "_draft", draft)
        patch.setattr(generator_type, "_draw", draw)
        torch.manual_seed(0)
        assisted(target, prompt, drafter, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=50)
    assert drafter.statistics.verified == drafter.statistics.accepted > 30


def test_the_default_config_of_a_model_decides_sampling(prompt):
    """`do_sample` and its settings from the target's generation config, nothing passed."""
    target = lively_target()
    target.generation_config.update(do_sample=True, temperature=0.9, top_p=0.95, max_new_tokens=20)
    drafter = make_drafter(target)
    torch.manual_seed(0)
    out = target.generate(prompt, assistant_model=drafter)
    assert out.shape == (1, 29) and drafter.statistics.drafted > 0
    assert drafter.statistics.schedule == "throughput"
