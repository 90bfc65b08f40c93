"""Continuous batching of a Hugging Face model on Kvist's paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from kvist.errors import CapacityError, RequestError, StateError
from kvist.iterations.recorder import Iterations
from kvist.registry import Registry
from kvist.restore import RestorePolicy
from kvist.scheduling import AdmissionPolicy, Scheduler, State, Turn
from kvist_transformers.checks import check_given, check_request, refused
from kvist_transformers.disaggregation.port import Port
from kvist_transformers.drafting import Drafter
from kvist_transformers.handle import Handle
from kvist_transformers.inputs import model_inputs
from kvist_transformers.job import EngineJob, Source
from kvist_transformers.packing import PackedLinears
from kvist_transformers.request import Completion, FinishReason, Request, TokenArray
from kvist_transformers.runtime import Runtime
from kvist_transformers.sampling import sample
from kvist_transformers.slots import Slots, SlotTable
from kvist_transformers.speculation import Chosen, Speculation
from kvist_transformers.stats import EngineStats


class Engine:
    """Serves requests on one model. Not thread-safe: one thread calls it; handles may be cancelled between steps.

    model: a Hugging Face causal LM in eval mode on one device. Attached until :meth:`close`, see ``DecoderAdapter``.
    memory: bytes of the cache, an int or a string such as ``"256MiB"``.
    block_tokens: tokens per block.
    backend: name of an attention backend for the family that it serves; the others, or all with ``None``, take the
        best one for the model's device and dtype.
    max_batch_tokens: most tokens computed in one step; longer prompts are computed in chunks.
    max_sequences: most requests running at a time, at most ``max_batch_tokens``.
    admission: which requests may begin beside those that run; ``None`` is the scheduler's own choice.
    drafter: guesses tokens, so that a step can generate several for one request; the tokens are the same as without.
        The engine closes it.
    restore: where sequences of models with sliding windows or states stay resumable; ``None`` is the manager's own
        choice.
    fingerprint: what tells this model's rows from another's; ``None`` samples the weights.
    pack_weights: in bfloat16 on a CPU, give linear layers a kernel of their own and packed copies of their weights, see
        :class:`~kvist_transformers.packing.PackedLinears`: faster, for as many bytes again.
    port: through it requests leave for other processes and come from them; the engine closes it.
    registry: where manager, adapter and backend come from; ``None`` is the process's own.

    Raises PluginError for a model type that no plugin serves, SpecError for a model or size that cannot work,
    CapacityError when ``memory`` cannot hold one block.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str = "256MiB",
        block_tokens: int = 16,
        backend: str | None = None,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        admission: AdmissionPolicy | None = None,
        drafter: Drafter | None = None,
        restore: RestorePolicy | None = None,
        fingerprint: str | None = None,
        pack_weights: bool = False,
        port: Port | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._runtime = runtime = Runtime(
            model,
            memory=memory,
            block_tokens=block_tokens,
            backend=backend,
            restore=restore,
            fingerprint=fingerprint,
            registry=registry,
            drafts=0 if drafter is None else drafter.most,
            storage=None if port is None else port.storage,
        )
        self.spec, self.layout, self.manager = runtime.spec, runtime.layout, runtime.manager
        self.adapter, self.memory, self.backends = runtime.adapter, runtime.memory, runtime.backends
        self.backend_names = runtime.backend_names
        self.stats = EngineStats()
        #: What is recorded of every step, once :meth:`record` was called.
        self.iterations: Iterations | None = None
        try:
            self.scheduler: Scheduler[EngineJob] = Scheduler(
                self.manager,
                max_batch_tokens=max_batch_tokens,
                max_sequences=max_sequences,
                generated=lambda job: self.generated(job)[len(job.given) :],
                admission=admission,
                remote=port,
            )
            self._speculation = None if drafter is None else Speculation(drafter, self.layout)
            self._packed = PackedLinears(model) if pack_weights else None
            # Last, because it begins to answer peers.
            if port is not None:
                port.attach(self.scheduler)
        except BaseException:
            runtime.detach()
            raise
        self._port = port
        self._slots = SlotTable(max_sequences)
        # Slots of the decode rows, for the rows that the batch had when they were made.
        self._decode_slots = np.zeros(0, np.int64)
        self._decode_rows = self.scheduler.batch.slots
        # Those whose caller wants to hear of every token, while they run and when they have ended.
        self._listeners: list[EngineJob] = []
        self._ended: list[EngineJob] = []
        self._closed = False

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, on_tokens: Callable[[Handle, TokenArray], None] | None = None) -> Handle:
        """Queue a request; :meth:`step` runs it.

        on_tokens: called after each step that gave the request new tokens, with the handle and those tokens.

        Raises what :func:`~kvist_transformers.checks.check_request` raises, and CapacityError when an empty cache could
        not hold the request to its end; nothing else is affected then.
        """
        check_request(request, self.spec)
        return self._enter(EngineJob.of(request), on_tokens)

    def prefill(self, request: Request, name: str) -> Handle:
        """Queue a request that leaves when its prompt is computed: it ends with its first token as ``"moved"``, and
        whoever asks the port's peers for ``name`` gets its rows. One that ends with that token does not move.

        Raises what :meth:`submit` raises, and StateError for an engine without a port.
        """
        self._require_port("prefill()")
        check_request(request, self.spec)
        return self._enter(EngineJob.of(request, handover=name))

    def adopt(
        self,
        request: Request,
        source: Source,
        given: TokenArray,
        on_tokens: Callable[[Handle, TokenArray], None] | None = None,
    ) -> Handle:
        """Queue a request whose prompt another engine has computed by :meth:`prefill`, with the tokens that it was
        ``given`` there, which count as its own. What is cached here is not sent. If the rows do not come, they are
        computed here.

        Raises what :meth:`submit` raises, StateError for an engine without a port, and RequestError when nothing is
        left to generate.
        """
        self._require_port("adopt()")
        check_request(request, self.spec)
        check_given(request, given)
        return self._enter(EngineJob.of(request, arrival=source, given=given), on_tokens)

    def _enter(self, job: EngineJob, on_tokens: Callable[[Handle, TokenArray], None] | None = None) -> Handle:
        self._require_open()
        self.scheduler.submit(job)
        if self.iterations is not None:
            job.timer = self.iterations.request(str(job.number))
        handle = Handle(self, job)
        if on_tokens is not None:
            job.on_tokens = lambda _, tokens: on_tokens(handle, tokens)
            self._listeners.append(job)
        self.stats.requests += 1
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request now. What it computed stays reusable."""
        if not handle.done:
            self._finish(handle._job, "cancelled")

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end and return their results in order.

        A request that is refused gives a completion with ``finish_reason == "error"``; the others run.
        """
        results: list[Handle | Completion] = []
        for request in requests:
            try:
                results.append(self.submit(request))
            except (RequestError, CapacityError) as error:
                results.append(refused(request, error))
        while any(isinstance(result, Handle) and not result.done for result in results):
            self.step()
        return [result.completion() if isinstance(result, Handle) else result for result in results]

    def stream(self, request: Request) -> Iterator[int]:
        """Submit a request and yield its tokens as they come, running the engine meanwhile.

        Closing the iterator cancels the request.
        """
        handle = self.submit(request)
        given = 0
        try:
            while not handle.done:
                self.step()
                tokens = handle.tokens
                yield from tokens[given:].tolist()
                given = len(tokens)
            if handle._job.error is not None:
                raise handle._job.error
        finally:
            handle.cancel()

    def record(self, *, source: str = "", keep: int = 4096, file: BinaryIO | None = None) -> Iterations:
        """Record every step and every request from now on; see :class:`~kvist.iterations.recorder.Iterations`."""
        self.iterations = Iterations(self.manager, source=source, keep=keep, file=file)
        self.scheduler.watch(EngineJob.note_phase)
        return self.iterations

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self.scheduler.idle

    def close(self) -> None:
        """Cancel everything and give the model its own attention back. Idempotent."""
        if self._closed:
            return
        for job in self.scheduler.jobs():
            self._finish(job, "cancelled")
        self._closed = True
        if self.iterations is not None:
            self.iterations.close()
        self._runtime.detach()
        if self._packed is not None:
            self._packed.detach()
        if self._speculation is not None:
            self._speculation.close()
        # Last, because it raises while a peer may still write here.
        if self._port is not None:
            self._port.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Admit, run one batch through the model, sample. Returns whether anything ran.

        Raises what the model raises, with every request as it was before; and DeadlockError when others hold pages of
        :attr:`manager` without which no request can go on.
        """
        self._require_open()
        if self._port is not None:
            self._port.poll()
        with torch.inference_mode():
            drafts = {}
            if self._speculation is not None:
                with self.stats.timed("draft_ns"):
                    drafts = self._speculation.drafts(self.scheduler, self._slots)
            with self.stats.timed("plan_ns"):
                turn = self.scheduler.turn(drafts)
                for job in self.scheduler.take_refused():
                    self._note_end(job, "error")
            if turn is not None:
                self._run(turn)
                if self.iterations is not None:
                    running, waiting = self.scheduler.running_count, self.scheduler.waiting_count
                    self.iterations.step(turn.step, running=running, waiting=waiting)
        self._count()
        self._deliver()
        return turn is not None

    def _run(self, turn: Turn[EngineJob]) -> None:
        begun = False
        try:
            with self.stats.timed("plan_ns"):
                decode_slots = self._slots_of_rows()
                token_ids, positions, logit_rows = model_inputs(turn, decode_slots, self._slots, self.adapter.device)
            with self.stats.timed("model_ns"):
                self.memory.apply(turn.step)
                begun = True
                logits = self._runtime.forward(turn.step, token_ids, positions, logit_rows)
        except BaseException:
            self.scheduler.abort(turn, ran=begun)
            raise
        last = [chunk for chunk in turn.chunks if chunk.last]
        for chunk in last:
            if chunk.job.slot < 0:
                chunk.job.slot = self._slots.take(chunk.job.request, chunk.job.seed, chunk.job.given)
                chunk.job.logprobs = self._slots.logprobs[chunk.job.slot]
        chosen = Chosen(decode_slots, last)
        if len(logit_rows):
            with self.stats.timed("sample_ns"):
                columns = self._slots.sampling(chosen.slots)
                tokens = sample(logits, columns, self._slots.count[chosen.slots] + chosen.offsets)
        else:
            tokens = np.empty(0, np.int32)
        with self.stats.timed("complete_ns"):
            before = self._slots.count[chosen.rows]
            accepted = chosen.keep(tokens, self._slots)
            self.scheduler.complete(turn, accepted)
            if self._speculation is not None:
                self._speculation.learn(turn.chunks, accepted)
            self.stats.steps += 1
            self.stats.computed_tokens += turn.step.token_count
            self.stats.generated_tokens += int((self._slots.count[chosen.rows] - before).sum())
            # Those who do not ask for logarithms pay nothing for them.
            wanted = np.flatnonzero(self._slots.top_logprobs[chosen.slots] >= 0)
            if len(wanted):
                self._slots.note_logprobs(
                    chosen.slots[wanted], logits[torch.from_numpy(wanted).to(logits.device)], tokens[wanted]
                )
            self._end_finished(chosen.rows)
            self._hand_over([chunk.job for chunk in last])

    def _slots_of_rows(self) -> Slots:
        """Slots of the decode rows in the batch's order; made anew only after rows came or went."""
        rows = self.scheduler.batch.slots
        if rows is not self._decode_rows:
            self._decode_rows = rows
            self._decode_slots = np.array([job.slot for job in self.scheduler.decoding], np.int64)
        return self._decode_slots

    def _end_finished(self, slots: Slots) -> None:
        """End the jobs of those slots whose newest token was their last."""
        ended = self._slots.ended(slots)
        if ended.any():
            by_slot = {job.slot: job for job in self.scheduler.decoding}
            stopped = self._slots.stopped(slots)
            for row in np.flatnonzero(ended).tolist():
                self._finish(by_slot[int(slots[row])], "stop" if stopped[row] else "length")

    def _hand_over(self, jobs: list[EngineJob]) -> None:
        """Let those go whose prompts are computed and that are to go on elsewhere."""
        for job in jobs:
            if job.handover is not None and job.state is State.DECODE:
                assert self._port is not None
                self._port.send(job.handover, self.scheduler.detach(job))
                self._note_end(job, "moved")

    def _deliver(self) -> None:
        for job in list(self._listeners):
            if job.state is State.DECODE:
                self._notify(job)
        # One by one: what an exception of a callback leaves over is delivered after the next step.
        while self._ended:
            self._notify(self._ended.pop(0))

    def _notify(self, job: EngineJob) -> None:
        tokens = self.generated(job)[job.delivered :]
        if len(tokens) and job.on_tokens is not None:
            job.delivered += len(tokens)
            job.on_tokens(job, tokens)

    def _finish(self, job: EngineJob, reason: FinishReason) -> None:
        self.scheduler.finish(job)
        self._note_end(job, reason)

    def _note_end(self, job: EngineJob, reason: FinishReason) -> None:
        """The scheduler has ended the job: keep its output, give its slot back."""
        if self._speculation is not None:
            self._speculation.forget(job.number)
        job.output = self.generated(job)
        job.finish_reason = reason
        if job.slot >= 0:
            self._slots.give(job.slot)
            job.slot = -1
        self.stats.finished += 1
        if job.timer is not None:
            job.timer.finish(
                reason,
                prompt_tokens=len(job.prompt),
                reused_tokens=max(0, job.reused_tokens),
                generated_tokens=len(job.output),
            )
        if job.on_tokens is not None:
            self._listeners.remove(job)
            if reason != "cancelled":
                self._ended.append(job)

    def _count(self) -> None:
        counts = self.scheduler.stats
        self.stats.prompt_tokens, self.stats.reused_tokens = counts.prompt_tokens, counts.reused_tokens
        self.stats.pauses = counts.pauses + counts.suspensions
        self.stats.drafted_tokens, self.stats.accepted_tokens = counts.drafted, counts.accepted

    def generated(self, job: EngineJob) -> TokenArray:
        """What a job has generated so far, whether it runs, waits or has ended."""
        return job.output if job.slot < 0 else self._slots.generated(job.slot)

    def _require_port(self, call: str) -> None:
        self._require_open()
        if self._port is None:
            raise StateError(f"{call} of an engine without a port", hint="make it with Engine(..., port=Port(...))")

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the engine is closed")
