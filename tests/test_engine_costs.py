"""The prices a schedule reckons with: kept, read, refused, and what lies between their points."""

import pytest

from dspark.candidate_generator import CostTable
from dspark.candidate_generator.engine_costs_dspark import EngineCosts


def test_costs_survive_a_file(tmp_path):
    costs = EngineCosts({64: 2.0, 1: 1.0, 8: 1.5}, {7: 0.25, 1: 0.125}, read=1e-6, cell=1e-9, key={"device": "cpu"})
    costs.save(tmp_path / "folder" / "costs.json")
    loaded = EngineCosts.load(tmp_path / "folder" / "costs.json")
    assert vars(loaded).keys() == vars(costs).keys()
    for name in ("verify", "draft", "read", "cell", "key"):
        assert getattr(loaded, name) == getattr(costs, name)
    assert list(loaded.verify) == [1, 8, 64]  # by number, though JSON's keys are strings
    assert str(loaded) == str(costs) and "64: 2000.0" in str(costs)


DAMAGED = {
    "empty": "",
    "cut": '{"verify": {"1": 1.0',
    "a list": "[1, 2]",
    "a number": "7",
    "no draft": '{"verify": {"1": 1.0}, "read": 0, "cell": 0, "key": {}}',
    "a word": '{"verify": {"1": "fast"}, "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "a list of costs": '{"verify": [1, 2], "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "nothing": '{"verify": {}, "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "null": '{"verify": {"1": null}, "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "negative": '{"verify": {"1": -1.0}, "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "not a number": '{"verify": {"1": NaN}, "draft": {"1": 1}, "read": 0, "cell": 0, "key": {}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(DAMAGED[name])
    with pytest.raises(ValueError, match="costs.json holds no engine costs"):
        EngineCosts.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verify": {}},
        {"draft": {}},
        {"verify": {1: 0.0}},
        {"verify": {1: float("nan")}},
        {"verify": {1: float("inf")}},
        {"draft": {1: -0.1}},
        {"read": -1e-9},
        {"cell": float("nan")},
    ],
)
def test_costs_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="`verify`"):
        EngineCosts(**{"verify": {1: 1.0}, "draft": {1: 0.0}, **wrong})


def test_costs_are_linear_between_the_points_and_never_fall():
    costs = EngineCosts({2: 1.0, 4: 2.0, 8: 1.5, 16: 6.0}, {1: 0.0, 9: 0.8}, read=0.001, cell=0.0001)
    for tokens, seconds in (
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
        (8, 2.0),
        (12, 4.0),
        (16, 6.0),
        (20, 8.0),
    ):
        assert costs.verify_seconds(tokens) == pytest.approx(seconds)
    assert costs.verify_seconds(1000) == pytest.approx(6.0 + 984 * 0.5)  # beyond what was filled before
    assert costs.verify_seconds(4, 3, 5, 10) == pytest.approx(2.0 + 3 * 10 * (0.001 + 0.0001 * 5))
    assert costs.draft_seconds(0) == 0 and costs.draft_seconds(5) == pytest.approx(0.4)
    assert costs.by_tokens(17)[:17].tolist() == pytest.approx([costs.verify_seconds(n) for n in range(17)])


def test_a_table_for_one_request_speaks_for_many():
    table = CostTable({32: {1: 1.0, 8: 1.5}, 1024: {1: 3.0, 8: 4.0}}, {32: 0.25, 1024: 0.5})
    costs = EngineCosts.from_table(table)
    assert costs.verify == {1: 1.0, 8: 1.5}
    assert costs.draft_seconds(1) == costs.draft_seconds(100) == 0.25
    assert costs.verify_seconds(8, 8, 4, 1000) == 1.5  # it knows nothing of contexts
