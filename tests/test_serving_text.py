"""Tokens to text as they come: whole characters, and nothing of a stop string."""

import random

import pytest
from same import chat_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.evaluation.serving_text import TextStream


def byte_level() -> PreTrainedTokenizerFast:
    """Every token a byte, as where a byte-level tokenizer meets rare characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with the space in front, which the first one loses, and bytes for all that is no word."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *(f"▁{w}" for w in ("a", "bc", "def")),
        "a",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


def dealt(tokens: list[int], rng: random.Random):
    """The tokens in blocks, as drafts are accepted."""
    while tokens:
        count = rng.randint(1, 5)
        yield tokens[:count]
        tokens = tokens[count:]


@pytest.mark.parametrize("kind, words", [(byte_level, 0), (byte_fallback, 0.5), (byte_fallback, 0)])
def test_pieces_make_the_whole_text(kind, words):
    """No piece has half a character, and together they are what the tokenizer makes of all tokens at once."""
    tokenizer, rng = kind(), random.Random(0)
    for length in (0, 1, 3, 30, 400):
        for _ in range(5):
            tokens: list[int] = []
            for _ in range(length):
                character = rng.choice(["a", ".", "é", "€", "🙂", "中"])
                if kind is byte_level:
                    tokens += tokenizer(character)["input_ids"]
                elif rng.random() < words:
                    tokens.append(tokenizer.convert_tokens_to_ids(rng.choice(["▁", "▁a", "▁bc", "▁def", "a", "."])))
                else:
                    tokens += [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in character.encode()]
                if rng.random() < 0.1:
                    tokens.append(tokenizer.eos_token_id)
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            assert "\ufffd" not in whole
            text = TextStream(tokenizer)
            pieces = [text.push(block) for block in dealt(tokens, rng)]
            assert all(piece.isprintable() and "\ufffd" not in piece for piece in pieces)
            assert len(whole) - len("".join(pieces)) <= 1
            assert "".join(pieces) + text.end() == whole and text.tokens == len(tokens)
            assert len(text._window) < 100  # long texts are not decoded from their beginning every time


def test_bytes_that_make_no_character_come_at_the_end():
    tokenizer = byte_level()
    tokens = tokenizer("aé")["input_ids"][:-1]
    text = TextStream(tokenizer)
    assert [text.push(tokens), text.end()] == ["a", "\ufffd"]


def test_stop_strings_do_not_depend_on_blocks():
    """Against a loop over characters: the text ends in front of the stop string that is complete first."""
    rng, tokenizer = random.Random(1), chat_tokenizer()
    stopped = 0
    for _ in range(300):
        whole = "".join(rng.choices("ab", k=12))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3))]
        ends = (n for n in range(13) if any(whole[:n].endswith(stop) for stop in stops))
        end = next(ends, None)
        expected = whole if end is None else min((whole[:end].removesuffix(s) for s in stops), key=len)
        text = TextStream(tokenizer, stops)
        pieces = [text.push(block) for block in dealt(tokenizer(whole)["input_ids"], rng)] + [text.end()]
        assert "".join(pieces) == expected, (whole, stops)
        assert text.stopped == (end is not None) and text.tokens == (12 if end is None else end)
        stopped += text.stopped
    assert 50 < stopped < 300


def test_text_that_cannot_begin_a_stop_string_is_not_kept_back():
    tokenizer = chat_tokenizer()
    text = TextStream(tokenizer, ["abc"])
    pieces = [text.push([token]) for token in tokenizer("xabxab")["input_ids"]]
    assert pieces == ["x", "", "", "abx", "", ""] and text.end() == "ab"
