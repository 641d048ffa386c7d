"""Sequential temperature scaling on rounds of known calibration, and `dspark calibrate` on a tiny pair."""

import json

import numpy as np
import pytest
import torch
from conftest import FLAT_COSTS, make_drafter, make_target
from test_train import rows_of, tiny, write_lines

from dspark.evaluation import cli
from dspark.modeling_dspark import DSparkModel
from dspark.training.calibrate import collect_rounds
from dspark.training.calibration import (
    Rounds,
    assess,
    ece,
    fit_temperatures,
    noise_floor,
    reliability_diagram,
    sigmoid,
)


def made_up_rounds(count: int, overconfidence: list[float], seed: int = 0) -> Rounds:
    """Rounds whose slot `k` is accepted with probability `sigmoid(logit / overconfidence[k])`."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 2.0, (count, len(overconfidence)))
    accepted = generator.random(logits.shape) < sigmoid(logits / np.array(overconfidence))
    return Rounds(logits, accepted.cumprod(axis=1).sum(axis=1))


TRUTH = [2.5, 1.0, 0.6, 2.0]


def test_known_temperatures_are_found():
    temperatures = fit_temperatures(made_up_rounds(40_000, TRUTH))
    assert temperatures == pytest.approx(TRUTH, rel=0.2)
    report = assess(made_up_rounds(40_000, TRUTH, seed=1), temperatures)
    assert report["mean_ece_before"] > 0.03 and max(report["ece_after"]) < 0.01
    assert max(report["noise_floor"]) < 0.01
    for before, after in zip(report["auc_before"], report["auc_after"]):
        assert after == pytest.approx(before, abs=1e-12) and before > 0.6


def test_slots_are_fitted_from_left_to_right():
    """A later slot's temperature is the one that mends the product with the calibrated slots before, not with raw
    ones: with the first slot badly overconfident the two differ."""
    rounds = made_up_rounds(40_000, [4.0, 1.0])
    temperatures = fit_temperatures(rounds)
    raw = sigmoid(rounds.logits[:, 0])
    alone = min(
        np.exp(np.linspace(-1.5, 2, 200)),
        key=lambda t: ece(raw * sigmoid(rounds.logits[:, 1] / t), rounds.survived(1)),
    )
    assert temperatures[1] == pytest.approx(1.0, rel=0.2) and abs(np.log(alone)) > 0.3


def test_noise_is_not_fitted():
    """Well-calibrated rounds keep temperatures near 1, and slots nearly never reached keep 1."""
    for seed in range(3):
        rounds = made_up_rounds(1000, [1.0, 1.0], seed)
        rare = Rounds(np.c_[rounds.logits, np.full(1000, -6.0)], rounds.accepted)
        temperatures = fit_temperatures(rare)
        assert all(0.7 < t < 1.4 for t in temperatures) and temperatures[2] == 1.0


def test_ece_and_its_floor():
    assert ece(np.array([0.9, 0.9]), np.array([True, False])) == pytest.approx(0.4)
    probability = np.random.default_rng(7).random(2000)
    floor, spread = noise_floor(probability)
    assert 0.01 < floor < 0.04
    assert 0 < spread < floor / 2
    assert noise_floor(np.tile(probability, 16))[0] < floor / 2


def test_cut_drafts_do_not_count():
    rounds = made_up_rounds(1000, [1.0, 1.0, 1.0])
    cut = Rounds(rounds.logits.copy(), rounds.accepted.copy())
    cut.logits[:500, 2] = np.nan
    assert assess(cut, [1.0] * 3)["rounds"] == [1000, 1000, 500]
    assert len(fit_temperatures(cut)) == 3
    with pytest.raises(ValueError, match="too few"):
        fit_temperatures(made_up_rounds(50, [1.0]))


def test_collected_rounds_are_the_calls_own():
    """Logits before any temperature, whole blocks, the counts of the statistics."""
    target = make_target()
    drafter = make_drafter(target, confidence_temperatures={"0.0": [0.3] * 7})
    prompt = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    rounds = collect_rounds(target, drafter, [{"input_ids": prompt}] * 2, 0.0, 40)
    assert drafter.config.confidence_temperatures == {"0.0": [0.3] * 7}
    log = drafter.statistics.log
    assert len(rounds) == 2 * (len(log) - 1) > 20
    assert rounds.accepted[: len(log) - 1].tolist() == [row[-1] for row in log[:-1]]
    drafter.config.confidence_temperatures = None
    again = collect_rounds(target, drafter, [{"input_ids": prompt}], 0.0, 40)
    np.testing.assert_allclose(again.logits, rounds.logits[: len(again)])
    assert rounds.seen(0).all()


def test_diagram(tmp_path):
    reliability_diagram({"0.0": (made_up_rounds(500, TRUTH), [1.0] * 4)}, tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"


def test_command(tmp_path, capsys):
    folder = tiny(tmp_path)
    drafter = make_drafter(make_target(eos_token_id=2))
    drafter.save_pretrained(tmp_path / "drafter")
    letters = "abcdefghijklmnop"
    prompts = write_lines(
        tmp_path / "p.jsonl", [{"turns": [letters[i % 12 : i % 12 + 2 + i // 12]]} for i in range(48)]
    )
    options = ["--target", str(folder), "--drafter", str(tmp_path / "drafter"), "--prompts", str(prompts)]
    assert cli.main(["calibrate", *options, "--max-new-tokens", "80", "--temperatures", "0", "0.7"]) == 0
    out = capsys.readouterr().out
    assert "ECE of a perfect predictor" in out and json.loads(out.splitlines()[-1]).keys() == {"0.0", "0.7"}
    loaded = DSparkModel.from_pretrained(tmp_path / "drafter")
    assert set(loaded.config.confidence_temperatures) == {"0.0", "0.7"}
    assert all(len(t) == 7 for t in loaded.config.confidence_temperatures.values())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters()))
    assert (tmp_path / "drafter" / "calibration.png").stat().st_size > 1000
    report = json.loads((tmp_path / "drafter" / "calibration.json").read_text())
    assert report["0.0"]["measured_on"]["prompts"] == 24
    assert cli.main(["calibrate", *options, "--num-prompts", "2", "--max-new-tokens", "8"]) == 1
    assert "too few" in capsys.readouterr().err


def test_acceptance_command(tmp_path, capsys):
    folder = tiny(tmp_path)
    drafter = make_drafter(make_target(eos_token_id=2), cost_table=FLAT_COSTS)
    drafter.save_pretrained(tmp_path / "drafter")
    prompts = write_lines(tmp_path / "abc.jsonl", [{"turns": ["hello"]}, {"turns": ["no"]}])
    options = ["--target", str(folder), "--drafter", str(tmp_path / "drafter"), "--prompts", str(prompts)]
    assert cli.main(["acceptance", *options, "--max-new-tokens", "20", "--json", str(tmp_path / "a.json")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == rows_of(write_lines(tmp_path / "x", [json.loads((tmp_path / "a.json").read_text())]))[0]
    figures = result["sets"]["abc"]["0.0"]
    assert figures["prompts"] == 2 and figures["rounds"] > 0 and figures["acceptance_length"] >= 1
    assert figures["offered_per_slot"][0] == figures["rounds"]
