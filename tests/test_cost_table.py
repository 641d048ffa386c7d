"""The cost table: numbers in, numbers out; files; keys; and the profile that measures one."""

import json
import random
import threading
import time

import pytest
import torch
from conftest import config, make_drafter, make_target, plain

from dspark.candidate_generator import CostTable, cost_table_dspark
from dspark.candidate_generator.cost_table_dspark import cost_table_for, profile, table_key, table_path


MEASURED = {32: {1: 0.010, 2: 0.011, 5: 0.014, 8: 0.020}, 1024: {1: 0.030, 2: 0.031, 5: 0.034, 8: 0.040}}


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def drafter(target):
    return make_drafter(target, cost_table=None)


@pytest.fixture
def table() -> CostTable:
    return CostTable(MEASURED, {32: 0.002, 1024: 0.004}, {"device": "a CPU"})


# Looking up.


def test_measured_points_come_back(table):
    for context, row in MEASURED.items():
        for tokens, seconds in row.items():
            assert table.verify_seconds(tokens, context) == pytest.approx(seconds, rel=1e-12)
    assert [table.draft_seconds(context) for context in (32, 1024)] == [0.002, 0.004]


@pytest.mark.parametrize(
    ("tokens", "context", "seconds"),
    [
        (3, 32, 0.012),  # between widths
        (8, 528, 0.030),  # between contexts
        (3, 528, 0.022),  # both
        (10, 32, 0.024),  # on beyond the widest, 0.002 a token
        (1, 0, 0.010),  # flat below the shortest context
        (1, 2016, 0.050),  # on beyond the longest, 0.02 in 992
        (10, 2016, 0.064),
    ],
)
def test_linear_between_and_beyond(table, tokens, context, seconds):
    assert table.verify_seconds(tokens, context) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("context", "seconds"), [(0, 0.002), (528, 0.003), (2016, 0.006)])
def test_drafts_by_context(table, context, seconds):
    assert table.draft_seconds(context) == pytest.approx(seconds, rel=1e-9)


def test_more_tokens_never_cost_less():
    """Measured dips are noise, which a schedule would jump at; a higher point before them stands."""
    assert CostTable.from_costs({1: 1.0, 2: 1.5, 4: 1.2, 8: 1.8}).verify_seconds(4) == 1.5
    assert CostTable.from_costs({1: 2.0, 8: 1.0}).verify_seconds(20) == 2.0
    rng = random.Random(0)
    for _ in range(300):
        widths = [1, *sorted(rng.sample(range(2, 20), 5))]
        noisy = CostTable({c: {w: rng.uniform(0.5, 1.5) for w in widths} for c in (10, 100)}, {0: 0.1})
        for context in (0, 10, 50, 100, 400):
            seconds = [noisy.verify_seconds(tokens, context) for tokens in range(1, 30)]
            assert seconds[0] > 0
            assert all(b > a - 1e-12 for a, b in zip(seconds, seconds[1:])), (context, noisy.verify)


def test_beyond_the_longest_context_plain_decoding_stays_the_cheapest():
    """Slopes along the context differ by noise; continued, they would cross."""
    table = CostTable({32: {1: 10.0, 8: 12.0}, 1024: {1: 11.0, 8: 12.1}}, {0: 1.0})
    assert table.verify_seconds(1, 1024) < table.verify_seconds(8, 1024)
    assert table.verify_seconds(1, 16_000) < table.verify_seconds(8, 16_000)


def test_a_longer_context_that_measured_faster_stays_positive():
    """A dip between contexts is noise too; going on along it would end in negative seconds."""
    table = CostTable({32: {1: 1.0, 8: 1.2}, 1024: {1: 0.6, 8: 0.8}}, {32: 0.3, 1024: 0.1})
    for context in (4_096, 100_000):
        assert table.verify_seconds(1, context) > 0 and table.draft_seconds(context) >= 0


def test_order_and_types_of_the_points_do_not_matter(table):
    """JSON has strings for keys, and "1024" sorts before "32"."""
    verify = {str(c): {str(n): s for n, s in reversed(row.items())} for c, row in reversed(MEASURED.items())}
    shuffled = CostTable(verify, {"1024": 0.004, "32": 0.002})
    for tokens, context in ((1, 32), (3, 528), (10, 2016)):
        assert shuffled.verify_seconds(tokens, context) == table.verify_seconds(tokens, context)
        assert shuffled.draft_seconds(context) == table.draft_seconds(context)


@pytest.mark.parametrize(
    ("verify", "draft", "word"),
    [
        ({32: {2: 1.0, 8: 1.2}}, {32: 0.1}, "32 has no cost for 1 token"),
        ({32: {1: 1.0, 8: 1.2}, 64: {8: 1.2}}, {32: 0.1}, "64 has no cost for 1 token"),
        ({32: {1: 0.0, 8: 1.2}}, {32: 0.1}, "positive"),
        ({32: {1: 1.0, 8: -1.2}}, {32: 0.1}, "positive"),
        ({32: {1: float("nan"), 8: 1.2}}, {32: 0.1}, "costs are seconds"),
        ({32: {1: 1.0, 8: float("inf")}}, {32: 0.1}, "costs are seconds"),
        ({32: {1: 1.0}}, {32: -0.1}, "negative"),
        ({32: {1: 1.0}}, {}, "draft"),
        ({}, {32: 0.1}, "positive"),
    ],
)
def test_bad_numbers_are_refused(verify, draft, word):
    with pytest.raises(ValueError, match=word):
        CostTable(verify, draft)


def test_it_prints_as_a_table(table):
    lines = str(table).splitlines()
    assert lines[1].split() == ["context", "1", "2", "5", "8", "draft"]
    assert lines[2].split() == ["32", "10.00", "11.00", "14.00", "20.00", "2.00"]
    assert lines[3].split() == ["1024", "30.00", "31.00", "34.00", "40.00", "4.00"]


# Files.


def test_save_and_load(table, tmp_path):
    path = tmp_path / "some" / "folder" / "table.json"
    table.save(path)
    loaded = CostTable.load(str(path))
    assert (loaded.verify, loaded.draft, loaded.key) == (table.verify, table.draft, table.key)
    assert loaded.verify_seconds(3, 528) == table.verify_seconds(3, 528)
    assert loaded.draft_seconds(528) == table.draft_seconds(528)
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_saving_twice_keeps_the_last(table, tmp_path):
    table.save(tmp_path / "t.json")
    CostTable.from_costs({1: 7.0}).save(tmp_path / "t.json")
    assert CostTable.load(tmp_path / "t.json").verify_seconds(1) == 7.0


def test_a_failed_save_leaves_the_old_file_and_no_other(table, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    table.save(path)
    before = path.read_bytes()

    def fails(*args):
        raise OSError("disk full")

    monkeypatch.setattr(cost_table_dspark.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        CostTable.from_costs({1: 7.0}).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_readers_see_whole_tables_while_others_write(tmp_path):
    """Two writers and a reader: every read is one of the two tables."""
    path = tmp_path / "t.json"
    tables = [CostTable.from_costs({1: float(i), **dict.fromkeys(range(2, 300), 10.0 * i)}) for i in (1, 2)]
    tables[0].save(path)
    stop, errors = threading.Event(), []

    def write(table):
        while not stop.is_set():
            try:
                table.save(path)
            except Exception as error:
                errors.append(error)

    writers = [threading.Thread(target=write, args=(table,)) for table in tables]
    for writer in writers:
        writer.start()
    seen = set()
    for _ in range(150):
        read = CostTable.load(path)
        seen.add((read.verify_seconds(1), read.verify_seconds(299)))
    stop.set()
    for writer in writers:
        writer.join()
    assert not errors and seen <= {(1.0, 10.0), (2.0, 20.0)} and len(seen) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


BROKEN = {
    "empty": "",
    "cut off": '{"key": {}, "verify": {"32": {"1": 0.01',
    "a list": "[]",
    "a number": "3",
    "no verify": '{"key": {}, "draft": {"0": 0.1}}',
    "no draft": '{"key": {}, "verify": {"0": {"1": 0.1}}}',
    "words for numbers": '{"key": {}, "verify": {"0": {"1": "fast"}}, "draft": {"0": 0.1}}',
    "null": '{"key": {}, "verify": null, "draft": null}',
    "no cost of one token": '{"key": {}, "verify": {"0": {"2": 1.0}}, "draft": {"0": 0.1}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name, tmp_path):
    path = tmp_path / "broken.json"
    content = BROKEN[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="broken.json"):
        CostTable.load(path)


# Keys.


def test_a_key_is_stable_and_json(target, drafter):
    key = table_key(drafter, target)
    assert key == table_key(drafter, target) == json.loads(json.dumps(key))
    assert table_path(key) == table_path(json.loads(json.dumps(key)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when compiling
def test_a_key_differs_with_everything_that_costs(target, drafter, monkeypatch):
    paths = {"as it is": table_path(table_key(drafter, target))}

    def add(what, its_drafter=drafter, its_target=target):
        paths[what] = table_path(table_key(its_drafter, its_target))

    add("deeper drafter", make_drafter(target, num_hidden_layers=1))
    add("block size", make_drafter(target, block_size=5))
    add("drafter dtype", make_drafter(target).bfloat16())
    add("target dtype", its_target=make_target().bfloat16())
    add("target size", its_target=make_target(num_hidden_layers=5))
    add("target family", its_target=make_target("mistral"))
    eager = make_target()
    eager.set_attn_implementation("eager")
    add("attention", its_target=eager)
    compiled = make_target()
    compiled.compile()
    add("compiled", its_target=compiled)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    add("threads")
    monkeypatch.undo()
    monkeypatch.setattr(cost_table_dspark.transformers, "__version__", "99.0")
    add("host version")
    assert len(set(paths.values())) == len(paths), paths


def test_where_tables_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "own"))
    assert table_path({}).parent == tmp_path / "own"
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert table_path({}).parent == tmp_path / "hf" / "dspark"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert table_path({}).parent == tmp_path / ".cache" / "huggingface" / "dspark"


# Which table a call uses.


@pytest.fixture
def profiles(monkeypatch) -> list:
    """The profiles that were run; a made-up table instead of a measurement."""
    runs = []

    def quick(drafter, target, *args, **kwargs):
        runs.append((drafter, target))
        return CostTable.from_costs({1: 1.0, 8: 1.1}, draft=0.1)

    monkeypatch.setattr(cost_table_dspark, "profile", quick)
    return runs


def test_the_drafters_own_table_comes_first(target, drafter, table, profiles):
    table.save(table_path(table_key(drafter, target)))
    own = CostTable.from_costs({1: 3.0})
    drafter.cost_table = own
    assert cost_table_for(drafter, target) is own and not profiles


def test_then_memory_then_disk_then_a_profile(target, drafter, profiles):
    first = cost_table_for(drafter, target)
    path = table_path(table_key(drafter, target))
    assert len(profiles) == 1 and path.exists()
    path.unlink()
    assert cost_table_for(drafter, target) is first  # memory
    first.save(path)
    again = make_drafter(target, cost_table=None)
    assert cost_table_for(again, target).verify == first.verify  # disk
    assert len(profiles) == 1
    assert cost_table_for(drafter, make_target(num_hidden_layers=5)).key == {} and len(profiles) == 2


@pytest.mark.parametrize("content", ["", "{}", '{"key": {}, "verify": {"0": {"2": 1.0}}, "draft": {"0": 1.0}}'])
def test_a_broken_table_on_disk_is_profiled_anew(target, drafter, profiles, content):
    path = table_path(table_key(drafter, target))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    table = cost_table_for(drafter, target)
    assert len(profiles) == 1 and CostTable.load(path).verify == table.verify


def test_a_cache_that_cannot_be_written_is_no_error(target, drafter, profiles, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file" / "below"))
    table = cost_table_for(drafter, target)
    assert cost_table_for(drafter, target) is table and len(profiles) == 1


def test_generate_profiles_only_for_the_schedule_that_needs_it(target, drafter, profiles):
    prompt = torch.tensor([[5, 6, 7]])
    for settings in ({"dspark_schedule": "fixed"}, {"dspark_threshold": 0.3}):
        target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=4, **settings))
    assert not profiles
    for _ in range(2):
        target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=4))
    assert len(profiles) == 1


# The profile.


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox"])
def test_a_profile_is_a_table_of_its_pair(kind):
    target = make_target(kind)
    drafter = make_drafter(target, cost_table=None, block_size=5)
    table = profile(drafter, target, seconds=3.0, contexts=(16, 64))
    assert list(table.verify) == list(table.draft) == [16, 64]
    for row in table.verify.values():
        assert {1, 2, 3, 6} <= set(row) and max(row) == 6
    assert table.key == table_key(drafter, target)


def test_a_profile_leaves_everything_as_it_was(target, drafter):
    before = {name: tensor.clone() for name, tensor in (*target.state_dict().items(), *drafter.state_dict().items())}
    text = plain(target, torch.tensor([[5, 6, 7]]), max_new_tokens=8)
    hooks = hooks_of(target), hooks_of(drafter)
    settings = target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    torch.manual_seed(5)
    random.seed(5)
    state = torch.get_rng_state(), random.getstate()
    profile(drafter, target, seconds=1.0, contexts=(16,))
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert (hooks_of(target), hooks_of(drafter)) == hooks
    assert (target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()) == settings
    for name, tensor in (*target.state_dict().items(), *drafter.state_dict().items()):
        assert torch.equal(tensor, before[name])
    assert torch.equal(plain(target, torch.tensor([[5, 6, 7]]), max_new_tokens=8), text)
    assert not any(p.grad is not None for p in target.parameters())


def test_a_profile_in_front_of_a_call_changes_no_draw(target, drafter):
    """The same seed gives the same text whether a table had to be profiled first or not."""
    prompt, texts = torch.tensor([[5, 6, 7]]), []
    for ready in (False, True):
        drafter._runtime.cost_tables.clear()
        if ready:
            drafter.cost_table = CostTable.load(table_path(table_key(drafter, target)))
        torch.manual_seed(3)
        how = config(do_sample=True, max_new_tokens=24)
        texts.append(target.generate(prompt, assistant_model=drafter, generation_config=how).tolist())
        assert drafter.statistics.rounds > 0
        assert (drafter.statistics.profile_seconds > 0.01) == (not ready)
    assert texts[0] == texts[1]


class Slow:
    """A forward pre-hook that waits, and keeps the widths it saw."""

    def __init__(self, seconds: float):
        self.seconds, self.widths = seconds, []

    def __call__(self, module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        self.widths.append(ids.shape[1])
        time.sleep(self.seconds)


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3])
def test_a_profile_stays_within_its_time(pause):
    """Up to the forwards that make a table at all: a prefill, and one or two of each end."""
    target = make_target()
    slow = Slow(pause)
    target.register_forward_pre_hook(slow, with_kwargs=True)
    drafter = make_drafter(target, cost_table=None)
    started = time.perf_counter()
    table = profile(drafter, target, seconds=1.0)
    took = time.perf_counter() - started
    assert took < 1.0 + 6 * pause + 0.5
    assert {1, 8} <= set(table.verify[min(table.verify)])
    if pause:
        assert table.verify_seconds(1, 32) == pytest.approx(pause, rel=0.5)
    if pause == 0.3:
        assert len(slow.widths) < 8 and list(table.verify) == [32]


def test_positions_of_the_target_bound_the_contexts():
    target = make_target(max_position_embeddings=48)
    table = profile(make_drafter(target, cost_table=None), target, seconds=2.0)
    assert list(table.verify) == [32, 40]
    table = profile(make_drafter(target, cost_table=None), target, seconds=2.0, contexts=(500, 1000))
    assert list(table.verify) == [40]


def test_a_drafter_without_a_confidence_head_is_profiled(target):
    drafter = make_drafter(target, cost_table=None, enable_confidence_head=False)
    assert profile(drafter, target, seconds=1.0, contexts=(16,)).draft_seconds() > 0
