"""`dspark serve`: clients get what `target.generate` writes, whoever else is there, and errors as OpenAI's API has."""

import copy
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from conftest import make_drafter, make_target
from same import characters, chat_tokenizer, drafter_for, shared, text_of

from dspark.candidate_generator import DSparkEngine
from dspark.evaluation import cli, serve
from dspark.evaluation.serving_text import Chat


OTHERS = ("hello", "WORLD", "a", "Zebra_crossing", "qrst", "MN", "[x]", "zzzz")


@contextmanager
def running(server):
    """A uvicorn server in a thread, on a free port; yields its address."""
    bound = serve.bind("127.0.0.1", 0)
    bound.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield "http://{}:{}".format(*bound.getsockname())
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


class Served:
    """A server of the shared target, and a client. Its drafter knows the text behind `USER` as long as that is decoded
    alone, or (`"random"`) nothing.
    """

    USER = "spark"

    def __init__(self, drafter: str = "oracle", api_key: str | None = None, **kwargs):
        self.tokenizer, self.target = chat_tokenizer(), shared()
        prompt = tuple(self.tokenizer(self.USER + "@")["input_ids"])
        self.drafter = drafter_for(self.target, text_of(start=prompt), drafter)
        self.engine = DSparkEngine(self.target, self.drafter, schedule="fixed", max_requests=4)
        self.service = serve.Service(self.engine, self.tokenizer, "org/tiny", **kwargs)
        self.server = serve.make_server(self.service, api_key)

    @contextmanager
    def running(self):
        with running(self.server) as self.url:
            self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
            yield self

    def plain(self, user: str, tokens: int = 24, **kwargs) -> str:
        assert self.idle()
        ids = self.tokenizer(user + "@", return_tensors="pt")["input_ids"]
        with self.engine._stepping:  # the last step may be about to end
            out = self.target.generate(ids, do_sample=False, max_new_tokens=tokens, tokenizer=self.tokenizer, **kwargs)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def chat(self, user: str = USER, **kwargs):
        messages = [{"role": "user", "content": user}]
        return self.client.chat.completions.create(
            **{"model": "org/tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **kwargs}
        )

    def idle(self) -> bool:
        """Waits until no request is left."""
        return wait_for(lambda: not self.engine.busy and not self.engine.active)

    def post(self, **body) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": self.USER}], "max_tokens": 8, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20)


@pytest.fixture(scope="module")
def _server():
    with Served().running() as served:
        yield served


@pytest.fixture
def served(_server):
    yield _server
    assert _server.idle()


def wait_for(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def collected(stream) -> tuple[str, str]:
    """Text and finish reason of a stream of one choice."""
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] and not any(reasons[:-1])
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), reasons[-1]


@pytest.fixture
def gated(served, monkeypatch):
    """Forwards of the target wait for this event; a second one says that a forward has begun."""
    gate, begun, verify = threading.Event(), threading.Event(), served.engine.packed.verify

    def gated_verify(*args):
        begun.set()
        assert gate.wait(20)
        return verify(*args)

    monkeypatch.setattr(served.engine.packed, "verify", gated_verify)
    gate.begun = begun
    yield gate
    gate.set()
    assert served.idle()


# The text


def test_the_text_of_generate(served):
    expected = served.plain(served.USER)
    before = copy.copy(served.engine.statistics)
    answer = served.chat()
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (expected, "assistant", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 24, 30)
    assert answer.model == "org/tiny" and answer.object == "chat.completion" and abs(answer.created - time.time()) < 60
    assert collected(served.chat(stream=True)) == (expected, "length")
    after = served.engine.statistics
    assert after.drafted > before.drafted and after.accepted > before.accepted


def test_usage_of_a_stream(served):
    chunks = list(served.chat(stream=True, stream_options={"include_usage": True}))
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 24 and chunks[-1].usage.prompt_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 1  # it came in pieces
    assert all(chunk.usage is None for chunk in served.chat(stream=True))


def test_many_clients_get_their_own_text(served):
    users = OTHERS
    expected = [served.plain(user, 12 + i) for i, user in enumerate(users)]
    assert len({text[:12] for text in expected}) == len(users) > served.engine.max_requests
    drafted = served.engine.statistics.drafted

    def ask(i):
        if i % 2:
            return collected(served.chat(users[i], max_tokens=12 + i, stream=True))[0]
        return served.chat(users[i], max_tokens=12 + i).choices[0].message.content

    with ThreadPoolExecutor(len(users)) as pool:
        assert list(pool.map(ask, range(len(users)))) == expected
    assert served.engine.statistics.drafted > drafted


def test_a_conversation_goes_through_the_template(served):
    messages = [
        {"role": "developer", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "de"}]},
        {"role": "assistant", "content": "fg"},
        {"role": "user", "content": "hi"},
    ]
    assert served.chat(messages=messages).choices[0].message.content == served.plain("abcdefghi")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(served, stream):
    text = served.plain(served.USER)
    for stop in (text[9:12], text[2:4], [text[20:22], text[13:15]], [text[10], "?!?"]):
        stops = [stop] if isinstance(stop, str) else stop
        reference = served.plain(served.USER, stop_strings=stops)  # up to and with the stop string
        end = next(s for s in stops if reference.endswith(s))
        answer = served.chat(stop=stop, stream=stream, stream_options={"include_usage": True} if stream else None)
        if stream:
            chunks = list(answer)
            pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            found, reason, usage = "".join(pieces), chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            choice = answer.choices[0]
            found, reason, usage = choice.message.content, choice.finish_reason, answer.usage
        assert (found, reason) == (reference.removesuffix(end), "stop")
        assert usage.completion_tokens == len(reference)  # a character is a token
    assert served.idle()


def test_a_stop_string_that_does_not_come_takes_nothing_away(served):
    text = served.plain(served.USER)
    never = text[-2:] + "?!?"  # the text ends in its beginning
    assert served.chat(stop=never).choices[0].message.content == text
    assert collected(served.chat(stop=never, stream=True)) == (text, "length")


def test_eos_ends_the_text(served, monkeypatch):
    text = served.plain(served.USER)
    eos = served.tokenizer.convert_tokens_to_ids(text[13])
    expected = text[: text.index(text[13])]
    assert expected
    monkeypatch.setattr(served.target.generation_config, "eos_token_id", eos)
    answer = served.chat()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.usage.completion_tokens == len(expected) + 1
    assert collected(served.chat(stream=True)) == (expected, "stop")


def test_seeds():
    """The same text for the same seed, alone and beside others; the choices of one request differ."""
    with Served("random").running() as served:
        check_seeds(served)
        assert served.engine.statistics.drafted > 0


def check_seeds(served):
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    alone = served.chat(**settings).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(served.chat, user) for user in OTHERS[:3]]
        beside = pool.submit(served.chat, **settings).result()
        assert all(other.result().choices for other in others)
    assert beside.choices[0].message.content == alone
    several = served.chat(**settings, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone and len(set(texts)) == 3 and [c.index for c in several.choices] == [0, 1, 2]
    assert several.usage.completion_tokens == 48 and several.usage.prompt_tokens == 6
    streamed = [""] * 3
    for chunk in served.chat(**settings, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert served.chat(**{**settings, "seed": 8}).choices[0].message.content != alone


def test_sampling_settings_arrive(served):
    greedy = served.plain(served.USER)
    assert served.chat(temperature=2.0, top_p=0.0).choices[0].message.content == greedy
    assert served.chat(temperature=1e-3, seed=1).choices[0].message.content == greedy
    assert served.chat(temperature=2.0, seed=1).choices[0].message.content != greedy


def test_defaults_are_those_of_the_api():
    messages = [{"role": "user", "content": "x"}]
    sampled = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert Chat.read({"messages": messages}) == Chat(messages, settings=sampled)
    chat = Chat.read(
        {"messages": messages, "max_tokens": 5, "max_completion_tokens": 6, "temperature": 0, "stop": "e"}
    )
    assert chat == Chat(messages, max_tokens=6, settings={"do_sample": False}, stops=["e"])


# Refusals


@pytest.mark.parametrize(
    "name, value",
    [
        *[("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"5": 10}), ("logprobs", True)],
        *[
            ("tools", [{"type": "function"}]),
            ("tool_choice", "required"),
            ("response_format", {"type": "json_object"}),
        ],
        *[("temperature", 3), ("temperature", "hot"), ("top_p", 1.5), ("n", 0), ("n", 1.0), ("seed", "x")],
        *[
            ("max_tokens", 0),
            ("max_completion_tokens", True),
            ("stop", [""]),
            ("stop", 5),
            ("stream_options", "x"),
            ("stream", "no"),
        ],
        *[("messages", []), ("messages", None), ("messages", "hello"), ("model", "another")],
        *[("messages[0].role", [{"role": "tool", "content": "x"}]), ("messages[0].role", ["x"])],
        ("messages[0].content", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ],
)
def test_what_is_refused_is_named(served, name, value):
    response = served.post(**{name.split("[")[0]: value})
    error = response.json()["error"]
    assert response.status_code == (404 if name == "model" else 400)
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"]
    assert not served.engine.busy


def test_neutral_and_unknown_fields_pass(served):
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
    }
    more = {"logprobs": False, "response_format": {"type": "text"}, "top_logprobs": None, "store": False, "stop": None}
    response = served.post(**neutral, **more, temperature=0, user="me", metadata={"a": "b"}, not_a_field=1)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == served.plain(served.USER, 8)


def test_bodies_and_pages_that_are_none(served):
    for content in (b"{", b"[]", b"\xff"):
        response = httpx.post(f"{served.url}/v1/chat/completions", content=content)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        response = httpx.request(method, served.url + path)
        assert response.status_code == status and response.json()["error"]["message"]


def test_the_template_may_refuse(served):
    with pytest.raises(openai.BadRequestError, match="begin with the user") as refused:
        served.chat(messages=[{"role": "assistant", "content": "x"}])
    assert refused.value.param == "messages"


def test_the_context_is_a_limit(served):
    with pytest.raises(openai.BadRequestError) as refused:
        served.chat("x" * 600, max_tokens=None)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as refused:
        served.chat(max_tokens=507)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    whole = served.chat("x" * 500, max_tokens=None)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.choices[0].finish_reason) == (
        *(501, 11),
        "length",
    )


def test_a_full_queue(served, gated, monkeypatch):
    expected = served.plain(served.USER)
    monkeypatch.setattr(served.engine, "max_requests", 1)
    monkeypatch.setattr(served.engine, "max_waiting", 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.chat)
        assert gated.begun.wait(10)
        with pytest.raises(openai.RateLimitError):
            served.chat(n=3)
        assert len(served.engine.waiting) == 0  # two choices had found room
        second = pool.submit(served.chat, n=2)
        assert wait_for(lambda: len(served.engine.waiting) == 2)
        refused = served.post()
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["Retry-After"]) >= 1
        gated.set()
        assert first.result().choices[0].message.content == expected
        assert [choice.message.content for choice in second.result().choices] == [expected] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(served, monkeypatch, stream):
    def fail(*_):
        time.sleep(0.2)  # the client's answer is being waited for by then
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine.packed, "verify", fail)
        with pytest.raises(openai.APIError) as failed:
            list(served.chat(stream=stream))
        assert failed.value.code == "engine_error" and (stream or failed.value.status_code == 500)
    assert served.chat().choices[0].message.content == served.plain(served.USER)


# Clients and the server


def test_a_stream_that_is_left_frees_its_slot(served, gated):
    stream = served.chat(max_tokens=500, n=2, stream=True)
    assert gated.begun.wait(10) and next(stream).choices
    requests = [*served.engine.active, *served.engine.waiting]
    assert len(requests) == 2
    stream.close()
    assert wait_for(lambda: all(request.cancelled for request in requests))
    gated.set()
    assert served.idle()
    assert all(r.finished == "cancelled" and len(r.new_ids) < 20 for r in requests)


def test_a_stop_string_frees_the_slot(served, monkeypatch):
    text, requests, submit = served.plain(served.USER), [], served.engine.submit
    monkeypatch.setattr(served.engine, "submit", lambda *a, **k: requests.append(submit(*a, **k)) or requests[-1])
    assert served.chat(stop=text[3:5], max_tokens=500).choices[0].finish_reason == "stop"
    assert served.idle() and requests[0].finished == "cancelled" and len(requests[0].new_ids) < 500


def test_a_client_that_goes_away_frees_its_slot(served, gated):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 500},
            timeout=httpx.Timeout(10, read=0.3),
        )
    (request,) = (*served.engine.active, *served.engine.waiting)
    assert wait_for(lambda: request.cancelled)
    gated.set()
    assert served.idle()
    assert request.finished == "cancelled" and len(request.new_ids) < 20


def test_a_step_does_not_hold_up_the_server(served, gated):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat)
        assert gated.begun.wait(10)
        assert httpx.get(f"{served.url}/health", timeout=5).json() == {"status": "ok"}
        found = httpx.get(f"{served.url}/stats", timeout=5).json()
        gated.set()
        assert answer.result().choices
    assert (found["active"], found["waiting"], found["schedule"], found["model"]) == (1, 0, "fixed", "org/tiny")
    assert served.idle()
    after = httpx.get(f"{served.url}/stats").json()
    assert after["active"] == 0 and after["finished"] == found["finished"] + 1
    assert after["generated"] == found["generated"] + 24 and after["backend"] == served.engine.packed.backend


def test_a_long_prompt_does_not_hold_up_the_server(served, monkeypatch):
    gate, begun, template = threading.Event(), threading.Event(), served.tokenizer.apply_chat_template

    def slow(*args, **kwargs):
        begun.set()
        assert gate.wait(20)
        return template(*args, **kwargs)

    monkeypatch.setattr(served.tokenizer, "apply_chat_template", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat)
        try:
            assert begun.wait(10)
            assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
        finally:
            gate.set()
        assert answer.result().choices


def test_models(served):
    assert [model.id for model in served.client.models.list()] == ["org/tiny"]
    assert served.client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("org/another")


def test_an_api_key():
    with Served(api_key="sesame", max_tokens=9).running() as served:
        for key, status in ((None, 401), ("x", 401), ("sesam", 401), ("sesame", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path in ("/v1/models", "/v1/models/org/tiny", "/stats"):
                assert httpx.get(served.url + path, headers=headers).status_code == status
            assert httpx.get(f"{served.url}/health", headers=headers).status_code == 200
        with pytest.raises(openai.AuthenticationError) as refused:
            served.chat()
        assert refused.value.code == "invalid_api_key"
        served.client.api_key = "sesame"
        assert served.chat(max_tokens=None).usage.completion_tokens == 9  # the server's own default


def test_shutdown_ends_what_is_being_written(monkeypatch):
    before = set(threading.enumerate())
    with Served().running() as served:
        verify = served.engine.packed.verify
        monkeypatch.setattr(served.engine.packed, "verify", lambda *args: (time.sleep(0.02), verify(*args))[1])
        stream = served.chat(stream=True, max_tokens=500)
        assert [next(stream), next(stream)]
        (thread,) = (t for t in threading.enumerate() if t.name == "dspark-engine" and t not in before)
        started = time.monotonic()
        served.server.should_exit = True
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        assert ended.value.code == "shutting_down"
    assert time.monotonic() - started < serve.SHUTDOWN_SECONDS
    assert not thread.is_alive()


def test_command_ends_with_ctrl_c(tmp_path, capsys, monkeypatch):
    """The whole command, from its arguments to its exit code; interrupted while it writes."""
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    with serve.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("DSPARK_API_KEY", "sesame")
    seen, given_up = [], threading.Event()

    def client():
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0)
        try:
            messages = [{"role": "user", "content": "x"}]
            while not given_up.wait(0.05):
                try:
                    seen.append(next(client.chat.completions.create(model="target", messages=messages, stream=True)))
                    break
                except openai.APIConnectionError:  # it does not listen yet
                    continue
        finally:
            if not given_up.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    folders = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    try:
        code = cli.main(["serve", *folders, "--port", str(port), "--schedule", "fixed", "--device", "cpu"])
    finally:
        given_up.set()
        thread.join(10)
    out, errors = capsys.readouterr()
    assert code == 0 and seen[0].choices and "Traceback" not in errors
    assert f"dspark serve: target at http://127.0.0.1:{port}/v1\n" in out and "back end packed, schedule fixed" in out


def test_what_cannot_be_served_is_said_at_once(tmp_path, capsys, monkeypatch):
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]

    def refusal(*more) -> str:
        with pytest.raises(SystemExit) as stop:
            serve.main([*arguments, *more])
        assert stop.value.code == 2
        return capsys.readouterr().err

    make_target().config.save_pretrained(tmp_path / "target")
    characters().save_pretrained(tmp_path / "target")
    assert "chat template" in refusal("--port", "0")
    with serve.bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert "--port" in refusal("--port", str(taken.getsockname()[1]))
    assert "--max-waiting is 0" in refusal("--max-waiting", "0")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'dspark[serve]'" in refusal()


def test_a_target_without_a_longest_text_needs_a_limit(served, monkeypatch):
    monkeypatch.setattr(served.engine, "max_length", float("inf"))
    with pytest.raises(ValueError, match="--max-tokens"):
        serve.Service(served.engine, served.tokenizer, "org/tiny")
    assert serve.Service(served.engine, served.tokenizer, "org/tiny", max_tokens=9).context == float("inf")
