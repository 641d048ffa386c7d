"""`dspark serve`: an OpenAI-style HTTP API for a target with its drafter, many clients at once.

    dspark serve --target <model> --drafter <drafter>
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}'

POST /v1/chat/completions (whole or as a stream), GET /v1/models, /stats, /health. As in OpenAI's API, temperature and
top_p are 1.0 unless a request sets them, whatever the target's generation config says, and top-k is off; the rest of
that config applies. Temperature 0 decodes greedily. What cannot be honoured is refused; unknown fields are ignored. A
client that goes away gives up its place.

One thread decodes (`DSparkEngine`), one tokenizes and queues, and the event loop makes text of new tokens.
"""

import argparse
import asyncio
import hmac
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from dspark.evaluation.inputs import add_model_arguments, load_models
from dspark.evaluation.serving_text import Answer, Chat, Choice, Refusal


RETRY_SECONDS = 1
SHUTDOWN_SECONDS = 5  # for clients that do not take the end of their answer


class Service:
    """An engine and its tokenizer behind the API.

    Args:
        tokenizer: of the target, with a chat template.
        name: of the model, for clients.
        max_tokens: of an answer whose request sets none; by default what the context leaves.

    Raises:
        ValueError: for a target whose context has no end, if `max_tokens` is not given.
    """

    def __init__(self, engine, tokenizer, name: str, max_tokens: int | None = None):
        self.context = min(engine.max_length, engine.max_cached_tokens or engine.max_length)
        if self.context == float("inf") and max_tokens is None:
            raise ValueError("the target's config names no longest text: give `--max-tokens`.")
        self.engine, self.tokenizer, self.name, self.max_tokens = engine, tokenizer, name, max_tokens
        self.created = int(time.time())
        self.closing = False
        self.step: asyncio.Event | None = None  # the engine's next one
        # One thread: a fast tokenizer cannot be used by two at once.
        self._intake = ThreadPoolExecutor(1, thread_name_prefix="dspark-intake")

    @asynccontextmanager
    async def running(self, _app=None):
        """The engine in its own thread, telling this event loop of every step."""
        loop = asyncio.get_running_loop()
        self.step = asyncio.Event()
        self.engine.on_step = lambda: loop.call_soon_threadsafe(self.announce)
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.stop)
            self.engine.on_step = None
            self._intake.shutdown(wait=False)

    def announce(self) -> None:
        done, self.step = self.step, asyncio.Event()
        done.set()

    def close(self) -> None:
        """End all answers with an error."""
        self.closing = True
        self.announce()

    async def answer(self, chat: Chat) -> Answer:
        """Queue what a request asks for.

        Raises:
            Refusal: if nothing was queued.
        """
        return await asyncio.get_running_loop().run_in_executor(self._intake, self._submit, chat)

    def _submit(self, chat: Chat) -> Answer:
        from dspark.candidate_generator import EngineFull

        ids = self._prompt(chat.messages)
        room = self.context - len(ids)
        most = chat.max_tokens or min(room, self.max_tokens or room)
        if most < 1 or most > room:
            asked = f" and {chat.max_tokens} for the answer" if chat.max_tokens else ""
            raise Refusal(
                f"This model's context is {self.context} tokens; the messages take {len(ids)}{asked}.",
                "messages" if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        choices = []
        try:
            for i in range(chat.n):
                seed = None if chat.seed is None else (chat.seed + i) % 2**63
                request = self.engine.submit(ids, seed=seed, max_new_tokens=int(most), **chat.settings)
                choices.append(Choice(self.engine, self.tokenizer, request, chat.stops))
        except (EngineFull, ValueError) as error:
            for choice in choices:
                choice.close()
            if isinstance(error, EngineFull):
                raise Refusal(f"Too many requests: {error}", code="rate_limit_exceeded", status=429) from error
            raise Refusal(str(error)) from error
        return Answer(self, chat, choices)

    def _prompt(self, messages: list[dict]) -> list[int]:
        from jinja2 import TemplateError

        try:
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise Refusal(f"The model's chat template refuses the messages: {error}", "messages") from error
        if not encoded["input_ids"]:
            raise Refusal("The messages make an empty prompt.", "messages")
        return encoded["input_ids"]

    def model(self) -> dict:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "dspark"}

    def statistics(self) -> dict:
        """Counts and seconds of the engine since it was made, see `EngineStatistics`."""
        engine, counts = self.engine, self.engine.statistics
        return {
            "model": self.name,
            "backend": engine.packed.backend,
            "schedule": engine.planner.scheduler.kind,
            "active": len(engine.active),
            "waiting": len(engine.waiting),
            **vars(counts),
            "lengths": dict(sorted(counts.lengths.copy().items())),
            "host_seconds": counts.host_seconds,
            "tokens_per_block": counts.generated / counts.decoded if counts.decoded else None,
        }


def create_app(service: Service, api_key: str | None = None):
    """The API as an ASGI application.

    Args:
        api_key: that clients must send (`Authorization: Bearer ...`), by default none.
    """
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException

    class EventStream(StreamingResponse):
        """Closes its answer also if the client was gone before the first event."""

        def __init__(self, answer: Answer):
            super().__init__(answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            self.answer = answer

        async def __call__(self, scope, receive, send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.answer.close()

    def authorized(http: Request) -> None:
        sent = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(sent.encode("latin-1"), api_key.encode()):
            raise Refusal("The API key is missing or wrong.", code="invalid_api_key", status=401)

    def known(name: str | None) -> None:
        if name is not None and name != service.name:
            raise Refusal(
                f"The model {name!r} is not served here, {service.name!r} is.", "model", "model_not_found", 404
            )

    app = FastAPI(title="dspark", lifespan=service.running, docs_url=None, redoc_url=None, openapi_url=None)
    guarded = {"dependencies": [Depends(authorized)]}

    @app.exception_handler(Refusal)
    async def refused(_, error: Refusal):
        headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else None
        return JSONResponse(error.body, error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def no_such_page(_, error: HTTPException):
        return JSONResponse(Refusal(str(error.detail), status=error.status_code).body, error.status_code)

    @app.exception_handler(Exception)
    async def failed(_, error: Exception):
        return JSONResponse(Refusal(f"The server failed ({type(error).__name__}).", status=500).body, 500)

    @app.post("/v1/chat/completions", **guarded)
    async def chat_completions(http: Request):
        try:
            body = await http.json()
        except ValueError as error:
            raise Refusal(f"The body is not JSON: {error}") from error
        chat = Chat.read(body)
        known(body.get("model"))
        answer = await service.answer(chat)
        if chat.stream:
            return EventStream(answer)
        whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(disconnected(http))
        try:
            await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
        finally:
            whole.cancel()
            gone.cancel()
            answer.close()

    @app.get("/v1/models", **guarded)
    async def models():
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}", **guarded)
    async def model(name: str):
        known(name)
        return service.model()

    @app.get("/stats", **guarded)
    async def stats():
        return service.statistics()

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    return app


async def disconnected(http) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def make_server(service: Service, api_key: str | None = None):
    """A uvicorn server for `run(sockets=[...])`; an answer that is not complete when it stops ends with an error."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets=None) -> None:
            service.close()
            await super().shutdown(sockets)

    app = create_app(service, api_key)
    return Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS))


def bind(host: str, port: int) -> socket.socket:
    """The address, taken at once; connections are refused until the server listens."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    if os.name == "posix":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def load_tokenizer(target: str):
    """The target's, which must have a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"`--target` {target} has a tokenizer without a chat template, so it cannot be served as a chat model: "
            "add one (`chat_template.jinja`), or take the target's instruction-tuned version."
        )
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dspark serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--model-name", help="for clients; by default the target's id, or its folder's name")
    add("--schedule", help="throughput, asynchronous, fixed, threshold or none; by default the drafter's own")
    add("--max-requests", type=int, default=32, metavar="N", help="decoded at once (32)")
    add("--max-waiting", type=int, default=1000, metavar="N", help="more than that get status 429 (1000)")
    add("--max-cached-tokens", type=int, metavar="N", help="of all decoded at once, with their max_tokens; no limit")
    add("--max-tokens", type=int, metavar="N", help="of an answer that sets none; by default the rest of the context")
    add("--api-key", default=os.environ.get("DSPARK_API_KEY"), help="clients must send it (DSPARK_API_KEY)")
    args = parser.parse_args(argv)
    for name in ("max_requests", "max_waiting", "max_cached_tokens", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least 1.")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        parser.error(f"serving needs more packages: pip install 'dspark[serve]' ({error})")
    try:
        bound = bind(args.host, args.port)
    except (OSError, OverflowError) as error:
        parser.error(f"--host {args.host} --port {args.port}: {error}")

    from dspark.candidate_generator import DSparkEngine

    try:
        tokenizer = load_tokenizer(args.target)
        target, drafter = load_models(args)
        print("making the engine; the first time its costs are measured, in about 15 seconds", flush=True)
        limits = {name: getattr(args, name) for name in ("max_requests", "max_waiting", "max_cached_tokens")}
        engine = DSparkEngine(target, drafter, schedule=args.schedule, **limits)
        name = args.model_name or (Path(args.target).resolve().name if Path(args.target).is_dir() else args.target)
        service = Service(engine, tokenizer, name, args.max_tokens)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.api_key is None and args.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"warning: whoever reaches {args.host} can use this server: give --api-key.", flush=True)
    server = make_server(service, args.api_key)
    bound.listen()
    host, port = bound.getsockname()[:2]
    print(f"dspark serve: {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    print(f"back end {engine.packed.backend}, schedule {engine.planner.scheduler.kind}; end with Ctrl-C", flush=True)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:  # raised again by the server behind its own clean end
        pass
    return 0
