"""The drafter's parts against naive transcriptions of the paper's equations, and the shapes it may have."""

import copy

import pytest
import torch
from conftest import VOCAB, config, make_drafter, make_target, plain, scripted
from safetensors.torch import load_file

from dspark.candidate_generator import DSparkCandidateGenerator
from dspark.candidate_generator.draft_chain_dspark import DraftChain
from dspark.candidate_generator.taps_dspark import FeatureTaps
from dspark.modeling_dspark import DSparkConfig, DSparkModel
from dspark.modeling_dspark.heads_dspark import ConfidenceHead, MarkovHead


CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the heads, slot by slot as eq. 5-7 are written


def head_config(**values) -> DSparkConfig:
    return DSparkConfig(vocab_size=20, hidden_size=12, num_attention_heads=2, block_size=5, markov_rank=6, **values)


def naive_biases(head: MarkovHead, previous: list[int], hidden: torch.Tensor) -> list[torch.Tensor]:
    """`B_k` for k = 1..G (eq. 5, 6): previous tokens `x_0..x_{G-1}`, hidden states `[G, H]`, one vector at a time."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight.T
    biases, s = [], torch.zeros(head.rank)
    for x, h in zip(previous, hidden):
        if head.kind == "vanilla":
            biases.append(w1[x] @ w2)
        elif head.kind == "gated":
            gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, w1[x]]) + head.gate_proj.bias)
            biases.append((gate * w1[x]) @ w2)
        else:
            z = torch.cat([s, w1[x], h])
            w_g, w_c, w_o = head.joint_proj.weight.split(head.rank)
            b_g, b_c, b_o = head.joint_proj.bias.split(head.rank)
            keep = torch.sigmoid(w_g @ z + b_g)
            s = keep * s + (1 - keep) * torch.tanh(w_c @ z + b_c)
            biases.append(torch.tanh(w_o @ z + b_o) @ w2)
    return biases


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_sequential_head_is_its_equation(kind):
    torch.manual_seed(0)
    head = MarkovHead(head_config(markov_head_type=kind, draft_vocab_size=9))
    hidden, previous = randn(3, 5, 12), torch.randint(0, 20, (3, 5))
    state = None
    for slot in range(5):
        bias, state = head(hidden[:, slot], head.embed(previous[:, slot]), state)
        for row in range(3):
            expected = naive_biases(head, previous[row].tolist(), hidden[row])[slot]
            torch.testing.assert_close(bias[row], expected, **CLOSE)
    if kind != "rnn":  # without a state, all slots can be computed at once
        assert torch.equal(head(hidden, head.embed(previous))[0][:, -1], bias)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_head_is_eq_7(with_markov):
    torch.manual_seed(0)
    head = ConfidenceHead(head_config(confidence_head_with_markov=with_markov))
    hidden, embedding = randn(3, 5, 12), randn(3, 5, 6, seed=1)
    logits = head(hidden, embedding)
    w, b = head.proj.weight[0], head.proj.bias[0]
    for row in range(3):
        for slot in range(5):
            h, e = hidden[row, slot], embedding[row, slot]
            expected = w @ (torch.cat([h, e]) if with_markov else h) + b
            torch.testing.assert_close(logits[row, slot], expected, **CLOSE)
    assert head.bfloat16()(hidden.bfloat16(), embedding.bfloat16()).dtype == torch.float32


# ---- the backbone, one query at a time as eq. 2-3 are written


def rms(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turn(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one head: the pair (i, i + D/2) turns by `position / theta^(2i / D)`."""
    half = len(vector) // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) * 2 / len(vector))
    a, b = vector[:half].double(), vector[half:].double()
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]).float()


def naive_backbone(drafter: DSparkModel, block: torch.Tensor, features: torch.Tensor, start: int = 0) -> torch.Tensor:
    """`h_1..h_G` `[G, H]` for a block `[G, H]` behind context features `[S, T * H]` at positions `start, ..`."""
    c = drafter.config
    context = rms(features @ drafter.fc.weight.T, drafter.hidden_norm.weight, c.rms_norm_eps)
    positions = list(range(start, start + len(context) + len(block)))
    x = block
    for index, layer in enumerate(drafter.layers):
        attention, mlp = layer.self_attn, layer.mlp
        normed = rms(x, layer.input_layernorm.weight, c.rms_norm_eps)
        injected = torch.cat([context, normed])

        def heads(projection, states, norm=None, at=None):
            out = projection(states).view(len(states), -1, c.head_dim)
            if norm is not None and c.use_qk_norm:
                out = rms(out, norm.weight, c.rms_norm_eps)
            if at is None:
                return out
            theta = c.rope_parameters["rope_theta"]
            return torch.stack([torch.stack([turn(h, p, theta) for h in row]) for row, p in zip(out, at)])

        queries = heads(attention.q_proj, normed, attention.q_norm, positions[len(context) :])
        keys = heads(attention.k_proj, injected, attention.k_norm, positions)
        values = heads(attention.v_proj, injected)
        rows = []
        for slot, query in enumerate(queries):
            own = positions[len(context) + slot]
            visible = list(range(len(positions)))
            if c.layer_types[index] == "sliding_attention":
                visible = [i for i in visible if own - positions[i] < c.sliding_window]
            if c.is_causal:
                visible = [i for i in visible if positions[i] <= own]
            out = []
            for head, q in enumerate(query):
                group = head // (c.num_attention_heads // c.num_key_value_heads)
                weights = torch.softmax(keys[visible, group] @ q / c.head_dim**0.5, dim=-1)
                out.append(weights @ values[visible, group])
            rows.append(torch.cat(out))
        x = x + attention.o_proj(torch.stack(rows))
        normed = rms(x, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        gated = torch.nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
        x = x + mlp.down_proj(gated)
    return rms(x, drafter.norm.weight, c.rms_norm_eps)


SHAPES = {
    "plain": {},
    "head_dim": {"head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no_qk_norm": {"use_qk_norm": False},
    "causal": {"is_causal": True},
    "sliding": {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2},
    "mixed": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "sliding_causal": {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2, "is_causal": True},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}


def random_drafter(target, **values) -> DSparkModel:
    """A drafter whose every parameter is random: norms and biases too, which start at one and zero."""
    drafter = make_drafter(target, **values)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.copy_(0.5 + torch.rand_like(parameter))
    return drafter


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backbone_is_its_equation(target, shape, attention):
    drafter = random_drafter(target, **SHAPES[shape])
    drafter.set_attn_implementation(attention)
    block, features = randn(1, 7, 32), randn(1, 11, 64, seed=1)
    out = drafter(block, features).last_hidden_state
    torch.testing.assert_close(out[0], naive_backbone(drafter, block[0], features[0]), **CLOSE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", ["plain", "sliding", "mixed", "sliding_causal"])
def test_context_may_come_in_pieces(target, shape, attention):
    """Through the cache, round by round, the last block sees what it would see of the whole context at once."""
    drafter = random_drafter(target, **SHAPES[shape])
    drafter.set_attn_implementation(attention)
    features, cache = randn(1, 21, 64, seed=1), drafter.new_cache()
    for start, stop in ((0, 9), (9, 10), (10, 13), (13, 20), (20, 21)):
        block = randn(1, 7, 32, seed=stop)
        out = drafter(block, features[:, start:stop], cache=cache).last_hidden_state
        torch.testing.assert_close(out[0], naive_backbone(drafter, block[0], features[0, :stop]), **CLOSE)
    assert cache.get_seq_length() == 21  # the blocks never entered it
    for layer, kind in zip(cache.layers, drafter.config.layer_types):
        assert layer.keys.shape[2] == (21 if kind == "full_attention" else drafter.config.sliding_window - 1)
    # A block drafted again without new context, as after a rejected first draft, sees the cache alone.
    assert torch.equal(drafter(block, cache=cache).last_hidden_state, drafter(block, cache=cache).last_hidden_state)
    torch.testing.assert_close(drafter(block, cache=cache).last_hidden_state, out, **CLOSE)


def test_a_block_without_context_sees_itself(target):
    drafter = random_drafter(target)
    block = randn(1, 7, 32)
    torch.testing.assert_close(drafter(block).last_hidden_state[0], naive_backbone(drafter, block[0], randn(0, 64)))


def test_default_positions_are_the_explicit_ones(target):
    drafter = make_drafter(target)
    block, features, cache = randn(1, 7, 32), randn(1, 11, 64, seed=1), drafter.new_cache()
    drafter(block, features[:, :6], cache=cache)
    default = drafter(block, features[:, 6:], cache=copy.deepcopy(cache)).last_hidden_state
    at = {"context_position_ids": torch.arange(6, 11)[None], "position_ids": torch.arange(11, 18)[None]}
    assert torch.equal(drafter(block, features[:, 6:], cache=copy.deepcopy(cache), **at).last_hidden_state, default)
    # A caller who names the context's positions only: the block follows them.
    at = {"context_position_ids": torch.arange(20, 31)[None]}
    both = {**at, "position_ids": torch.arange(31, 38)[None]}
    assert torch.equal(
        drafter(block, features, **at).last_hidden_state, drafter(block, features, **both).last_hidden_state
    )


def test_only_distances_between_positions_matter(target):
    drafter = random_drafter(target)
    block, features = randn(1, 7, 32), randn(1, 11, 64, seed=1)

    def out(shift, gap=0):
        context = torch.arange(shift, shift + 11)[None]
        slots = torch.arange(shift + gap + 11, shift + gap + 18)[None]
        return drafter(block, features, context_position_ids=context, position_ids=slots).last_hidden_state

    torch.testing.assert_close(out(400), out(0), rtol=0, atol=1e-4)
    assert not torch.allclose(out(0, gap=3), out(0), atol=1e-3)


def test_a_callers_mask_hides_context(target):
    """A boolean mask over context and block, as training packs it: hidden context is absent context."""
    drafter = random_drafter(target)
    block, features = randn(1, 7, 32), randn(1, 11, 64, seed=1)
    visible = torch.ones(1, 1, 7, 18, dtype=torch.bool)
    visible[..., :4] = False
    positions = {"position_ids": torch.arange(11, 18)[None]}
    short = drafter(block, features[:, 4:], context_position_ids=torch.arange(4, 11)[None], **positions)
    for attention in ("sdpa", "eager"):
        drafter.set_attn_implementation(attention)
        masked = drafter(block, features, attention_mask=visible, **positions)
        torch.testing.assert_close(masked.last_hidden_state, short.last_hidden_state, **CLOSE)


# ---- a block through all parts


def chain_of(drafter, target, seed=3) -> DraftChain:
    anchor = torch.tensor([[17]])
    return DraftChain(drafter, drafter.link(target), anchor, randn(1, 11, 64, seed=seed), drafter.new_cache())


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_chain_is_eq_4(target, kind):
    """Base logits plus bias, slot k conditioned on the draft of slot k-1 and slot 0 on the anchor."""
    drafter = random_drafter(target, markov_head_type=kind)
    chain = chain_of(drafter, target)
    embedding = target.get_input_embeddings().weight
    block = embedding[torch.tensor([17] + [drafter.config.mask_token_id] * 6)]
    hidden = naive_backbone(drafter, block, randn(1, 11, 64, seed=3)[0])
    path = [17, 4, 60, 4, 33, 2, 9]
    biases = naive_biases(drafter.markov_head, path, hidden)
    for slot, draft in enumerate([*path[1:], 5]):
        expected = target.lm_head(hidden[slot]) + biases[slot]
        torch.testing.assert_close(chain.logits()[0], expected, rtol=0, atol=1e-4)
        features = torch.cat([hidden[slot], drafter.markov_head.markov_w1.weight[path[slot]]])
        torch.testing.assert_close(chain.confidence_logit()[0], drafter.confidence_head.proj(features)[0], **CLOSE)
        assert chain.push(torch.tensor([draft])) == draft


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_reduced_vocabulary_is_the_full_one_restricted(target, kind):
    full = random_drafter(target, markov_head_type=kind)
    small = random_drafter(target, markov_head_type=kind, draft_vocab_size=40)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:40].sort().values
    state = full.state_dict()
    state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][kept]
    small.load_state_dict({**state, "d2t": kept - torch.arange(40)})
    assert torch.equal(small.kept_ids, kept)
    one, other = chain_of(full, target), chain_of(small, target)
    for _ in range(7):
        torch.testing.assert_close(other.logits(), one.logits()[:, kept], **CLOSE)
        torch.testing.assert_close(other.confidence_logit(), one.confidence_logit(), **CLOSE)
        draft = other.logits().argmax(-1)
        token = other.push(draft)
        assert token == kept[draft]
        one.push(token)


def test_an_anchor_may_be_a_view(target):
    """A slice of longer ids has strides of its own."""
    drafter = make_drafter(target)
    wide = torch.tensor([[1, 17, 2, 30], [3, 40, 4, 50]])
    one = DraftChain(drafter, drafter.link(target), wide.T[1:2].T[:1], randn(1, 4, 64), drafter.new_cache())
    other = DraftChain(drafter, drafter.link(target), torch.tensor([[17]]), randn(1, 4, 64), drafter.new_cache())
    assert torch.equal(one.logits(), other.logits())


def test_confidence_temperatures_of_the_nearest_regime(target, prompt):
    """They divide the logits of the confidence, slot by slot, and change no draft."""
    regimes = {"0.0": [2.0, 1.0, 0.5, 1.0, 1.0, 4.0, 1.0], "1.0": [3.0] * 7}
    drafter = make_drafter(target)
    assert drafter.confidence_temperatures(0.7) == [1.0] * 7
    calibrated = make_drafter(target, confidence_temperatures=regimes)
    assert [calibrated.confidence_temperatures(t) for t in (0.0, 0.3, 0.7, 1.0, 2.0)] == (
        [regimes["0.0"]] * 2 + [regimes["1.0"]] * 3
    )
    logs = []
    for made in (drafter, calibrated):
        settings = config(max_new_tokens=16, dspark_schedule="fixed", dspark_log=True)
        target.generate(prompt, assistant_model=made, generation_config=settings)
        logs.append(made.statistics.log)
    for (_, drafts, raw, _), (_, same_drafts, scaled, _) in zip(*logs):
        assert drafts == same_drafts
        logits = torch.logit(torch.tensor(raw, dtype=torch.float64))
        expected = torch.sigmoid(logits / torch.tensor(regimes["0.0"])[: len(raw)])
        torch.testing.assert_close(torch.tensor(scaled, dtype=torch.float64), expected, **CLOSE)


HEADS = {
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank0": {"markov_rank": 0},
    "plain_confidence": {"confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False},
    "rank0_no_confidence": {"markov_rank": 0, "enable_confidence_head": False},
    "rnn_no_confidence": {"markov_head_type": "rnn", "enable_confidence_head": False},
    "one_layer": {"num_hidden_layers": 1},
    "embedding_tap": {"target_layer_ids": [-1, 1]},
    "one_tap": {"target_layer_ids": [1]},
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
def test_every_shape_decodes_saves_and_loads(target, prompt, tmp_path, heads, schedule):
    drafter = make_drafter(target, **HEADS[heads])
    settings = config(max_new_tokens=24, dspark_schedule=schedule)
    expected = plain(target, prompt, max_new_tokens=24)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, generation_config=settings), expected)
    before = drafter.statistics
    assert before.drafted > 0
    drafter.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert again.config._attn_implementation == "eager"
    again.cost_table = drafter.cost_table
    assert torch.equal(target.generate(prompt, assistant_model=again, generation_config=settings), expected)
    assert (again.statistics.accepted, again.statistics.lengths) == (before.accepted, before.lengths)


@pytest.mark.parametrize(("drafter_dtype", "target_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_drafter_and_target_of_different_dtypes(prompt, drafter_dtype, target_dtype):
    target = make_target("llama").to(getattr(torch, target_dtype))
    drafter = make_drafter(target).to(getattr(torch, drafter_dtype))
    chain = chain_of(drafter, target)
    assert chain.hidden.dtype == drafter.dtype and chain.logits().dtype == torch.float32
    settings = config(max_new_tokens=24, dspark_schedule="fixed", dspark_log=True)
    out = target.generate(prompt, assistant_model=drafter, generation_config=settings)
    assert drafter.statistics.drafted > 0 and out.shape[1] == 33
    assert all(0 <= c <= 1 for _, _, confidences, _ in drafter.statistics.log for c in confidences)
    if target_dtype == "float32":
        assert torch.equal(out, plain(target, prompt, max_new_tokens=24))


def test_a_tied_targets_drafter_saves_its_own_tensors_only(prompt, tmp_path):
    target = make_target("llama", tie_word_embeddings=True)
    drafter = make_drafter(target, draft_vocab_size=48)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=8))
    assert not drafter.config.tie_word_embeddings
    drafter.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    assert file.keys() == {name for name, _ in drafter.named_parameters()} | {"d2t"}
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in before.items())
    again = DSparkModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in drafter.state_dict().items())
    assert not any(m is target for m in drafter.modules())


# ---- the draft cache of a call


@pytest.fixture
def last_generator(monkeypatch) -> list[DSparkCandidateGenerator]:
    """The candidate generators of the test's calls, the last one last."""
    made, init = [], DSparkCandidateGenerator.__init__
    monkeypatch.setattr(
        DSparkCandidateGenerator,
        "__init__",
        lambda self, *args, **kwargs: (made.append(self), init(self, *args, **kwargs))[1],
    )
    return made


@pytest.mark.parametrize("shape", ["plain", "sliding"])
@pytest.mark.parametrize("kind", ["alternating", "never", "random"])
@pytest.mark.parametrize("schedule", ["fixed", "throughput"])
def test_draft_cache_is_one_rebuilt_from_the_text(target, prompt, last_generator, kind, shape, schedule):
    """Nothing of a draft stays in it, rejected or accepted, and resting rounds leave no hole."""
    values = SHAPES[shape]
    drafter = make_drafter(target, **values) if kind == "random" else scripted(target, prompt, kind, 48, **values)
    text = target.generate(
        prompt, assistant_model=drafter, generation_config=config(max_new_tokens=48, dspark_schedule=schedule)
    )
    generator = last_generator[-1]
    assert drafter.statistics.drafted > 0
    if schedule == "throughput" and kind == "never":
        assert drafter.statistics.rests["drafting did not pay"] > 0
    length = generator.cache.get_seq_length()
    pending = sum(features.shape[1] for features, _ in generator._pending)
    assert prompt.shape[1] <= length < text.shape[1]
    assert length + pending == generator._next_position

    link, rebuilt = drafter.link(target), drafter.new_cache()
    with FeatureTaps(link.layers, drafter.config.target_layer_ids, "cpu", drafter.dtype) as taps:
        target(text)
        features = taps.take()[:, :length]
    block = link.embed(drafter, torch.zeros(1, 7, dtype=torch.long))
    drafter(block, features, cache=rebuilt, position_ids=torch.arange(length, length + 7)[None])
    for ours, theirs in zip(generator.cache.layers, rebuilt.layers):
        kept = ours.keys.shape[2]
        torch.testing.assert_close(ours.keys, theirs.keys[:, :, -kept:], **CLOSE)
        torch.testing.assert_close(ours.values, theirs.values[:, :, -kept:], **CLOSE)
