"""The reference implementation's numbers: every recorded case, loaded as it lies and decoded with the fixed schedule.

Each folder of `tests/golden` holds a tiny target, a drafter in DeepSpec's format and what DeepSpec computed with them:
the text, every round's drafts, confidence logits and accepted counts, and the tensors of the first round.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from dspark.candidate_generator.draft_chain_dspark import DraftChain
from dspark.candidate_generator.taps_dspark import FeatureTaps
from dspark.modeling_dspark import DSparkModel


CASES = sorted(path.name for path in (Path(__file__).parent / "golden").glob("qwen3_*"))


class Case:
    """A recorded pair and what was recorded of it."""

    def __init__(self, name: str):
        folder = Path(__file__).parent / "golden" / name
        self.drafter_folder = folder / "drafter"
        self.target = AutoModelForCausalLM.from_pretrained(folder / "target")
        self.target.generation_config.eos_token_id = None  # the recorded rounds are not cut at an end
        self.drafter = DSparkModel.from_pretrained(self.drafter_folder)
        self.expected = json.loads((folder / "expected.json").read_text())
        self.tensors = load_file(folder / "expected.safetensors")
        self.prompt = torch.tensor([self.expected["prompt"]])

    def decode(self, new_tokens: int, **settings) -> list[int]:
        config = GenerationConfig(
            do_sample=False, dspark_schedule="fixed", dspark_log=True, max_new_tokens=new_tokens, **settings
        )
        return self.target.generate(self.prompt, assistant_model=self.drafter, generation_config=config)[0].tolist()

    def first_block(self) -> tuple[torch.Tensor, DraftChain]:
        """Features of the prompt and the first block, through the classes that decoding uses."""
        drafter, target = self.drafter, self.target
        link = drafter.link(target)
        with torch.no_grad(), FeatureTaps(link.layers, drafter.config.target_layer_ids, "cpu", drafter.dtype) as taps:
            target(self.prompt)
            features = taps.take()
            anchor = torch.tensor([[self.expected["rounds"][0]["anchor"]]])
            return features, DraftChain(drafter, link, anchor, features, drafter.new_cache())


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return Case(request.param)


def test_all_recorded_cases_are_here():
    assert CASES == ["qwen3_gated_conf_plain", "qwen3_rank0", "qwen3_rnn", "qwen3_vanilla"]


def test_first_round_tensors(case):
    features, chain = case.first_block()
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(features, case.tensors["context_features"], **close)
    torch.testing.assert_close(chain.hidden, case.tensors["hidden"], **close)
    torch.testing.assert_close(chain.base_logits, case.tensors["base_logits"], **close)
    with torch.no_grad():
        for slot, draft in enumerate(case.expected["rounds"][0]["draft"]):
            logits = chain.logits()
            torch.testing.assert_close(logits, case.tensors["draft_logits"][:, slot], **close)
            assert logits.argmax() == draft
            chain.push(torch.tensor([draft]))


def test_every_round(case):
    output, rounds = case.expected["output"], case.expected["rounds"]
    recorded = len(output) - len(case.expected["prompt"])
    # The recorded rounds know no length limit, ours are cut to what is left: so generate further than was recorded.
    text = case.decode(recorded + 2 * case.drafter.config.block_size)
    assert text[: len(output)] == output

    log = case.drafter.statistics.log
    assert len(log) >= len(rounds)
    for ours, theirs in zip(log, rounds):
        position, drafts, confidences, accepted = ours
        assert (position, drafts, accepted) == (theirs["start"], theirs["draft"], theirs["accepted"])
        assert text[position] == theirs["anchor"]
        if theirs["confidence_logits"] is None:
            assert case.drafter.confidence_head is None
        else:
            expected = torch.tensor(theirs["confidence_logits"], dtype=torch.float64).sigmoid()
            torch.testing.assert_close(torch.tensor(confidences, dtype=torch.float64), expected, rtol=0, atol=1e-5)


def test_text_ends_where_the_recording_ends(case):
    output = case.expected["output"]
    assert case.decode(len(output) - len(case.expected["prompt"])) == output
    assert case.drafter.statistics.drafted > 0


def test_import_keeps_every_tensor_of_the_file(case):
    """What the file holds is what the model holds: nothing is dropped, nothing left at its random start."""
    file = load_file(case.drafter_folder / "model.safetensors")
    state = case.drafter.state_dict()
    assert state.keys() == file.keys()
    assert all(torch.equal(state[name], file[name]) for name in file)


def test_embeddings_equal_to_the_targets_are_dropped(case, tmp_path, caplog):
    assert case.drafter.embed_tokens is not None and case.drafter.lm_head is not None
    case.drafter.link(case.target)
    assert case.drafter.embed_tokens is None and case.drafter.lm_head is None
    assert not caplog.records

    case.drafter.save_pretrained(tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "model.safetensors").keys()
    again = DSparkModel.from_pretrained(tmp_path)
    assert again.config.own_embeddings is False
    case.drafter = again
    _, chain = case.first_block()
    torch.testing.assert_close(chain.base_logits, case.tensors["base_logits"], rtol=0, atol=1e-4)


def test_saved_before_any_target_keeps_them(tmp_path):
    case = Case("qwen3_vanilla")
    case.drafter.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(again.embed_tokens.weight, case.drafter.embed_tokens.weight)
    assert torch.equal(again.lm_head.weight, case.drafter.lm_head.weight)


@pytest.mark.parametrize("which", ["embed_tokens", "lm_head"])
def test_embeddings_that_differ_are_kept_with_one_warning(which, caplog):
    case = Case("qwen3_vanilla")
    plain = case.target.generate(case.prompt, max_new_tokens=20, do_sample=False)[0].tolist()
    with torch.no_grad():
        getattr(case.drafter, which).weight.mul_(-1.0)
    _, chain = case.first_block()
    own = getattr(case.drafter, which)
    assert own is not None
    # They are what is drafted with, not decoration.
    assert not torch.allclose(chain.base_logits, case.tensors["base_logits"], atol=1e-2)
    assert case.decode(20) == plain and case.drafter.statistics.drafted > 0
    assert getattr(case.drafter, which) is own
    warned = [r for r in caplog.records if "differ from the target's" in r.message]
    assert len(warned) == 1
