"""`dspark benchmark` and `dspark profile`: figures, their arithmetic, refusals and errors, on tiny models."""

import json
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import config, make_drafter, make_target, plain, scripted
from test_readme import write_tokenizer
from transformers import AutoTokenizer

from dspark.candidate_generator import CostTable
from dspark.candidate_generator import cost_table_dspark as cost_tables
from dspark.evaluation import benchmark, cli, inputs, machine, profiling


QUIET = {"cores": 2, "load_average": [0.1, 0.1, 0.1], "other_cores_busy": 0.0, "busiest": [], "gpu_percent": None}
BUSY = {**QUIET, "other_cores_busy": 1.5, "busiest": ["cc1plus (pid 7, 1.5 cores)"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Arguments that name a tiny target with its tokenizer, a drafter for it and three prompts."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target()
    target.save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    make_drafter(target, confidence_temperatures={"0.0": [0.2] * 7}).save_pretrained(folder / "drafter")
    prompts = [
        {"set": "tiny", "turns": [text, "never used"]} for text in ("Add 3 and 4", "Hello there", "What is it?")
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts) + "\n")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")], folder / "prompts.jsonl"


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(benchmark, "look", lambda: QUIET)


def test_end_to_end(models, quiet, tmp_path, capsys):
    arguments, prompts = models
    CostTable.from_costs({1: 1.0, 8: 1.05}, draft=0.01).save(tmp_path / "table.json")
    options = ["--prompts", str(prompts), "--max-new-tokens", "24", "--json", str(tmp_path / "out.json")]
    assert benchmark.main([*arguments, *options, "--cost-table", str(tmp_path / "table.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    text = "\n".join(out[:-1])
    assert "prompt 3 of 3" in text and f"{result['ratio']:.2f}" in text and "acceptance by slot" in text

    plain, assisted, fixed, rows = (result[key] for key in ("plain", "assisted", "fixed", "per_prompt"))
    assert len(rows) == 3 and result["same_text"] == 3 and assisted["drafted"] > 0 and fixed["drafted"] > 0
    assert (assisted["schedule"], fixed["schedule"]) == ("throughput", "fixed")
    assert all(row["plain_tokens"] == row["assisted_tokens"] == 24 for row in rows)
    for mode in ("plain", "assisted"):
        assert result[mode]["tokens_per_second"] == statistics.median(r[f"{mode}_tokens_per_second"] for r in rows)
        assert result[mode]["tokens"] == 72
    assert result["ratio"] == pytest.approx(assisted["tokens_per_second"] / plain["tokens_per_second"])
    assert all(
        r["ratio"] == pytest.approx(r["assisted_tokens_per_second"] / r["plain_tokens_per_second"]) for r in rows
    )
    for run in (assisted, fixed):
        parts = [run["time"][f"{part}_seconds"] for part in ("prefill", "draft", "verify", "host")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(run["seconds"], rel=0.01)
        bound, rounds = run["bound"], run["rounds"] + run["plain_rounds"]
        assert bound["tokens_per_round"] == pytest.approx((72 - 3) / rounds)
        assert bound["tokens_per_second"] == pytest.approx(
            bound["tokens_per_round"] / (bound["t_draft"] + bound["t_verify"])
        )
        assert bound["share"] == pytest.approx(bound["reached_tokens_per_second"] / bound["tokens_per_second"])
        assert 0 < bound["share"] < 1
        assert run["acceptance_length"] == pytest.approx(1 + run["accepted"] / run["rounds"])
        assert sum(run["lengths"].values()) == run["rounds"]

    assert result["cost_table"]["verify"] == {"0": {"1": 1.0, "8": 1.05}}
    settings = result["settings"]
    assert (settings["dtype"], settings["attention"], settings["temperature"]) == ("float32", "sdpa", 0.0)
    assert settings["chat_template"] and settings["num_prompts"] == 3 and settings["block_size"] == 7
    assert result["versions"]["torch"] == torch.__version__
    assert result["memory"]["target_bytes"] > result["memory"]["feature_bytes"] > 0
    assert result["memory"]["peak_bytes"]["plain"] > result["memory"]["target_bytes"]


def test_sampled_with_other_settings(models, quiet, capsys):
    arguments, prompts = models
    options = ["--prompts", str(prompts), "--num-prompts", "2", "--max-new-tokens", "12", "--schedule", "fixed"]
    sampling = [
        "--temperature",
        "0.7",
        "--top-k",
        "5",
        "--attn",
        "eager",
        "--dtype",
        "bfloat16",
        "--trust-remote-code",
    ]
    assert benchmark.main([*arguments, *options, *sampling]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    settings = result["settings"]
    assert (settings["top_k"], settings["temperature"]) == (5, 0.7)
    assert (settings["attention"], settings["dtype"], settings["drafter_dtype"]) == ("eager", "bfloat16", "bfloat16")
    assert result["fixed"] == result["assisted"] and len(result["per_prompt"]) == 2
    assert result["assisted"]["schedule"] == "fixed" and result["assisted"]["drafted"] > 0


@pytest.mark.parametrize(
    ("kind", "length", "by_slot"),
    [
        ("oracle", 8.0, [1.0] * 7),
        # The prompt has 9 tokens, so every anchor sits at an odd position: one draft is right, the next wrong.
        ("alternating", 2.0, [1.0, 0.0, None, None, None, None, None]),
        ("never", 1.0, [0.0, None, None, None, None, None, None]),
    ],
)
def test_acceptance_of_scripted_drafters(prompt, kind, length, by_slot):
    target = make_target()
    drafter = scripted(target, prompt, kind)
    settings = benchmark.generation_settings(target, 1 + 8 * 5)  # the prompt's own token, then whole rounds
    encoded = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    shown = []
    result = benchmark.compare(
        target, drafter, [encoded] * 2, settings, show=lambda i, calls: shown.append((i, calls))
    )
    fixed = result["fixed"]
    assert fixed["acceptance_length"] == pytest.approx(length)
    assert fixed["conditional_acceptance"] == pytest.approx(by_slot)
    assert result["same_text"] == 2
    expected = plain(target, prompt, max_new_tokens=41)[0, prompt.shape[1] :].tolist()
    assert [i for i, _ in shown] == [0, 1]
    assert all(call.ids == expected for _, calls in shown for call in calls.values())
    assert set(shown[0][1]) == {"plain", "assisted", "fixed"}


def test_only_the_asked_sampling_settings_are_in_force():
    target = make_target()
    for name, value in {"top_k": 3, "temperature": 0.6, "min_p": 0.1, "repetition_penalty": 1.3}.items():
        setattr(target.generation_config, name, value)
    greedy = benchmark.generation_settings(target, 5)
    assert not greedy.do_sample and greedy.top_k is greedy.temperature is greedy.min_p is None
    sampled = benchmark.generation_settings(target, 5, temperature=1.0)
    assert sampled.do_sample and (sampled.temperature, sampled.top_k, sampled.top_p) == (1.0, 0, 1.0)
    assert sampled.min_p is None
    assert greedy.repetition_penalty == sampled.repetition_penalty == 1.3  # the model's own, not a sampling setting
    assert target.generation_config.top_k == 3


def test_a_busy_machine_is_refused(models, monkeypatch, capsys):
    arguments, prompts = models
    monkeypatch.setattr(benchmark, "look", lambda: BUSY)

    def reached(args):
        raise ValueError("models would be loaded")

    monkeypatch.setattr(benchmark, "load_models", reached)
    assert benchmark.main([*arguments, "--prompts", str(prompts)]) == 3
    printed = capsys.readouterr()
    assert "1.5 of 2 cores" in printed.err and "cc1plus (pid 7" in printed.err and "--force" in printed.err
    assert printed.out == ""
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*arguments, "--prompts", str(prompts), "--force"])
    assert stop.value.code == 2 and "models would be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, None),
        ({"other_cores_busy": 0.2}, None),
        ({"other_cores_busy": 0.5}, "0.5 of 2 cores"),
        ({"other_cores_busy": None, "load_average": None}, None),
        ({"load_average": [1.9, 0, 0]}, None),
        ({"load_average": [2.5, 0, 0]}, "load average of the last minute is 2.5"),
        ({"gpu_percent": [99, 0]}, None),
        ({"gpu_percent": [99]}, "99 % busy"),
    ],
)
def test_what_counts_as_busy(change, word):
    why = machine.why_busy({**QUIET, **change})
    assert why is None if word is None else word in why


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_other_work_is_seen():
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = machine.look(1.0)
    finally:
        spin.kill()
        spin.wait()
    assert load["other_cores_busy"] > 0.3
    assert machine.why_busy({**load, "cores": 1, "load_average": None})


def test_own_work_is_not_other_work(monkeypatch):
    readings = iter([(0.0, 10.0, 1.0), (2.0, 14.0, 2.0)])  # clock, machine busy, own
    monkeypatch.setattr(machine.OtherWork, "_read", lambda self: next(readings))
    assert machine.OtherWork().cores() == 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "holds no prompt"),
        ('{"turns": ["a"]}\n{"turns": \n', "line 2: not JSON"),
        ('{"turns": ["a"]}\n\n{"prompt": "b"}\n', 'line 3: "turns" must be'),
        ('{"turns": []}\n', 'line 1: "turns" must be'),
        ('{"turns": "a"}\n', 'line 1: "turns" must be'),
        ('["a"]\n', 'line 1: "turns" must be'),
    ],
)
def test_bad_prompts_are_named(models, tmp_path, capsys, content, message):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*models[0], "--prompts", str(path)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and str(path) in error


@pytest.mark.parametrize("option", ["--num-prompts=0", "--max-new-tokens=1", "--temperature=-1"])
def test_bad_options_are_named(models, capsys, option):
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*models[0], "--prompts", str(models[1]), option])
    assert stop.value.code == 2 and option.split("=")[0] in capsys.readouterr().err


def test_prompts_are_limited_and_go_through_the_chat_template(models):
    arguments, path = models
    assert [p["turns"][0] for p in inputs.read_prompts(path, 2)] == ["Add 3 and 4", "Hello there"]
    tokenizer = AutoTokenizer.from_pretrained(arguments[1])
    prompt = {"turns": ["Add", "second turn"]}
    templated = inputs.tokenize(tokenizer, prompt, "cpu")["input_ids"][0].tolist()
    assert templated == tokenizer("Add. ")["input_ids"]
    tokenizer.chat_template = None
    assert inputs.tokenize(tokenizer, prompt, "cpu")["input_ids"][0].tolist() == tokenizer("Add")["input_ids"]


def test_whose_code_runs(models, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    target, drafter = models[0][1], models[0][3]
    assert type(inputs.load_drafter(drafter, False)).__module__.startswith("dspark.")
    assert type(inputs.load_drafter(drafter, True)).__module__.startswith("transformers_modules.")
    for trust in (False, True):
        with pytest.raises(ValueError, match="not a DSpark drafter"):
            inputs.load_drafter(target, trust)


def test_profile_replaces_the_table_decoding_finds(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling, "look", lambda: BUSY)
    arguments, _ = models
    assert profiling.main([*arguments, "--seconds", "0.5", "--output", str(tmp_path / "table.json")]) == 0
    table = CostTable.load(tmp_path / "table.json")
    printed = capsys.readouterr().out
    assert str(table) in printed and "1.5 of 2 cores" in printed
    assert table.verify_seconds(8) >= table.verify_seconds(1) > 0

    assert profiling.main([*arguments, "--seconds", "0.5"]) == 3
    assert "--force" in capsys.readouterr().err
    assert profiling.main([*arguments, "--seconds", "0.5", "--force"]) == 0
    monkeypatch.setattr(cost_tables, "profile", lambda *_: pytest.fail("profiled again"))
    parser, args = benchmark.parse([*arguments, "--prompts", "unused"])
    target, drafter = inputs.load_models(args)
    drafter.cost_table = None
    found = cost_tables.cost_table_for(drafter, target)
    assert str(found) in capsys.readouterr().out
    settings = config(max_new_tokens=4)
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, generation_config=settings)


def test_command_line_answers_without_torch():
    program = (
        "import sys\n"
        "from dspark.evaluation.cli import main\n"
        "for argv in (['--help'], *([c, '--help'] for c in ('benchmark', 'profile', 'demo'))):\n"
        "    try: main(argv)\n"
        "    except SystemExit as stop: assert stop.code == 0, argv\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for word in (
        "usage: dspark ",
        "usage: dspark benchmark",
        "--max-new-tokens",
        "usage: dspark profile",
        "--seconds",
    ):
        assert word in done.stdout
    assert all(command in done.stdout for command in cli.COMMANDS)


def test_an_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["benchmrk"])
    assert stop.value.code == 2 and "benchmrk" in capsys.readouterr().err


def test_a_command_gets_its_own_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(benchmark, "main", lambda argv: seen.append(argv))
    assert cli.main(["benchmark", "--target", "x", "--help"]) == 0
    assert seen == [["--target", "x", "--help"]]
