"""What stands behind the endpoints: takes requests while there is room for them, and ends them when it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from kvist.errors import KvistError
from kvist_transformers.request import Request
from kvist_transformers.serving.answers import ChatForm, CompletionForm
from kvist_transformers.serving.errors import ApiError, as_api_error
from kvist_transformers.serving.generation import Choice, Generation
from kvist_transformers.serving.kv_events import Feed
from kvist_transformers.serving.metrics import Reading, ServerMetrics
from kvist_transformers.serving.prompts import COMPLETION_TOKENS, Prompts, end_tokens
from kvist_transformers.serving.protocol import Body, ChatBody, CompletionBody
from kvist_transformers.serving.text import decoder
from kvist_transformers.serving.worker import EngineError, Update, Worker


class Service:
    """One model behind one engine.

    worker: the service's from now on; its engine records iterations. name: what clients call the model.
    max_in_flight: requests that wait or run, choices counted one by one; more are sent away.
    """

    def __init__(self, worker: Worker, model: Any, tokenizer: Any, *, name: str, max_in_flight: int) -> None:
        self.name = name
        self.metrics = ServerMetrics()
        engine = worker.engine
        self.iterations = engine.iterations or engine.record(source=name)
        self.worker = worker
        self.draining = False
        #: Seconds since 1970.
        self.created = int(time.time())
        self._prompts = Prompts(tokenizer, engine, end_tokens(model, tokenizer))
        self._decode = decoder(tokenizer)
        self._max_in_flight = max_in_flight
        self._generations: set[Generation] = set()
        self._feeds: set[Feed] = set()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        #: Text of single tokens, special ones included.
        self.text_of = (lambda ids: backend.decode(ids, skip_special_tokens=False)) if backend else tokenizer.decode

    # ------------------------------------------------------------------ requests

    async def completion(self, body: CompletionBody) -> tuple[Generation, CompletionForm]:
        """Begin to answer. Raises ApiError; the caller ends the generation with :meth:`end`."""
        self._check(body)
        prompts = await self._prompts.of_completion(body)
        limit = body.max_tokens or COMPLETION_TOKENS
        requests = [self._requests(body, prompt, limit, body.logprobs) for prompt in prompts]
        echoes = [self._decode(prompt) for prompt in prompts for _ in range(body.choice_count)] if body.echo else []
        form = CompletionForm(self.name, self.text_of, echoes=echoes)
        return self._begin(requests, body), form

    async def chat(self, body: ChatBody) -> tuple[Generation, ChatForm]:
        """As :meth:`completion`."""
        self._check(body)
        prompt = await self._prompts.of_chat(body)
        limit = body.max_completion_tokens or body.max_tokens or self._prompts.room(len(prompt))
        requests = self._requests(body, prompt, limit, (body.top_logprobs or 0) if body.logprobs else None)
        return self._begin([requests], body), ChatForm(self.name, self.text_of)

    def _check(self, body: Body) -> None:
        if body.model is not None and body.model != self.name:
            raise ApiError(
                404,
                f"the model {body.model!r} is not served here",
                code="model_not_found",
                param="model",
                hint=f"this server's model is {self.name!r}",
            )
        body.check()

    def _requests(self, body: Body, prompt: Sequence[int], limit: int, logprobs: int | None) -> list[Request]:
        try:
            return self._prompts.requests(body, prompt, limit, logprobs)
        except KvistError as error:
            raise as_api_error(error) from error

    def _begin(self, requests: Sequence[Sequence[Request]], body: Body) -> Generation:
        """One sequence of requests for each prompt, one request for each choice."""
        self.require_open()
        count = sum(map(len, requests))
        if count > self._max_in_flight:
            raise ApiError(400, f"{count} choices at once: this server takes {self._max_in_flight}", param="n")
        if self.worker.in_flight + count > self._max_in_flight:
            raise ApiError(
                429,
                f"{self.worker.in_flight} requests wait or run, and this server takes {self._max_in_flight}",
                code="queue_full",
                hint="try again later",
            )
        choices = []
        for same in requests:
            for number, request in enumerate(same):
                choices.append(Choice(len(choices), request, self._decode, body.stops, counts_prompt=number == 0))
        generation = Generation(self.worker, choices, self._noted)
        self._generations.add(generation)
        try:
            generation.begin()
        except EngineError as error:
            self.end(generation)
            raise ApiError(503, error.message, code="engine_broken", hint=error.hint) from error
        return generation

    def end(self, generation: Generation) -> None:
        """Cancel what has not ended. Idempotent."""
        generation.close()
        self._generations.discard(generation)

    def _noted(self, update: Update) -> None:
        if update.last:
            self.metrics.ended(update)

    # ------------------------------------------------------------------ watching

    def require_open(self) -> None:
        """Raises ApiError while the server shuts down or when the engine is broken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", hint="send it to another server")
        failure = self.worker.failure
        if failure is not None:
            raise ApiError(503, f"the engine is broken: {failure}", code="engine_broken", hint="see the server's log")

    async def feed(self) -> Feed:
        """A new reader of the cache's events; the caller ends it with :meth:`end_feed`."""
        self.require_open()
        feed = Feed(self.worker)
        await feed.open()
        self._feeds.add(feed)
        return feed

    async def end_feed(self, feed: Feed) -> None:
        """Listen no more."""
        self._feeds.discard(feed)
        await feed.close()

    async def metrics_page(self) -> bytes:
        """In Prometheus' format."""
        try:
            reading = await self.worker.ask(lambda engine: Reading.of(engine, self.worker.routes))
        except EngineError:
            reading = None
        return self.metrics.text(reading, self.worker.in_flight)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to compute. In the event loop."""
        self.worker.start()

    def drain(self) -> None:
        """Take nothing new; what runs goes on, readers of events are sent away."""
        self.draining = True
        for feed in list(self._feeds):
            feed.end()

    def cancel_all(self) -> None:
        """End what runs. Each client is told."""
        for generation in list(self._generations):
            generation.close()

    async def stop(self) -> None:
        """End everything and close the engine. Idempotent."""
        self.drain()
        self.cancel_all()
        await self.worker.stop()
        await asyncio.sleep(0)  # the last updates are delivered
        self._prompts.close()
