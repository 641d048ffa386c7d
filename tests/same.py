"""What the tests of equal output share: targets with their texts, a tokenizer, and the comparison itself."""

import copy
from functools import cache

import torch
from conftest import VOCAB, config, following, lively_target, make_drafter, plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.modeling_dspark import DSparkModel


KINDS = ("oracle", "alternating", "never", "random")
NEW = 32  # tokens of a call, unless it says otherwise


def shared(family: str = "llama"):
    """A target of a family that no test changes."""
    return _shared(family)


def text_of(family: str = "llama", start: tuple = ()) -> list[int]:
    """Its plain text behind a prompt (the fixture's), longer than any test needs."""
    return list(_text_of(family, start))


@cache
def _shared(family: str):
    return lively_target(family)


@cache
def _text_of(family: str, start: tuple):
    prompt = torch.tensor([start]) if start else torch.randint(3, VOCAB, (1, 9), generator=seeded(0))
    return plain(shared(family), prompt, max_new_tokens=160)[0].tolist()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drafter_for(target, text: list[int], kind: str, **overrides) -> DSparkModel:
    return make_drafter(target, **overrides) if kind == "random" else following(target, text, kind, **overrides)


def assert_same(target, prompt, drafter, kind: str | None = None, schedule: str = "fixed", expected=None, **kwargs):
    """Assisted equals plain decoding (`expected`, or run here), with the acceptance the kind of drafter must have."""
    settings = {"max_new_tokens": NEW, **kwargs}
    inputs = {} if prompt is None else {"input_ids": prompt}
    if expected is None:
        expected = target.generate(**inputs, generation_config=config(), **settings)[0].tolist()
    out = target.generate(
        **inputs, assistant_model=drafter, generation_config=config(dspark_schedule=schedule), **settings
    )
    start = 0 if prompt is None else prompt.shape[1]
    assert out[0].tolist() == expected[: start + settings["max_new_tokens"]]
    statistics = drafter.statistics
    assert statistics.drafted > 0
    if kind == "oracle":
        assert statistics.accepted == statistics.verified > 0
    elif kind == "alternating":
        assert 0 < statistics.accepted < statistics.verified
    elif kind == "never":
        assert statistics.accepted == 0
    return out


@cache
def characters() -> PreTrainedTokenizerFast:
    """A tokenizer whose 64 tokens are one character each."""
    tokens = {chr(0x3F + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", clean_up_tokenization_spaces=False)


TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}@{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(characters())
    tokenizer.chat_template = TEMPLATE
    return tokenizer
