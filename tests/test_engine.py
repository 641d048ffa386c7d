"""A stream of requests: every one its own text, whatever comes, goes, fails or waits beside it."""

import json
import threading
import time

import pytest
import torch
from conftest import VOCAB, config, make_drafter, plain
from same import characters, seeded, shared

from dspark.candidate_generator import DSparkEngine, EngineCosts, EngineFull
from dspark.evaluation import ablation, load, packed_cost, stress


# A step costs more the more it verifies: the schedule has something to decide.
COSTS = EngineCosts({1: 1.0, 8: 1.2, 64: 3.0}, {1: 0.05, 64: 0.4}, read=1e-4, cell=1e-5)
LENGTHS = (3, 9, 30, 70, 5, 17)


@pytest.fixture(scope="module")
def target():
    return shared()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [torch.randint(3, VOCAB, (n,), generator=seeded(n)).tolist() for n in LENGTHS]


def engine_for(target, **how) -> DSparkEngine:
    return DSparkEngine(target, make_drafter(target), **{"costs": COSTS, **how})


def text_of(target, prompt: list[int], new_tokens: int = 20, **how) -> list[int]:
    return plain(target, torch.tensor([prompt]), max_new_tokens=new_tokens, **how)[0, len(prompt) :].tolist()


def left_clean(engine) -> bool:
    slots = engine.packed.slots.taken + engine.planner.batch_drafter.cache.slots.taken
    return not slots and not engine.active and not engine.waiting


@pytest.mark.parametrize("schedule", ["throughput", "asynchronous", "fixed", "threshold", "none"])
@pytest.mark.parametrize("limits", [{}, {"max_requests": 2}, {"prefill_chunk": 7, "max_step_tokens": 40}])
def test_every_request_has_its_own_text(target, prompts, schedule, limits):
    """More requests than slots, prompts in pieces, requests that join while others decode."""
    engine = engine_for(target, schedule=schedule, **limits)
    requests = [engine.submit(p, max_new_tokens=20, do_sample=False) for p in prompts[:3]]
    for _ in range(5):
        engine.step()
    requests += [engine.submit(p, max_new_tokens=11, do_sample=False) for p in prompts[3:]]
    engine.run()
    for i, (request, prompt) in enumerate(zip(requests, prompts)):
        assert request.new_ids == text_of(target, prompt, 20 if i < 3 else 11)
        assert request.finished == "length"
    assert (engine.statistics.drafted > 0) == (schedule != "none")
    assert engine.statistics.prefilled == sum(LENGTHS) and left_clean(engine)
    if limits:
        assert engine.packed.slots.count <= 16


def test_settings_are_each_requests_own(target, prompts):
    engine = engine_for(target, schedule="fixed")
    eos = text_of(target, prompts[1])[6]
    hows = [
        {"repetition_penalty": 1.7},
        {"eos_token_id": eos},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[text_of(target, prompts[3])[0]]]},
        {"max_new_tokens": 3},
        {"min_new_tokens": 15, "eos_token_id": text_of(target, prompts[5])[2]},
    ]
    hows = [{"max_new_tokens": 20, "do_sample": False, **how} for how in hows]
    requests = [engine.submit(prompt, **how) for prompt, how in zip(prompts, hows)]
    engine.run()
    for request, prompt, how in zip(requests, prompts, hows):
        expected = plain(target, torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        assert request.new_ids == expected
    assert requests[1].finished == "stop" and engine.statistics.drafted > 0


def test_stop_strings_and_streams(target, prompts):
    engine = engine_for(target)
    tokenizer = characters()
    stop = tokenizer.decode(text_of(target, prompts[1])[4:6])
    how = {"max_new_tokens": 20, "do_sample": False}
    request = engine.submit(prompts[1], stop_strings=stop, tokenizer=tokenizer, **how)
    other = engine.submit(prompts[2], **how)
    expected = plain(target, torch.tensor([prompts[1]]), stop_strings=stop, tokenizer=tokenizer, max_new_tokens=20)
    assert list(engine.stream(request)) == expected[0, len(prompts[1]) :].tolist()
    assert list(engine.stream(other)) == text_of(target, prompts[2])


def test_seeds_are_a_requests_own_where_the_schedule_ignores_the_load(target, prompts):
    def text(beside: int, seed: int | None) -> list[int]:
        engine = engine_for(target, schedule="fixed")
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": 15}
        request = engine.submit(prompts[0], seed=seed, **how)
        for prompt in prompts[1 : 1 + beside]:
            engine.submit(prompt, **how)
        engine.run()
        return request.new_ids

    assert text(0, 3) == text(4, 3) != text(0, 4)


def test_cancelling(target, prompts):
    engine = engine_for(target, max_requests=2)
    requests = [engine.submit(p, max_new_tokens=30, do_sample=False) for p in prompts[:4]]
    while len(requests[0].new_ids) < 3:
        engine.step()
    engine.cancel(requests[0])  # it writes
    engine.cancel(requests[3])  # it waits
    assert requests[3].finished == "cancelled" and not requests[3].new_ids
    reader = engine.stream(requests[1])
    next(reader)
    reader.close()  # its reader goes away
    engine.run()
    assert [r.finished for r in requests] == ["cancelled", "cancelled", "length", "cancelled"]
    written = requests[0].new_ids
    assert 3 <= len(written) < 30 and written == text_of(target, prompts[0], 30)[: len(written)]
    assert requests[2].new_ids == text_of(target, prompts[2], 30) and left_clean(engine)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_a_requests_own_error_ends_it_alone(target, prompts, where):
    def broken(input_ids, scores, **kwargs):
        if input_ids.shape[1] > len(prompts[0]) + 4:
            raise RuntimeError("mine")
        return scores if where == "logits_processor" else torch.zeros(len(input_ids), dtype=torch.bool)

    engine = engine_for(target)
    bad = engine.submit(prompts[0], max_new_tokens=20, do_sample=False, **{where: [broken]})
    good = engine.submit(prompts[1], max_new_tokens=20, do_sample=False)
    with pytest.raises(RuntimeError, match="mine"):
        list(engine.stream(bad))
    engine.run()
    assert bad.finished == "error" and good.new_ids == text_of(target, prompts[1]) and left_clean(engine)


def test_a_failing_forward_ends_what_it_held_and_nothing_else(target, prompts, monkeypatch):
    engine = engine_for(target, max_requests=2)
    requests = [engine.submit(p, max_new_tokens=20, do_sample=False) for p in prompts[:3]]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:

        def fail(*args):
            raise MemoryError("no room")

        patch.setattr(engine.packed, "verify", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert [r.finished for r in requests] == ["error", "error", None]
    engine.run()
    assert requests[2].new_ids == text_of(target, prompts[2]) and left_clean(engine)
    assert plain(target, torch.tensor([prompts[0]]), max_new_tokens=20)[0, len(prompts[0]) :].tolist() == text_of(
        target, prompts[0]
    )


def test_refusals_name_what_and_queue_nothing(target, prompts):
    engine = engine_for(target, max_waiting=1, max_length=60, max_cached_tokens=50)
    refused = [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids"),
        ({"input_ids": [1, VOCAB]}, "vocabulary"),
        ({"input_ids": prompts[0], "stop_strings": [""], "tokenizer": characters()}, "stop_strings"),
        ({"input_ids": prompts[0], "stop_strings": "a"}, "tokenizer"),
        ({"input_ids": prompts[0], "num_beams": 2}, "num_beams"),
        ({"input_ids": prompts[0], "guidance_scale": 2.0}, "guidance_scale"),
        ({"input_ids": prompts[0], "max_new_tokens": 100}, "max_length"),
        ({"input_ids": prompts[0], "max_new_tokens": 55}, "max_cached_tokens"),
    ]
    for how, name in refused:
        with pytest.raises(ValueError, match=name):
            engine.submit(**{"max_new_tokens": 5, **how})
    assert not engine.busy
    engine.submit(prompts[0], max_new_tokens=5)
    with pytest.raises(EngineFull, match="max_waiting"):
        engine.submit(prompts[0], max_new_tokens=5)
    for how, name in (
        ({"max_requests": 0}, "max_requests"),
        ({"max_step_tokens": 3, "max_requests": 4}, "max_step_tok"),
    ):
        with pytest.raises(ValueError, match=name):
            engine_for(target, **how)
    with pytest.raises(ValueError, match="schedule"):
        engine_for(target, schedule="best")


def test_a_stream_of_another_engines_request_is_refused(target, prompts):
    request = engine_for(target).submit(prompts[0], max_new_tokens=5)
    with pytest.raises(ValueError, match="this engine"):
        list(engine_for(target).stream(request))


def test_two_threads_decode_batches_on_one_target(target, prompts):
    """They take turns, and leave the target as it was."""
    attention = target.config._attn_implementation
    ids = torch.tensor([prompts[1], prompts[1][::-1]])
    expected = plain(target, ids, max_new_tokens=12)
    texts = {}

    def decode(i):
        settings = config(max_new_tokens=12, dspark_schedule="fixed")
        texts[i] = target.generate(ids, assistant_model=make_drafter(target), generation_config=settings)

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 4 and all(torch.equal(text, expected) for text in texts.values())
    assert target.config._attn_implementation == attention


def test_a_batch_may_ask_for_more_than_learned_positions_if_it_ends_before():
    from conftest import make_target

    target = make_target("gpt2", num_key_value_heads=None, intermediate_size=None, max_position_embeddings=48)
    ids = torch.randint(3, VOCAB, (2, 6), generator=seeded(0))
    eos = plain(target, ids, max_new_tokens=10)[:, 6:].unique().tolist()
    drafter = make_drafter(target, cost_table=COSTS)
    how = {"eos_token_id": eos, "max_new_tokens": 60}
    out = target.generate(ids, assistant_model=drafter, generation_config=config(dspark_schedule="fixed", **how))
    assert torch.equal(out, plain(target, ids, pad_token_id=0, **how))
    with pytest.raises(ValueError, match="position 48"):
        engine_for(target).submit(ids[0], max_new_tokens=60)


def test_storages_shrink_when_a_long_request_is_gone(target, prompts):
    engine = engine_for(target)
    engine.submit(torch.randint(3, VOCAB, (450,), generator=seeded(1)), max_new_tokens=4, do_sample=False)
    for _ in range(40):
        engine.submit(prompts[0], max_new_tokens=4, do_sample=False)
    engine.run()
    assert engine.packed.slots.large
    request = engine.submit(prompts[1], max_new_tokens=20, do_sample=False)
    engine.run()
    assert not engine.packed.slots.large and request.new_ids == text_of(target, prompts[1])


def test_a_constraint_of_one_row_is_not_asked_about_another(target, prompts):
    ids = torch.tensor([prompts[1], prompts[1][::-1]])

    def allowed(row, text):
        assert text[: ids.shape[1]].tolist() == ids[row].tolist()
        return list(range(3, 40)) if row else list(range(20, 60))

    drafter = make_drafter(target)
    settings = config(max_new_tokens=15, dspark_schedule="fixed")
    out = target.generate(ids, assistant_model=drafter, generation_config=settings, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out, plain(target, ids, max_new_tokens=15, prefix_allowed_tokens_fn=allowed))
    assert drafter.statistics.drafted > 0


def test_modes_of_torch_may_change_between_steps(target, prompts):
    engine = engine_for(target)
    request = engine.submit(prompts[1], max_new_tokens=20, do_sample=False)
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
    engine.run()
    assert request.new_ids == text_of(target, prompts[1])


def test_all_texts_together_stay_within_their_budget(target, prompts):
    engine = engine_for(target, max_cached_tokens=60)
    requests = [engine.submit(p, max_new_tokens=20, do_sample=False) for p in prompts[:3]]
    while engine.busy:
        engine.step()
        assert len(engine.active) * max((r.max_length for r in engine.active), default=0) <= 60
    assert all(r.new_ids == text_of(target, p) for r, p in zip(requests, prompts))


def test_steps_stay_within_their_budget(target, prompts, monkeypatch):
    engine = engine_for(target, schedule="fixed", max_requests=6, max_step_tokens=12, prefill_chunk=8)
    sizes, verify = [], engine.packed.verify

    def spy(rows, tokens, keep):
        sizes.append(sum(map(len, tokens)))
        return verify(rows, tokens, keep)

    monkeypatch.setattr(engine.packed, "verify", spy)
    requests = [engine.submit(p, max_new_tokens=20, do_sample=False) for p in prompts]
    engine.run()
    assert max(sizes) == 12 and engine.statistics.verified > 0
    assert all(r.new_ids == text_of(target, p) for r, p in zip(requests, prompts))


def test_a_thread_of_its_own(target, prompts):
    """Readers in their own threads, requests from all of them, and a clean end."""
    texts = {}
    with engine_for(target, max_requests=3) as engine:

        def read(i):
            request = engine.submit(prompts[i % 6], max_new_tokens=20, do_sample=False)
            texts[i] = list(engine.stream(request))

        readers = [threading.Thread(target=read, args=(i,)) for i in range(12)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
    assert texts == {i: text_of(target, prompts[i % 6]) for i in range(12)}
    assert engine.statistics.drafted > 0 and left_clean(engine)
    assert not any(thread.name == "dspark-engine" for thread in threading.enumerate())


def test_a_drafter_that_never_hits_is_left_alone_under_load(target, prompts):
    """Each request rests on its own balance, and is tried again."""
    engine = engine_for(target, costs=EngineCosts({1: 1.0, 64: 4.0}, {1: 0.2, 64: 1.0}))
    requests = [engine.submit(p, max_new_tokens=60, do_sample=False) for p in prompts]
    engine.run()
    assert all(r.statistics.rests["drafting did not pay"] > 30 for r in requests)
    assert 0 < engine.statistics.drafted < 0.3 * engine.statistics.decoded


def test_under_more_load_less_is_verified(target, prompts):
    costs = EngineCosts({1: 1.0, 8: 1.05, 16: 1.6, 32: 3.2}, {1: 0.0})

    def verified(requests: int) -> float:
        drafter = make_drafter(target)
        engine = DSparkEngine(target, drafter, costs=costs, max_requests=requests)
        engine.planner.scheduler._remember = lambda *_: None
        for prompt in (prompts * 4)[:requests]:
            engine.submit(prompt, max_new_tokens=4, do_sample=False)
        engine.run()
        return engine.statistics.verified / max(1, engine.statistics.drafted)

    assert verified(1) > 1.3 * verified(20)


# ---- the tools around it


def test_stress_finds_nothing_wrong(target, prompts):
    result = stress.run(target, make_drafter(target, cost_table=COSTS), characters(), prompts, count=120)
    assert result["ok"], result
    kinds = result["outcomes"]
    assert {"refused: full", "greedy", "sampled", "stopped", "refused: empty stop string"} <= kinds.keys()


def test_stress_sees_a_text_that_is_not_the_prompts(target, prompts):
    wrong = [text_of(target, prompt, 24) for prompt in prompts]
    wrong[2] = wrong[3]
    with engine_for(target) as engine:
        watch = stress.Stress(engine, characters(), prompts, wrong)
        watch.flood(40, rate=200.0)
    assert any(outcome.startswith("WRONG") for outcome in watch.outcomes)


def test_load_curves_and_their_plot(target, prompts, tmp_path):
    drafter = make_drafter(target, cost_table=COSTS)
    settings = config(max_new_tokens=8, eos_token_id=1)
    modes = [mode for mode in load.MODES if mode != "generate_batch"]
    runs = load.measure(target, drafter, prompts, settings, (1, 4), modes)
    assert len(runs) == 2 * len(modes)
    assert all(run["same_text"] == 1.0 for run in runs)
    by_mode = {run["mode"]: run for run in runs}
    assert by_mode["none"]["verified"] == 1.0 < by_mode["fixed 3"]["verified"] < by_mode["fixed 7"]["verified"]
    load.plot(runs, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 10_000
    json.dumps(load.medians(runs))
    assert all("tokens/s" in load.line(run) for run in runs)


def test_the_ablation_runs_every_part(target, prompts):
    names = []
    settings = config(max_new_tokens=6)
    drafter = make_drafter(target, cost_table=COSTS)
    results = ablation.ablate(target, drafter, prompts, prompts[:2], settings, 3, lambda name, _: names.append(name))
    assert names == list(results) and len(names) == 15
    assert results["parallel, whole blocks"]["verified"] > results["no drafts"]["verified"] == 1.0


def test_the_price_of_packing_is_measured(target):
    result = packed_cost.measure(target, make_drafter(target), contexts=(8, 40), rounds=2)
    assert set(result["seconds"]) == {"packed", "forward", "attention", "packed_ones", "batch_step"}
    assert 0 < result["ones_ratio"] < 50


def test_bookkeeping_is_little(target, prompts):
    """Outside the two models: milliseconds, not the tens that a loop over rows and slots would take."""
    engine = engine_for(target, schedule="throughput")
    for prompt in prompts * 3:
        engine.submit(prompt, max_new_tokens=12, do_sample=False)
    started = time.perf_counter()
    engine.run()
    assert engine.statistics.host_seconds < 0.02 * engine.statistics.steps < time.perf_counter() - started + 1
