"""The endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvist.errors import KvistError
from kvist.iterations.records import MEDIA_TYPE
from kvist_transformers.serving.answers import Form
from kvist_transformers.serving.errors import ApiError, as_api_error, from_validation
from kvist_transformers.serving.generation import Generation, Piece
from kvist_transformers.serving.limits import BodyLimit, Counted
from kvist_transformers.serving.protocol import Body, ChatBody, CompletionBody
from kvist_transformers.serving.service import Service
from kvist_transformers.serving.streams import DONE, DisconnectedError, EventStream, event, unless_gone

#: What a client is counted under that has gone before its answer.
GONE = 499


def make_app(service: Service) -> FastAPI:
    """The ASGI application; it starts and stops the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    # The pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="Kvist", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(Counted, metrics=service.metrics)
    _answer_errors(app)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await _answer(service, request, body, *await unless_gone(request, service.completion(body)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return await _answer(service, request, body, *await unless_gone(request, service.chat(body)))

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name != service.name:
            raise ApiError(404, f"the model {name!r} is not served here", code="model_not_found", param="model")
        return _model(service)

    @app.get("/health")
    async def health() -> Any:
        service.require_open()
        routes = service.worker.routes
        return {"status": "ok"} if routes is None else {"status": "ok", "prefill": "ok" if routes.open else "lost"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics_page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/iteration_stats")
    async def iteration_stats(since: int = -1) -> Response:
        return Response(service.iterations.since(since), media_type=MEDIA_TYPE)

    @app.get("/v1/kv_events")
    async def kv_events() -> Response:
        feed = await service.feed()
        return EventStream(feed.__aiter__(), lambda: service.end_feed(feed))

    return app


def _model(service: Service) -> dict[str, Any]:
    spec = service.worker.engine.spec
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvist",
        "max_model_len": spec.max_tokens,
    }


async def _answer(service: Service, request: Request, body: Body, generation: Generation, form: Form) -> Response:
    streams = False
    try:
        pieces = aiter(generation)
        # Until something is there the answer can still be an error with a status of its own.
        first = await unless_gone(request, anext(pieces))
        if body.stream:
            streams = True

            async def close() -> None:
                service.end(generation)

            return EventStream(_events(first, pieces, generation, form, body.wants_usage), close)
        choices = await unless_gone(request, _collected(first, pieces, len(generation.choices)))
        return JSONResponse(form.whole(choices, generation.usage))
    finally:
        if not streams:
            service.end(generation)


async def _collected(first: Piece, pieces: AsyncIterator[Piece], count: int) -> list[list[Piece]]:
    """All pieces of each choice."""
    choices: list[list[Piece]] = [[] for _ in range(count)]
    choices[first.index].append(first)
    async for piece in pieces:
        choices[piece.index].append(piece)
    return choices


async def _events(
    first: Piece, pieces: AsyncIterator[Piece], generation: Generation, form: Form, wants_usage: bool
) -> AsyncIterator[bytes]:
    yield b"".join(event(chunk) for chunk in [*form.opening(len(generation.choices)), form.chunk(first)])
    try:
        async for piece in pieces:
            yield event(form.chunk(piece))
        if wants_usage:
            yield event(form.usage(generation.usage))
    except Exception as error:
        yield event(as_api_error(error).body())
    yield DONE


def _answer_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answer(from_validation(error.errors()))

    @app.exception_handler(DisconnectedError)
    async def gone(_: Request, __: DisconnectedError) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        return answer(ApiError(404, f"there is no {request.url.path} here", hint="see /openapi.json"))

    @app.exception_handler(405)
    async def not_allowed(request: Request, _: Exception) -> Response:
        return answer(ApiError(405, f"{request.method} is not for {request.url.path}", hint="see /openapi.json"))

    async def http_error(_: Request, error: Any) -> Response:
        return answer(ApiError(error.status_code, str(error.detail)))

    for status in (400, 413):
        app.add_exception_handler(status, http_error)

    @app.exception_handler(KvistError)
    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return answer(as_api_error(error))
