"""Damaged checkpoints, unusual targets and company: a clear error or the same text, never a wrong law."""

import sys
import threading

import pytest
import torch
from conftest import FLAT_COSTS, VOCAB, config, make_drafter, make_target, plain, scripted
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LogitsProcessor

from dspark.candidate_generator import CostTable
from dspark.candidate_generator.cost_table_dspark import cache_argument
from dspark.modeling_dspark import DSparkConfig, DSparkModel


def assisted(target, prompt, drafter, **kwargs):
    return target.generate(
        prompt, assistant_model=drafter, generation_config=config(dspark_schedule="fixed", max_new_tokens=30), **kwargs
    )


@pytest.mark.parametrize("ids", [[5, 5, 9], [5, 9, VOCAB], [-1, 5, 9]])
def test_a_reduced_vocabulary_must_name_distinct_ids(ids, prompt):
    """Mass on an id that stands twice would be lost, and the sampled law with it."""
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=3)
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(3))
    with pytest.raises(ValueError, match="d2t"):
        assisted(target, prompt, drafter)


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "markov_head.markov_w2.weight"])
def test_a_checkpoint_without_a_tensor_is_refused(name, tmp_path):
    drafter = make_drafter(make_target(), draft_vocab_size=8)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        DSparkModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_costs_must_be_finite(bad):
    with pytest.raises(ValueError, match="finite"):
        CostTable.from_costs({1: 1.0, 8: bad})


def test_an_implausible_table_is_not_kept(prompt, monkeypatch):
    """Eight tokens for a third of the cost of one: something else ran while it was measured."""
    from dspark.candidate_generator import cost_table_dspark

    disturbed = CostTable({32: {1: 0.9, 2: 1.9, 8: 0.3}}, {32: 0.2})
    monkeypatch.setattr(cost_table_dspark, "profile", lambda *_: disturbed)
    target = make_target()
    drafter = make_drafter(target, cost_table=None)
    assert cost_table_dspark.cost_table_for(drafter, target) is disturbed
    assert not list(cost_table_dspark.cache_folder().glob("*.json"))
    monkeypatch.setattr(cost_table_dspark, "profile", lambda *_: FLAT_COSTS)
    assert cost_table_dspark.cost_table_for(make_drafter(target, cost_table=None), target) is FLAT_COSTS
    assert list(cost_table_dspark.cache_folder().glob("*.json"))


def test_a_misspelt_setting_is_named(prompt):
    target = make_target()
    with pytest.raises(ValueError, match="dspark_treshold"):
        target.generate(
            prompt,
            assistant_model=make_drafter(target),
            generation_config=config(max_new_tokens=5, dspark_treshold=0.3),
        )


def test_a_cost_table_must_be_one(prompt):
    target = make_target()
    with pytest.raises(TypeError, match="cost_table"):
        target.generate(prompt, assistant_model=make_drafter(target, cost_table="table.json"), max_new_tokens=5)


def test_an_embedding_of_another_width_is_refused(prompt):
    values = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCAB}
    target = make_target("opt", word_embed_proj_dim=16, num_key_value_heads=None, intermediate_size=None, **values)
    with pytest.raises(ValueError, match="embedding is 16 wide"):
        assisted(target, prompt, make_drafter(target))


def test_targets_without_attention_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads"):
        DSparkConfig.from_target(AutoConfig.for_model("mamba"))


@pytest.mark.parametrize("values", [{"block_size": True}, {"head_dim": 7}, {"layer_types": ["chunked"] * 2}])
def test_configs_no_drafter_can_have(values):
    with pytest.raises(Exception, match=next(iter(values))):
        make_drafter(make_target(), **values)


class Nested(LogitsProcessor):
    """Runs the target in the middle of the call's own round, as a reranking processor does."""

    def __init__(self, target):
        self.target, self.runs = target, 0

    def __call__(self, input_ids, scores):
        self.runs += 1
        self.target(input_ids[:, -4:])
        return scores


def test_a_processor_that_runs_the_target_changes_no_draft(prompt):
    target = make_target()
    drafter = scripted(target, prompt, "oracle")
    expected = assisted(target, prompt, drafter)
    alone = drafter.statistics
    nested = Nested(target)
    assert torch.equal(assisted(target, prompt, drafter, logits_processor=[nested]), expected)
    assert nested.runs > 0
    assert (drafter.statistics.drafted, drafter.statistics.accepted) == (alone.drafted, alone.accepted)
    assert drafter.statistics.feature_bytes == alone.feature_bytes


def test_threads_share_a_target(prompt):
    """Hooks come and go while other threads are in the middle of a forward."""
    target = make_target()
    expected = plain(target, prompt, max_new_tokens=30)
    drafters = [make_drafter(target, seed=seed, target_layer_ids=[-1, 1]) for seed in range(4)]
    wrong: list = []

    def work(drafter):
        try:
            for _ in range(5):
                if not torch.equal(assisted(target, prompt, drafter), expected) or drafter.statistics.drafted == 0:
                    wrong.append("text")
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(drafter,)) for drafter in drafters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_longrope_across_its_switch_is_exact_or_refused(prompt):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"original_max_position_embeddings": 24, "factor": 4.0}
    sizes = {"original_max_position_embeddings": 24, "max_position_embeddings": 96}
    target = make_target("phi3", seed=3, rope_parameters=rope, **sizes)
    drafter = make_drafter(target)
    settings = config(dspark_schedule="fixed", max_new_tokens=60)
    if cache_argument(target) == "past_key_values":
        with pytest.raises(ValueError, match="longrope"):
            target.generate(prompt, assistant_model=drafter, generation_config=settings)
        settings.max_new_tokens = 12
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings)
    assert torch.equal(out, plain(target, prompt, max_new_tokens=settings.max_new_tokens))
    assert drafter.statistics.drafted > 0


@pytest.mark.parametrize("kind", ["gpt2", "olmo2", "gemma2", "cohere2", "qwen3_moe"])
def test_more_families(kind, prompt):
    values = {"cohere2": {"sliding_window": 8}, "gemma2": {"head_dim": 8, "sliding_window": 8}}.get(kind, {})
    if kind == "gpt2":
        values = {"num_key_value_heads": None, "intermediate_size": None}
    if kind == "qwen3_moe":
        values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    target = make_target(kind, **values)
    for drafts in ("oracle", "alternating"):
        drafter = scripted(target, prompt, drafts)
        assert drafter.cost_table is FLAT_COSTS
        assert torch.equal(assisted(target, prompt, drafter), plain(target, prompt, max_new_tokens=30))
        assert drafter.statistics.drafted > 0
