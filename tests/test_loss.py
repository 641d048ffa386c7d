"""The training loss against the reference implementation's numbers and against a naive loss in fp64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark.candidate_generator.draft_chain_dspark import DraftChain
from dspark.modeling_dspark import DSparkModel
from dspark.training import Blocks, DSparkTrainer, DSparkTrainingArguments
from dspark.training.metrics import Metrics, flatten
from dspark.training.trainer import draft_hidden, head_outputs


GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in (GOLDEN / "loss").glob("*.json"))


def make_trainer(drafter, target, tmp_path, **args) -> DSparkTrainer:
    args = DSparkTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **args)
    return DSparkTrainer(drafter, args, target=target)


def random_rows(batch: int = 3, length: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[B, S]` and masks of which some turns are the target's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (batch, length), generator=generator)
    masks = torch.zeros_like(ids)
    for row, (begin, end, again) in enumerate(((5, 20, 22), (9, 13, 15), (3, 24, 24))[:batch]):
        masks[row, begin:end] = 1
        masks[row, again:] = 1
    return ids, masks


@pytest.mark.parametrize("name", CASES)
def test_reference(name, tmp_path):
    """DeepSpec's terms, logits, supervised slots to 1e-5 and gradient norms to 1e-4."""
    case = json.loads((GOLDEN / "loss" / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / "loss" / f"{name}.safetensors")
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / name / "target")
    drafter = DSparkModel.from_pretrained(GOLDEN / name / "drafter")
    trainer = make_trainer(drafter, target, tmp_path, logits_per_chunk=200, loss_gamma=case["loss_decay_gamma"])
    ids, masks = torch.tensor(case["input_ids"]), torch.tensor(case["loss_mask"])
    anchors = [
        np.array([p for p, keep in zip(*row) if keep]) for row in zip(case["anchor_positions"], case["anchor_keep"])
    ]
    blocks = Blocks.of(masks, anchors, 7)
    supervised = torch.tensor(case["supervised"]).bool()
    assert torch.equal(blocks.supervised, supervised) and supervised.any()

    metrics = Metrics()
    loss = trainer.loss_of(drafter, ids, blocks, trainer.denominators(blocks, ids), metrics)
    loss.backward()
    seen = flatten(metrics.reduce(trainer.accelerator))
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    for ours, theirs in (("loss_ce", "ce"), ("loss_tv", "tv"), ("loss_confidence", "conf")):
        if case[theirs] is None:
            assert ours not in seen
        else:
            assert seen[ours] == pytest.approx(case[theirs], abs=1e-5)
    assert trainer.denominators(blocks, ids)[1].item() == pytest.approx(case["weight_sum"], abs=1e-5)
    gradients = {n: p.grad.norm().item() for n, p in drafter.named_parameters() if p.grad is not None}
    assert gradients.keys() == case["gradient_norms"].keys()
    for key, norm in case["gradient_norms"].items():
        assert gradients[key] == pytest.approx(norm, abs=1e-4), key

    with torch.no_grad():
        link = trainer.frozen.link
        features, states = trainer.frozen.run(ids, ids.device)
        hidden = draft_hidden(drafter, drafter, link, features, ids, blocks)
        head, confidence = head_outputs(drafter, hidden, blocks.tokens(ids, 0))
        logits = trainer._draft_logits(hidden, head)
        rows = torch.arange(len(ids))[:, None, None]
        aligned = link.target_logits(states)[rows, blocks.slots.clamp(max=ids.shape[1] - 1)]
    for ours, theirs in (
        (logits, tensors["draft_logits"]),
        (aligned, tensors["aligned_target_logits"]),
        (confidence, tensors.get("confidence_logits")),
    ):
        if theirs is not None:
            torch.testing.assert_close(ours[supervised], theirs[supervised], atol=1e-5, rtol=1e-5)


def naive_loss(drafter, target, ids, masks, anchors, gamma, alphas) -> tuple[float, float, float]:
    """Eq. 8-12 written out block by block with the classes of decoding, in fp64. No chunks, no block attention."""
    link = drafter.link(target)
    size = drafter.config.block_size
    sums = {"ce": 0.0, "tv": 0.0, "conf": 0.0}
    inside_weight = all_weight = 0.0
    kept = drafter.kept_ids
    kept = torch.arange(drafter.config.vocab_size) if kept is None else kept
    for row, own in enumerate(anchors):
        out = target(ids[row : row + 1], output_hidden_states=True)
        features = torch.cat([out.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        for p in own:
            p = int(p)
            chain = DraftChain(
                drafter, link, ids[row : row + 1, p : p + 1], features[:, :p], None,
                context_position_ids=torch.arange(p)[None], position_ids=torch.arange(p, p + size)[None],
            )  # fmt: skip
            for k in range(size):
                label = p + k + 1
                if label >= ids.shape[1] or not masks[row, label]:
                    break
                weight = float(np.exp(-k / gamma))
                q = chain.logits()[0].double().softmax(-1)
                law = out.logits[0, label - 1].double().softmax(-1)
                full = torch.zeros_like(law).index_put((kept,), q)
                tv = (full - law).abs().sum()
                sums["tv"] = sums["tv"] + weight * tv
                all_weight += weight
                token = int(ids[row, label])
                if token in kept.tolist():
                    sums["ce"] = sums["ce"] - weight * q[kept.tolist().index(token)].log()
                    inside_weight += weight
                if drafter.confidence_head is not None:
                    c = chain.confidence_logit()[0].double()
                    star = (1 - tv / 2).detach()
                    bce = -(star * torch.nn.functional.logsigmoid(c) + (1 - star) * torch.nn.functional.logsigmoid(-c))
                    sums["conf"] = sums["conf"] + weight * bce
                chain._state = getattr(chain, "_next_state", None)
                chain._embed(ids[row, label][None])  # teacher-forced: the true token goes on, whatever was drafted
                chain.slot += 1
    return (
        alphas[0] * sums["ce"] / max(inside_weight, 1e-12)
        + alphas[1] * sums["tv"] / all_weight
        + alphas[2] * sums["conf"] / all_weight
    )


SHAPES = {
    "vanilla": {},
    "rnn": {"markov_head_type": "rnn"},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "no heads": {"markov_rank": 0, "enable_confidence_head": False},
    "reduced": {"draft_vocab_size": 20},
    "reduced rnn": {"draft_vocab_size": 20, "markov_head_type": "rnn"},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
}


@pytest.mark.parametrize("chunk", [1, 150, 10**9], ids=["slot by slot", "some", "whole"])
@pytest.mark.parametrize("shape", SHAPES)
def test_naive(shape, chunk, tmp_path):
    """Loss and every gradient equal a naive loss in fp64, for all heads, vocabularies, masks and chunk sizes."""
    target = make_target().double()
    drafter = make_drafter(target, block_size=4, **SHAPES[shape]).double()
    if drafter.config.draft_vocab_size:
        kept = torch.arange(64)[torch.randperm(64, generator=torch.Generator().manual_seed(3))[:20]].sort().values
        drafter.d2t.copy_(kept - torch.arange(20))
    ids, masks = random_rows()
    trainer = make_trainer(drafter, target, tmp_path, logits_per_chunk=chunk, num_anchors=5)
    batch = {"input_ids": ids, "assistant_masks": masks, "lengths": torch.full((3,), 24)}
    blocks = trainer.blocks_of(batch, epoch=0)
    anchors = [row[keep].numpy() for row, keep in zip(blocks.anchors, blocks.supervised[..., 0])]
    if shape.startswith("reduced"):
        labels = blocks.tokens(ids, 1)[blocks.supervised]
        assert 0 < torch.isin(labels, drafter.kept_ids).sum() < len(labels)

    expected = naive_loss(drafter, target, ids, masks, anchors, 4.0, (0.1, 0.9, 1.0))
    expected.backward()
    naive = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    target.zero_grad()
    loss = trainer.loss_of(drafter, ids, blocks, trainer.denominators(blocks, ids), Metrics())
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert all(p.grad is None for p in target.parameters())
    ours = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
    assert ours.keys() == naive.keys()
    for name, gradient in naive.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_target_is_left_alone(tmp_path):
    """No gradient, no write, no hook that stays; labels without weight change nothing."""
    target, before = make_target(), None
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter = make_drafter(target)
    trainer = make_trainer(drafter, target, tmp_path)
    ids, masks = random_rows()
    batch = {"input_ids": ids, "assistant_masks": masks, "lengths": torch.full((3,), 24)}
    trainer.compute_loss(drafter, batch).backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not any(layer._forward_hooks for layer in target.model.layers)
    assert all(p.grad is not None for p in drafter.parameters())
    assert drafter.config._attn_implementation == "sdpa"


def test_a_target_whose_head_does_more_is_refused(tmp_path):
    target = make_target()
    drafter = make_drafter(target)
    original = target.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    target.forward = forward
    with pytest.raises(ValueError, match="not its LM head on its decoder's output"):
        make_trainer(drafter, target, tmp_path)


def test_extreme_logits(tmp_path):
    """Laws that put all mass on different tokens: finite loss and gradients."""
    target = make_target(spread=40.0)
    drafter = make_drafter(target, initializer_range=3.0)
    trainer = make_trainer(drafter, target, tmp_path)
    ids, masks = random_rows()
    loss = trainer.compute_loss(drafter, {"input_ids": ids, "assistant_masks": masks, "lengths": torch.full((3,), 24)})
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in drafter.parameters())
