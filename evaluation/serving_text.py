"""What a chat request asks for, and its answer: text in pieces that no later token changes.

A token may hold half a character, or half a stop string. What could still change is kept back until it cannot.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field


UNKNOWN = "\ufffd"  # what tokenizers write for bytes that make no character, perhaps not yet
LONG_WINDOW, SHORT_WINDOW = 48, 12  # tokens decoded again with every new one; cut to the second beyond the first
# Parameters of the API that are not honoured, with the values that ask for nothing.
NEUTRAL = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (None, 0)),
    **dict.fromkeys(("logprobs", "store"), (None, False)),
    **dict.fromkeys(("tools", "functions"), (None, [])),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    **dict.fromkeys(("prediction", "audio", "web_search_options"), (None,)),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_CHOICES = 128  # of OpenAI's API


class Refusal(Exception):
    """An answer that is an error, in the words of OpenAI's API."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass
class Chat:
    """What a request asks for; see `read`."""

    messages: list[dict]
    max_tokens: int | None = None
    settings: dict = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    seed: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False

    @classmethod
    def read(cls, body) -> "Chat":
        """From the JSON of a request.

        Raises:
            Refusal: naming the parameter that is wrong or cannot be honoured.
        """
        if not isinstance(body, dict):
            raise Refusal("The body must be a JSON object.")
        for name, neutral in NEUTRAL.items():
            if body.get(name) not in neutral:
                raise Refusal(f"`{name}` is not supported here: leave it out.", name, "unsupported_parameter")
        most = {name: _number(body, name, 1, None, int) for name in ("max_completion_tokens", "max_tokens")}
        temperature = _number(body, "temperature", 0, 2)
        top_p = _number(body, "top_p", 0, 1)
        settings = {"do_sample": False}
        if temperature != 0:
            settings = {
                "do_sample": True,
                "temperature": 1.0 if temperature is None else float(temperature),
                "top_p": 1.0 if top_p is None else float(top_p),
                "top_k": 0,
            }
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
            raise Refusal("`stop` must be a string or a list of strings, none of them empty.", "stop")
        if body.get("stream") not in (None, False, True):
            raise Refusal("`stream` must be true or false.", "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise Refusal("`stream_options` must be an object.", "stream_options")
        return cls(
            _messages(body.get("messages")),
            most["max_completion_tokens"] or most["max_tokens"],
            settings,
            stops,
            _number(body, "seed", -(2**63), 2**63 - 1, int),
            _number(body, "n", 1, MOST_CHOICES, int) or 1,
            bool(body.get("stream")),
            bool(options.get("include_usage")),
        )


def _number(body: dict, name: str, low, high, kind=(int, float)):
    value = body.get(name)
    if value is None:
        return None
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right or not low <= value or (high is not None and not value <= high):
        what = "an integer" if kind is int else "a number"
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise Refusal(f"`{name}` is {value!r}: it must be {what} {span}.", name)
    return value


def _messages(messages) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise Refusal("`messages` must be a list of at least one message.", "messages")
    read = []
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise Refusal(f"`{name}.role` is {role!r}: it must be one of {', '.join(ROLES)}.", f"{name}.role")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise Refusal(f"`{name}.content` must be text, or a list of text parts.", f"{name}.content")
        read.append({"role": ROLES[role], "content": content})
    return read


class TextStream:
    """The text of one answer.

    Special tokens are left out; spaces stay as the model wrote them (`clean_up_tokenization_spaces` takes back spaces
    that were shown).

    Args:
        tokenizer: of the target.
        stops: the text ends in front of the first of these that is complete.

    Attributes:
        tokens: how many were taken, that which completed a stop string included.
        stopped: whether a stop string came.
    """

    def __init__(self, tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.tokens, self.stopped = 0, False
        self._window: list[int] = []
        self._shown = ""  # of the window's text
        self._held = ""  # decoded, and perhaps the beginning of a stop string

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain with these tokens; where it stops does not depend on how they are dealt out."""
        tokens = list(tokens)
        parts = []
        for group in [[token] for token in tokens] if self.stops else [tokens]:
            if self.stopped:
                break
            self.tokens += len(group)
            self._window += group
            parts.append(self._before_stop(self._decoded()))
        return "".join(parts)

    def end(self) -> str:
        """What was kept back, when no more tokens come."""
        return "" if self.stopped else self._before_stop(self._decoded(last=True), last=True)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _decoded(self, last: bool = False) -> str:
        """New text of the window."""
        text = self._decode(self._window)
        certain = text if last else text.rstrip(UNKNOWN)
        if not last and not certain.startswith(self._shown):
            return ""  # bytes that were a character are unknown ones while the next character is incomplete
        new, self._shown = certain[len(self._shown) :], certain
        if len(self._window) > LONG_WINDOW and certain == text:
            # A few tokens stay in front of the new ones: some tokenizers strip the space of the first.
            tail = self._window[-SHORT_WINDOW:]
            tail_text = self._decode(tail)
            if tail_text.strip() and UNKNOWN not in tail_text and text.endswith(tail_text):
                self._window, self._shown = tail, tail_text
        return new

    def _before_stop(self, text: str, last: bool = False) -> str:
        held = self._held + text
        found = [(at + len(stop), at) for stop in self.stops if (at := held.find(stop)) >= 0]
        if found:  # that which is complete first, as if the text came character by character
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = 0 if last else max((_overlap(held, stop) for stop in self.stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of a text that begin a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Choice:
    """One text of an answer, as far as it has come."""

    def __init__(self, engine, tokenizer, request, stops: list[str]):
        self.engine, self.request = engine, request
        self.text = TextStream(tokenizer, stops)
        self.finish: str | None = None
        self._at = request.prompt_length

    def advance(self) -> str:
        """The new text.

        Raises:
            Refusal: if the engine failed.
        """
        request = self.request
        ended = request.finished  # before the tokens are looked at
        new = request.ids[self._at :]
        self._at += len(new)
        if ended == "error":
            raise Refusal("The engine failed on this; the server's log says why.", code="engine_error", status=500)
        # An EOS that the tokenizer does not know as special is no text either.
        eos = ended == "stop" and bool(new) and new[-1] in request.eos_ids
        text = self.text.push(new[:-1] if eos else new)
        if ended is not None and not self.text.stopped:
            self.text.tokens += eos
            text += self.text.end()
        if self.text.stopped:
            self.close()
            self.finish = "stop"
        elif ended is not None:
            self.finish = ended
        return text

    def close(self) -> None:
        """Give up the place in the engine, unless the text has ended."""
        if self.finish is None:
            self.engine.cancel(self.request)


class Answer:
    """All choices of one HTTP request. To be closed, whatever happened.

    Args:
        service: has `name`, `step`, set when the engine has made its next one, and `closing`.
    """

    def __init__(self, service, chat: Chat, choices: list[Choice]):
        self.service, self.chat, self.choices = service, chat, choices
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}

    async def pieces(self) -> AsyncIterator[tuple[int, Choice, str]]:
        """`(index, choice, new text)`, every choice at least once, with its `finish` set the last time."""
        going = dict(enumerate(self.choices))
        while True:
            step = self.service.step  # before anything is looked at, so that no step is missed
            for index, choice in list(going.items()):
                text = choice.advance()
                if choice.finish is not None:
                    del going[index]
                if text or choice.finish is not None:
                    yield index, choice, text
            if not going:
                return
            if self.service.closing:
                raise Refusal("The server is shutting down.", code="shutting_down", status=503)
            await step.wait()

    def close(self) -> None:
        for choice in self.choices:
            choice.close()

    def usage(self) -> dict:
        prompt = self.choices[0].request.prompt_length
        text = sum(choice.text.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": text, "total_tokens": prompt + text}

    async def whole(self) -> dict:
        texts = [""] * len(self.choices)
        async for index, _, text in self.pieces():
            texts[index] += text
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish,
            }
            for index, (choice, text) in enumerate(zip(self.choices, texts))
        ]
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, the last of them `[DONE]`, or an error if one came up behind the headers."""

        def event(choices: list, usage=None) -> str:
            chunk = {**self.head, "object": "chat.completion.chunk", "choices": choices}
            return f"data: {json.dumps({**chunk, 'usage': usage} if self.chat.usage else chunk)}\n\n"

        def part(index: int, delta: dict, finish: str | None = None) -> str:
            return event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}])

        try:
            for index in range(len(self.choices)):
                yield part(index, {"role": "assistant", "content": ""})
            async for index, choice, text in self.pieces():
                if text:
                    yield part(index, {"content": text})
                if choice.finish is not None:
                    yield part(index, {}, choice.finish)
            if self.chat.usage:
                yield event([], self.usage())
            yield "data: [DONE]\n\n"
        except Refusal as error:
            yield f"data: {json.dumps(error.body)}\n\n"
