"""Calls that are refused, settings that must not outlive a call, threads, pipelines and wrappers."""

import copy
import json
import threading

import pytest
import torch
from conftest import VOCAB, config, following, lively_target, make_drafter, make_target, plain, with_lora
from peft import LoraConfig, get_peft_model
from same import characters
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, pipeline

from dspark.candidate_generator.cost_table_dspark import cache_argument


@pytest.fixture(scope="module")
def target():
    return lively_target()


def prompt_of(seed: int, length: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def assisted(target, prompt, drafter, **kwargs):
    """With `max_new_tokens=24` and the fixed schedule unless told otherwise."""
    settings = {"max_new_tokens": 24, "dspark_schedule": "fixed", **kwargs}
    return target.generate(prompt, assistant_model=drafter, generation_config=config(**settings))


def counts(drafter) -> dict:
    """The statistics of the last call without its times."""
    return {k: v for k, v in drafter.statistics.as_dict().items() if not k.endswith("seconds")}


# ---- refusals: before any token, naming the argument


@pytest.fixture
def forwards(target) -> list:
    """Filled when the target runs."""
    ran = []
    handle = target.register_forward_pre_hook(lambda *_: ran.append(True))
    yield ran
    handle.remove()


def test_beams_in_a_batch_and_greedy_copies_keep_the_hosts_behaviour(target, prompt, forwards):
    with pytest.raises(ValueError, match="[Gg]reedy.*num_return_sequences"):
        assisted(target, prompt, make_drafter(target), num_return_sequences=3)
    assert not forwards
    drafter, batch = make_drafter(target), torch.cat([prompt, prompt_of(4)])
    out = assisted(target, batch, drafter, num_beams=2, max_new_tokens=8)
    assert torch.equal(out, plain(target, batch, num_beams=2, max_new_tokens=8)) and drafter.statistics is None


def test_classifier_free_guidance_is_refused(target, prompt, forwards):
    with pytest.raises(ValueError, match="`guidance_scale`"):
        assisted(target, prompt, make_drafter(target), guidance_scale=1.5)
    assert not forwards


def test_use_cache_false_is_refused(target, prompt, forwards):
    with pytest.raises(ValueError, match="use_cache"):
        assisted(target, prompt, make_drafter(target), use_cache=False)
    assert not forwards


def test_a_filled_cache_is_refused_and_an_empty_one_taken(target, prompt):
    """Turn two of a chat with the cache of turn one: the drafter has no features for what that holds."""
    first = plain(target, prompt, max_new_tokens=5, return_dict_in_generate=True)
    filled = first.get("cache") or first.past_key_values
    drafter, name = make_drafter(target), cache_argument(target)
    settings = {"assistant_model": drafter, "generation_config": config(max_new_tokens=8, dspark_schedule="fixed")}
    with pytest.raises(ValueError, match="already holds 13 tokens"):
        target.generate(first.sequences, **{name: filled}, **settings)
    assert filled.get_seq_length() == 13
    out = target.generate(first.sequences, **{name: DynamicCache(config=target.config)}, **settings)
    assert torch.equal(out, plain(target, first.sequences, max_new_tokens=8)) and drafter.statistics.drafted > 0


def test_an_encoder_decoder_is_refused(target, prompt):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCAB}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    seq2seq = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("bart", **sizes, **ends, forced_eos_token_id=None)
    )
    with pytest.raises(ValueError):
        assisted(seq2seq, prompt, make_drafter(target))


def test_recurrent_targets_are_refused(prompt):
    """A recurrent state cannot follow a rejected draft; another text would be the silent alternative."""
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
    target = make_target("qwen3_5_text", head_dim=8, **linear)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        assisted(target, prompt, make_drafter(target))


BAD_SETTINGS = {
    "dspark_schedule": ("always", "`dspark_schedule` is 'always'.*throughput.*fixed.*threshold"),
    "dspark_threshold": (1.5, "`dspark_threshold` is 1.5"),
    "assistant_confidence_threshold": (-0.5, "threshold` is -0.5"),
    "num_assistant_tokens": (-1, "`num_assistant_tokens` is -1"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_are_refused(target, prompt, forwards, name):
    value, message = BAD_SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        assisted(target, prompt, make_drafter(target), **{name: value})
    assert not forwards


def test_a_drafter_of_another_target_is_refused(target, prompt, forwards):
    other = make_target("llama", hidden_size=64)
    with pytest.raises(ValueError, match="`hidden_size` is 64, the target has 32"):
        assisted(target, prompt, make_drafter(other))
    assert not forwards


def test_beams_keep_the_hosts_behaviour(target, prompt, caplog):
    """The host warns that beams take no assistant, and decodes without it."""
    drafter = make_drafter(target)
    out = assisted(target, prompt, drafter, num_beams=3, max_new_tokens=10)
    assert torch.equal(out, plain(target, prompt, num_beams=3, max_new_tokens=10))
    assert drafter.statistics is None
    assert any("only supported with Greedy Search and Sample" in record.message for record in caplog.records)


# ---- nothing of a call outlives it


def test_a_b_a_is_a_b_a(target):
    """Prompts in a row give what each gives alone with a fresh drafter, statistics included."""
    a, b = prompt_of(1, 12), prompt_of(2, 5)
    for schedule in ("fixed", "threshold", "throughput"):
        drafter = make_drafter(target)
        in_a_row = []
        for prompt in (a, b, a):
            ids = assisted(target, prompt, drafter, dspark_schedule=schedule, max_new_tokens=40)
            in_a_row.append((ids.tolist(), counts(drafter)))
        alone = []
        for prompt in (a, b):
            fresh = make_drafter(target)
            ids = assisted(target, prompt, fresh, dspark_schedule=schedule, max_new_tokens=40)
            alone.append((ids.tolist(), counts(fresh)))
        assert in_a_row == [alone[0], alone[1], alone[0]]
        assert in_a_row[0][1]["drafted"] > 0


def test_configs_are_left_as_they_were(target, prompt):
    drafter = make_drafter(target)
    mine = config(max_new_tokens=16, num_assistant_tokens=3, dspark_schedule="fixed", temperature=0.8, do_sample=True)

    def state():
        objects = (drafter.config, target.config, target.generation_config, mine)
        return [o.to_json_string(use_diff=False) if o is not mine else o.to_dict() for o in objects]

    before = copy.deepcopy(state())
    weights = {name: value.clone() for name, value in drafter.state_dict().items()}
    target.generate(prompt, assistant_model=drafter, generation_config=mine)
    with pytest.raises(ValueError):
        assisted(target, prompt, drafter, dspark_schedule="never")
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())
    assert getattr(drafter, "generation_config", None) is None


def test_num_assistant_tokens_is_not_remembered(target, prompt):
    drafter = following(target, plain(target, prompt, max_new_tokens=64)[0].tolist())
    lengths = []
    for values in ({}, {"num_assistant_tokens": 3}, {}, {"num_assistant_tokens": 20}):
        assisted(target, prompt, drafter, **values)
        lengths.append(max(drafter.statistics.lengths))
    assert lengths == [7, 3, 7, 7]  # 20 is what the host fills in on every call: it counts as unset


def test_thresholds_of_a_call(target, prompt):
    """The confidence is compared, never the token's own probability; the host's 0.4 counts as unset."""
    drafter = following(target, plain(target, prompt, max_new_tokens=64)[0].tolist())
    drafter.confidence = lambda slot: (0.95, 0.9, 0.8, 0.6, 0.55, 0.3, 0.9)[slot]
    cases = [
        ({"dspark_threshold": 0.7}, "threshold", 3),
        ({"assistant_confidence_threshold": 0.58}, "threshold", 4),
        ({"dspark_threshold": 0.85, "assistant_confidence_threshold": 0.1}, "threshold", 2),
        ({"dspark_schedule": "threshold"}, "threshold", 5),  # the config's 0.5
        ({"dspark_schedule": "fixed", "dspark_threshold": 0.7}, "fixed", 7),
        ({"dspark_threshold": 0.0}, "threshold", 7),
        ({"assistant_confidence_threshold": 0.4}, "throughput", 7),
        ({}, "throughput", 7),
    ]
    for values, schedule, longest in cases:
        settings = config(max_new_tokens=24, **values)
        target.generate(prompt, assistant_model=drafter, generation_config=settings)
        statistics = drafter.statistics
        assert (statistics.schedule, max(statistics.lengths)) == (schedule, longest), values
    assisted(target, prompt, drafter, dspark_schedule="threshold", dspark_threshold=0.99)
    assert drafter.statistics.lengths == {0: 22} and drafter.statistics.verified == 0


def test_the_drafters_own_schedule_counts_unless_a_call_says_otherwise(target, prompt):
    drafter = make_drafter(target, schedule="threshold", schedule_threshold=0.0)
    target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=12))
    assert drafter.statistics.schedule == "threshold" and max(drafter.statistics.lengths) == 7
    assisted(target, prompt, drafter)
    assert drafter.statistics.schedule == "fixed"


# ---- threads


def test_two_threads_share_a_target(target):
    """Two drafters, or one: each thread gets its own text and its own statistics."""
    prompts = [prompt_of(1, 12), prompt_of(2, 5)]
    expected = [plain(target, prompt, max_new_tokens=40) for prompt in prompts]
    shared = make_drafter(target)
    for drafters in ([make_drafter(target, seed=1), make_drafter(target, seed=2)], [shared, shared]):
        alone = []
        for prompt, drafter in zip(prompts, drafters):
            assisted(target, prompt, drafter, max_new_tokens=40)
            alone.append(counts(drafter))
        barrier, results = threading.Barrier(2), [None, None]

        def work(i, drafters=drafters, barrier=barrier, results=results):
            for _ in range(3):
                barrier.wait(timeout=60)
                out = assisted(target, prompts[i], drafters[i], max_new_tokens=40)
                results[i] = (out, counts(drafters[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(2):
            assert torch.equal(results[i][0], expected[i])
            assert results[i][1] == alone[i]


def test_statistics_are_the_threads_own(target, prompt):
    drafter, seen = make_drafter(target), []
    assisted(target, prompt, drafter, max_new_tokens=10)
    other = threading.Thread(target=lambda: seen.append(drafter.statistics))
    other.start()
    other.join()
    assert seen == [None] and drafter.statistics.generated == 10
    assert "acceptance length" in str(drafter.statistics)


def test_the_figures_of_a_full_house(target, prompt):
    """An oracle and ten full blocks: with the bonus token 8 tokens a round, without it 7."""
    drafter = following(target, plain(target, prompt, max_new_tokens=81)[0].tolist())
    assisted(target, prompt, drafter, max_new_tokens=81)
    statistics = drafter.statistics
    assert (statistics.rounds, statistics.plain_rounds, statistics.generated) == (10, 0, 81)
    assert (statistics.drafted, statistics.verified, statistics.accepted) == (70, 70, 70)
    assert (statistics.acceptance_length, statistics.mean_accepted, statistics.acceptance_rate) == (8.0, 7.0, 1.0)
    assert statistics.conditional_acceptance == [1.0] * 7 and statistics.lengths == {7: 10}
    assert json.loads(json.dumps(statistics.as_dict()))["acceptance_length"] == 8.0
    spent = statistics.draft_seconds + statistics.verify_seconds + statistics.host_seconds
    assert spent == pytest.approx(statistics.total_seconds) and min(statistics.draft_seconds, spent) > 0


def test_the_first_slot_counts(target, prompt):
    """Acceptance by slot is conditional on the slots before: right, right, wrong counts twice and misses once."""
    drafter = following(target, plain(target, prompt, max_new_tokens=64)[0].tolist())
    right = drafter.script
    drafter.script = lambda position: right(position) if position % 3 else (right(position) + 1) % VOCAB
    assisted(target, prompt, drafter, max_new_tokens=31)  # rounds at positions 9, 12, .., 36
    statistics = drafter.statistics
    assert statistics.conditional_acceptance[:3] == [1.0, 1.0, 0.0]
    assert statistics.conditional_acceptance[3:] == [None] * 4
    assert statistics.acceptance_length == 3.0


# ---- ways to call


def test_pipeline(target, prompt):
    tokenizer = characters()
    text = tokenizer.decode(prompt[0])
    drafter = make_drafter(target)
    kwargs = {"max_new_tokens": 16, "do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **kwargs)
    assert expected[0]["generated_text"] == tokenizer.decode(plain(target, prompt, max_new_tokens=16)[0, 9:])
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert pipe(text, **kwargs) == expected
    assert drafter.statistics.drafted > 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_drafter_wrapped_by_peft(target, prompt):
    drafter = make_drafter(target)
    assisted(target, prompt, drafter, dspark_log=True)
    bare = [drafts for _, drafts, _, _ in drafter.statistics.log]
    wrapped = get_peft_model(drafter, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.mul_(5.0)
    wrapped.eval()
    out = assisted(target, prompt, wrapped, dspark_log=True)
    assert torch.equal(out, plain(target, prompt, max_new_tokens=24))
    assert wrapped.statistics.drafted > 0
    assert [drafts for _, drafts, _, _ in wrapped.statistics.log] != bare  # the adapter drafts


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_drafter_and_target_both_wrapped(prompt):
    target = lively_target()
    drafter = make_drafter(target)
    target = with_lora(target, ["q_proj"])
    wrapped = get_peft_model(drafter, LoraConfig(r=2, target_modules=["q_proj"])).eval()
    out = target.generate(
        input_ids=prompt, assistant_model=wrapped, generation_config=config(max_new_tokens=16, dspark_schedule="fixed")
    )
    assert torch.equal(out, target.generate(input_ids=prompt, generation_config=config(max_new_tokens=16)))
    assert wrapped.statistics.drafted > 0


def test_decode_for_is_generate(target, prompt):
    drafter = make_drafter(target)
    out = drafter.decode_for(target, input_ids=prompt, generation_config=config(max_new_tokens=16))
    assert torch.equal(out, plain(target, prompt, max_new_tokens=16)) and drafter.statistics.drafted > 0


def test_copies_decode_too(target, prompt):
    drafter = make_drafter(target)
    assisted(target, prompt, drafter)
    before = counts(drafter)
    twin = copy.deepcopy(drafter)
    assert twin.statistics is None
    assisted(target, prompt, twin)
    assert counts(twin) == before
