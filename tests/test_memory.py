"""What decoding keeps, and what it leaves behind: bytes counted by hand against what is alive."""

import gc
import itertools
import weakref

import pytest
import torch
from conftest import VOCAB, config, make_drafter, make_target, plain, scripted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dspark.candidate_generator.cost_table_dspark import cache_argument


FP32 = 4  # bytes
FIXED = {"dspark_schedule": "fixed"}


def text_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


class PeakBytes(TorchDispatchMode):
    """Most bytes of tensor storage that operations made and that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage) -> None:
        key = storage._cdata
        if key not in self.known:
            size = storage.nbytes()
            self.known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size) -> None:
        self.known.discard(key)
        self.alive -= size


def test_long_prompt_keeps_the_taps_only():
    """A prompt of 4,000 tokens, 8 layers, 2 of them tapped: features of 2 layers are kept, never of 8."""
    length, layers, taps = 4000, 8, [0, 2]
    target = make_target(num_hidden_layers=layers, max_position_embeddings=2 * length)
    drafter = make_drafter(target, target_layer_ids=taps, num_hidden_layers=1)
    prompt, settings = text_of(length), config(max_new_tokens=6, **FIXED)
    one_layer = length * target.config.hidden_size * FP32

    peaks = []
    for assistant in ({}, {"assistant_model": drafter}):
        gc.collect()
        with PeakBytes() as watch:
            target.generate(prompt, generation_config=settings, **assistant)
        peaks.append(watch.peak)
    assert drafter.statistics.drafted > 0
    assert drafter.statistics.feature_bytes == len(taps) * one_layer
    assert peaks[0] > layers * one_layer  # the watch sees: the target's cache alone is one such unit a layer
    assert peaks[1] - peaks[0] < (len(taps) + 1) * one_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feature_bytes_are_stated(dtype):
    target = make_target()
    drafter = make_drafter(target, target_layer_ids=[-1, 0, 2]).to(dtype)
    target.generate(text_of(50), assistant_model=drafter, generation_config=config(max_new_tokens=9, **FIXED))
    assert drafter.statistics.drafted > 0
    assert drafter.statistics.feature_bytes == 50 * 3 * target.config.hidden_size * dtype.itemsize


class Abort(Exception):
    """Raised by the user's own code in the middle of a call."""


class At:
    """Counts down to `error`."""

    def __init__(self, turn: int, error):
        self.left, self.error = turn, error

    def tick(self, *_):
        self.left -= 1
        if self.left == 0:
            raise self.error


class AbortingCriterion(At, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(1, dtype=torch.bool)


class AbortingProcessor(At, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.tick()
        return scores


class AbortingStreamer(At, BaseStreamer):
    def put(self, value):
        self.tick()

    def end(self):
        pass


def abort(target, drafter, prompt, where: str, turn: int, settings: GenerationConfig, **arguments) -> None:
    """One call that ends in an exception raised at the given place, when it is reached for the `turn`-th time."""
    hook, error = None, Abort
    if where == "criterion":
        arguments["stopping_criteria"] = StoppingCriteriaList([AbortingCriterion(turn, Abort)])
    elif where == "processor":
        arguments["logits_processor"] = LogitsProcessorList([AbortingProcessor(turn, Abort)])
    elif where == "streamer":
        arguments["streamer"] = AbortingStreamer(turn, Abort)
    else:  # control-C in the middle of a forward
        error = KeyboardInterrupt
        layer = target.model.layers[1] if where == "target" else drafter.layers[1]
        hook = layer.register_forward_hook(At(turn, KeyboardInterrupt).tick)
    try:
        with pytest.raises(error):
            target.generate(prompt, assistant_model=drafter, generation_config=settings, **arguments)
    finally:
        if hook is not None:
            hook.remove()


def finish(target, drafter, prompt, settings: GenerationConfig, streamed: bool = False) -> None:
    """One call that ends as it should."""
    streamer = AbortingStreamer(10**6, Abort) if streamed else None
    target.generate(prompt, assistant_model=drafter, generation_config=settings, streamer=streamer)
    assert drafter.statistics.drafted > 0


def alive() -> tuple[int, int]:
    """Tensors that Python can reach, and bytes of their storages."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


def traces(target, drafter, *configs) -> dict:
    """Everything a call could leave on the objects a user holds."""
    modules = [*target.named_modules(prefix="target"), *drafter.named_modules(prefix="drafter")]
    found = {name: sorted(vars(module)) for name, module in modules}
    for name, module in modules:
        found[name, "hooks"] = {k: list(v) for k, v in vars(module).items() if k.endswith("_hooks") and v}
    configs = (target.config, drafter.config, target.generation_config, *configs)
    found["configs"] = [(c.to_dict(), sorted(vars(c))) for c in configs]
    found["torch"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    return found


@pytest.mark.slow
def test_two_hundred_calls_leave_no_trace():
    """Half of them aborted, at five places and several depths; greedy and sampled, ids and dicts."""
    target = make_target()
    drafter = make_drafter(target)
    prompt = text_of(20)
    greedy = config(max_new_tokens=16, **FIXED)
    sampled = config(max_new_tokens=16, do_sample=True, top_k=20, temperature=0.7, **FIXED)
    rich = config(max_new_tokens=16, return_dict_in_generate=True, output_scores=True, output_logits=True, **FIXED)
    settings = [greedy, sampled, rich]
    places = ["criterion", "processor", "streamer", "target", "drafter"]
    cases = list(itertools.product(places, (1, 2, 5), settings))

    def call(i):
        if i % 2:
            abort(target, drafter, prompt, *cases[i // 2 % len(cases)])
        else:
            finish(target, drafter, prompt, settings[i // 2 % 3], streamed=i % 4 == 0)

    torch.manual_seed(0)
    before = traces(target, drafter, *settings)
    for i in range(12):  # tensors that are made once, such as a gathered head, are made here
        call(i)
    tensors = alive()
    for i in range(200):
        last = drafter.statistics
        call(i)
        assert (drafter.statistics is last) == bool(i % 2)  # of the last finished call
    assert traces(target, drafter, *settings) == before
    assert alive() == tensors
    text = target.generate(prompt, assistant_model=drafter, generation_config=greedy)
    assert torch.equal(text, plain(target, prompt, max_new_tokens=16)) and drafter.statistics.drafted > 0


@pytest.mark.parametrize("aborted", [False, True])
def test_memory_of_a_call_is_free_when_it_ends(aborted):
    """The target's cache does not wait for the garbage collector: on a GPU the next call needs the room."""
    target = make_target()
    drafter = make_drafter(target)
    caches = []

    def note(module, args, kwargs):
        cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
        if not caches:
            caches.append(weakref.ref(cache))

    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    gc.collect()
    gc.disable()
    try:
        if aborted:
            abort(target, drafter, text_of(20), "criterion", 2, config(max_new_tokens=16, **FIXED))
        else:
            finish(target, drafter, text_of(20), config(max_new_tokens=16, **FIXED))
        assert caches[0]() is None
    finally:
        gc.enable()
        hook.remove()


def test_drafter_does_not_keep_a_target_alive():
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=16)
    drafter.d2t.copy_(torch.arange(16))
    finish(target, drafter, text_of(20), config(max_new_tokens=8, **FIXED))
    assert len(drafter._runtime.links) == 1
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert len(drafter._runtime.links) == 0


@pytest.mark.parametrize("ended", ["finished", "criterion", "target"])
@pytest.mark.parametrize("with_config", [False, True])
def test_empty_cache_of_the_user_is_left_clean(ended, with_config):
    target = make_target()
    drafter = make_drafter(target)
    cache = DynamicCache(config=target.config) if with_config else DynamicCache()
    by_host = DynamicCache()
    target.generate(text_of(20), generation_config=config(max_new_tokens=2), **{cache_argument(target): by_host})
    if ended == "finished":
        arguments = {cache_argument(target): cache, "generation_config": config(max_new_tokens=9, **FIXED)}
        text = target.generate(text_of(20), assistant_model=drafter, **arguments)
        assert drafter.statistics.drafted > 0
        assert cache.get_seq_length() == text.shape[1] - 1
    else:
        settings = config(max_new_tokens=9, **FIXED)
        abort(target, drafter, text_of(20), ended, 2, settings, **{cache_argument(target): cache})
    assert sorted(vars(cache)) == sorted(vars(by_host))


def cache_sizes(cache) -> list[int]:
    return [0 if layer.keys is None else layer.keys.shape[-2] for layer in cache.layers]


def test_windows_bound_both_caches():
    """A sliding layer holds its window and a block at most, in the drafter and in the target."""
    window, block = 8, 7
    target = make_target("mistral", sliding_window=window)
    prompt = text_of(100)
    drafter = scripted(
        target,
        prompt,
        "alternating",
        tokens=60,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=window,
    )
    drafts, targets = [], []

    def note_draft(module, args, kwargs, output):
        drafts.append(cache_sizes(kwargs["cache"]))

    def note_target(module, args, kwargs, output):
        targets.append(cache_sizes(output[cache_argument(target)]))

    drafter.register_forward_hook(note_draft, with_kwargs=True)
    target.register_forward_hook(note_target, with_kwargs=True)
    text = target.generate(prompt, assistant_model=drafter, generation_config=config(max_new_tokens=60, **FIXED))
    assert drafter.statistics.accepted > 0 and len(drafts) > 5
    assert max(sliding for sliding, _ in drafts) <= window + block + 1
    assert max(max(sizes) for sizes in targets[1:]) <= window + block + 1
    assert drafts[-1][1] > 140  # the other layer sees everything
    target._forward_hooks.clear()
    assert torch.equal(text, plain(target, prompt, max_new_tokens=60))


@pytest.mark.parametrize("longest", [512, 131072])
@pytest.mark.parametrize("length", [40, 160])
def test_draft_cache_grows_with_the_text_only(length, longest):
    """Keys and values of the context, not of `max_position_embeddings` positions."""
    target = make_target(max_position_embeddings=longest)
    drafter = make_drafter(target)
    seen = []

    def note(module, args, kwargs, output):
        tensors = [t for layer in kwargs["cache"].layers for t in (layer.keys, layer.values)]
        seen.append((int(kwargs["position_ids"][0, 0]), sum(t.untyped_storage().nbytes() for t in tensors)))

    drafter.register_forward_hook(note, with_kwargs=True)
    target.generate(text_of(length), assistant_model=drafter, generation_config=config(max_new_tokens=9, **FIXED))
    c = drafter.config
    assert drafter.statistics.drafted > 0 and seen[0][0] == length
    for anchor, size in seen:
        assert size == 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * anchor * FP32
