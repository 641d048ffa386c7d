"""Conversations as token ids with a mask of what the target wrote: through its chat template, or as plain text.

A drafter is trained on the target's own words only (paper, training: "only the prompts are used"), so every sequence
carries a mask `[S]`, 1 on tokens of assistant turns, the end-of-turn token included.
"""

import functools
import re

from jinja2 import TemplateError


GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


class ConversationError(ValueError):
    """A row that cannot be used; the message says why."""


def names_template_faults(function):
    """A template may refuse a conversation (a system turn, two user turns) or be faulty: one error for both."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TemplateError as error:
            raise ConversationError(f"the chat template refuses it ({error})") from error

    return wrapped


def require_chat_template(tokenizer) -> None:
    """
    Raises:
        ValueError: when the tokenizer has no chat template; says what to do.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template. Pass `--chat-template FILE` (a Jinja template), or "
            "`--plain-text` to have the prompts continued as they stand (base models)."
        )


@names_template_faults
def prompt_ids(tokenizer, messages: list[dict], plain_text: bool = False) -> list[int]:
    """What the target sees before its next turn: the template's rendering with the generation prompt, or the text."""
    if plain_text:
        return tokenizer(messages[-1]["content"])["input_ids"]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(rendered["input_ids"])


@names_template_faults
def encode(tokenizer, messages: list[dict]) -> tuple[list[int], list[int]]:
    """A whole conversation: ids `[S]` and assistant mask `[S]`.

    The mask is the template's own where it marks `{% generation %}`. Other templates are rendered up to each
    assistant turn and behind it: the tokens in between are the turn's.

    Raises:
        ConversationError: without an assistant turn, or when the template rewrites earlier turns, so that its
            renderings are not prefixes of one another.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ConversationError("no assistant turn")
    if GENERATION_BLOCK.search(template_text(tokenizer)):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(rendered["input_ids"]), list(rendered["assistant_masks"])

    def render(upto, generation_prompt):
        return tokenizer.apply_chat_template(messages[:upto], add_generation_prompt=generation_prompt, tokenize=False)

    # Rendered as text, and cut into tokens once: a token may not straddle the border of a turn.
    whole = render(turns[-1] + 1, False)
    spans = []
    for i in turns:
        before, behind = render(i, True), render(i + 1, False)
        if not behind.startswith(before) or not whole.startswith(behind):
            raise ConversationError("the chat template rewrites earlier turns, so they cannot be told apart")
        end = len(before) + len(behind[len(before) :].rstrip())  # templates end a turn with a line break of their own
        spans.append((len(before), end))
    ids, mask, place = [], [], 0
    for begin, end in spans:
        for piece, assistant in ((whole[place:begin], 0), (whole[begin:end], 1)):
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += piece_ids
            mask += [assistant] * len(piece_ids)
        place = end
    return ids, mask


def template_text(tokenizer) -> str:
    """The chat template in force; a tokenizer may hold several by name."""
    template = tokenizer.chat_template
    return template.get("default", "") if isinstance(template, dict) else template or ""
