"""Continuous batching of a Hugging Face model on Kvist's paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from kvist.attention.families import Backends, page_layout
from kvist.errors import CapacityError, KvistError, RequestError, SpecError, StateError
from kvist.layout import Layout
from kvist.manager import Plan, Run
from kvist.memory.device import DeviceMemory
from kvist.registry import Registry, default_registry
from kvist.restore import RestorePolicy
from kvist.step import Step
from kvist_transformers.adapter import model_fingerprint
from kvist_transformers.admission import check_request, refused, shortage_error
from kvist_transformers.backends import choose_backends
from kvist_transformers.handle import Handle
from kvist_transformers.request import Completion, FinishReason, Request, TokenArray, draw_seed
from kvist_transformers.sampling import sample
from kvist_transformers.scheduling import Job, Scheduler, as_runs
from kvist_transformers.slots import SlotTable
from kvist_transformers.stats import EngineStats
from kvist_transformers.units import parse_bytes


class Engine:
    """Serves requests on one model. Not thread-safe: one thread calls it; handles may be cancelled between steps.

    model: a Hugging Face causal LM in eval mode on one device. Attached until :meth:`close`, see ``DecoderAdapter``.
    memory: bytes of the cache, an int or a string such as ``"256MiB"``.
    block_tokens: tokens per block.
    backend: name of an attention backend for the family that it serves; the others, or all with ``None``, take the
        best one for the model's device and dtype.
    max_batch_tokens: most tokens computed in one step; longer prompts are computed in chunks.
    max_sequences: most requests running at a time, at most ``max_batch_tokens``.
    restore: where sequences of models with sliding windows or states stay resumable; ``None`` is the manager's own
        choice.
    fingerprint: what tells this model's rows from another's; ``None`` samples the weights.
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
        restore: RestorePolicy | None = None,
        fingerprint: str | None = None,
        registry: Registry | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_batch_tokens:
            raise SpecError(f"max_sequences={max_sequences} must be in 1 .. max_batch_tokens={max_batch_tokens}")
        registry = registry or default_registry()
        config = model.config.to_dict()
        dtype = str(model.dtype).removeprefix("torch.")
        entry = registry.cache_manager(str(config.get("model_type")))
        spec = entry.resolve(entry.info.spec_factory)(
            config, block_tokens=block_tokens, dtype=dtype, fingerprint=fingerprint or model_fingerprint(model)
        )
        adapter_target = entry.info.adapters.get("transformers")
        if adapter_target is None:
            raise SpecError(f"cache manager {entry} has no adapter for transformers", hint="use it with another host")
        self.spec = spec
        self.adapter = entry.resolve(adapter_target)(model, spec)
        try:
            needs = self.adapter.needs
            chosen = choose_backends(registry, needs, device=str(self.adapter.device), dtype=dtype, name=backend)
            self.backend_names = {family: each.info.name for family, each in chosen.items()}
            classes = {family: each.resolve(each.info.factory) for family, each in chosen.items()}
            self.layout = Layout.build(spec, parse_bytes(memory), page_layout(needs, classes))
            self.memory = DeviceMemory(self.layout, self.adapter.device)
            self.backends = Backends(self.memory, needs, classes)
            policy = {} if restore is None else {"restore": restore}
            self.manager = entry.resolve(entry.info.manager_factory)(self.layout, **policy)
        except BaseException:
            self.adapter.detach()
            raise
        self.adapter.bind(self.backends)
        self.max_batch_tokens = max_batch_tokens
        self.stats = EngineStats()
        self._scheduler = Scheduler(block_tokens)
        self._slots = SlotTable(max_sequences)
        self._batch = self.manager.decode_batch()
        self._decode_slots = np.zeros(0, np.int64)
        self._ended: list[Job] = []
        self._next_id = 0
        self._closed = False

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, on_tokens: Callable[[Handle, TokenArray], None] | None = None) -> Handle:
        """Queue a request; :meth:`step` runs it.

        on_tokens: called after each step that gave the request new tokens, with the handle and those tokens.

        Raises what :func:`~kvist_transformers.admission.check_request` raises; nothing else is affected then.
        """
        self._require_open()
        check_request(request, self.layout)
        job = Job(self._next_id, request, draw_seed(request.sampling), request.tokens)
        handle = Handle(self, job)
        if on_tokens is not None:
            job.on_tokens = lambda _, tokens: on_tokens(handle, tokens)
        self._next_id += 1
        self._scheduler.waiting.append(job)
        self.stats.requests += 1
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request now. What it computed stays reusable."""
        if not handle.done:
            self._finish(handle._job, "cancelled")
            self._rebuild_rows()

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

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self._scheduler.idle

    def close(self) -> None:
        """Cancel everything and give the model its own attention back. Idempotent."""
        if self._closed:
            return
        for job in [*self._scheduler.decode, *self._scheduler.prefill, *self._scheduler.waiting]:
            self._finish(job, "cancelled")
        self._closed = True
        self.adapter.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Admit, run one batch through the model, sample. Returns whether anything ran."""
        self._require_open()
        with torch.inference_mode():
            with self.stats.timed("plan_ns"):
                self._admit()
                planned = self._plan()
                if planned is None:
                    return False
                chosen, plan = planned
                step = plan.commit()
                token_ids, positions, logit_rows, ready = self._inputs(step, plan.runs, chosen)
            begun = False
            try:
                with self.stats.timed("model_ns"):
                    self.memory.apply(step)
                    begun = True
                    self.backends.begin(step)
                    logits = self.adapter.forward(token_ids, positions, logit_rows)
                    self.memory.save(step)
            except BaseException:
                self.manager.cancel(step, ran=begun)
                self._take_back()
                raise
            with self.stats.timed("complete_ns"):
                self.manager.complete(step)
                self.stats.steps += 1
                self.stats.computed_tokens += step.token_count
                for job, count in chosen:
                    job.computed_tokens += count
            if len(logit_rows):
                self._sample(logits, ready)
        self._deliver()
        return True

    def _admit(self) -> None:
        scheduler = self._scheduler
        for job in scheduler.candidates():
            if self._slots.free_count == 0 and job.slot < 0:
                break
            if len(self._scheduler.decode) + sum(each.remaining for each in scheduler.prefill) >= self.max_batch_tokens:
                break
            if scheduler.held_back(job):
                continue
            try:
                job.sequence = self.manager.open(job.tokens, scope=job.request.scope)
            except KvistError as error:
                self._finish(job, "error", error)
                continue
            scheduler.waiting.remove(job)
            scheduler.prefill.append(job)
            scheduler.prefill.sort(key=lambda each: each.arrival)
            job.phase = "prefill"
            if job.slot < 0:
                job.slot = self._slots.take(job.request, job.seed)
            if job.reused_tokens < 0:
                job.reused_tokens = job.sequence.reused
                self.stats.prompt_tokens += len(job.tokens)
                self.stats.reused_tokens += job.sequence.reused
        scheduler.crowded = scheduler.crowded and scheduler.running_count > 0

    def _plan(self) -> tuple[list[tuple[Job, int]], Plan] | None:
        """A plan that fits, after pausing as many of the youngest requests as it takes; ``None`` for nothing to do."""
        budget = self.max_batch_tokens
        while self._scheduler.running_count:
            chosen = self._scheduler.runs(budget)
            plan = self.manager.plan(as_runs(chosen), decode=self._batch)
            if plan.fits:
                return chosen, plan
            if self._scheduler.running_count > 1:
                self._pause(self._scheduler.youngest())
                self._scheduler.crowded = True
            elif chosen and chosen[0][1] > 1:
                budget = chosen[0][1] // 2
            else:
                self._finish(self._scheduler.youngest(), "error", shortage_error(self.layout, plan.shortages))
                self._rebuild_rows()
        return None

    def _inputs(
        self, step: Step, runs: list[Run], chosen: list[tuple[Job, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Job]]:
        """Token ids, positions and the rows that need logits: decode rows, then prompts that end in this step."""
        jobs = {id(job.sequence): job for job, _ in chosen}
        decode_rows = len(self._decode_slots)
        parts = [self._slots.last[self._decode_slots]]
        logit_rows = list(range(decode_rows))
        ready = []
        end = decode_rows
        for run in runs:
            job, count = jobs[id(run.sequence)], run.new_tokens
            begin = run.sequence.computed
            parts.append(job.tokens[begin : begin + count].astype(np.int64))
            end += count
            if begin + count == len(job.tokens):
                ready.append(job)
                logit_rows.append(end - 1)
        device = self.adapter.device
        token_ids = torch.from_numpy(np.concatenate(parts)).to(device)
        positions = torch.from_numpy(step.positions).to(device)
        return token_ids, positions, torch.tensor(logit_rows, dtype=torch.int64, device=device), ready

    def _sample(self, logits: torch.Tensor, ready: list[Job]) -> None:
        """Next token of every decode row and of every prompt that has just been computed."""
        with self.stats.timed("sample_ns"):
            slots = np.concatenate([self._decode_slots, np.array([job.slot for job in ready], np.int64)])
            tokens = sample(logits, self._slots.sampling(slots), self._slots.count[slots])
        with self.stats.timed("complete_ns"):
            ended = self._slots.append(slots, tokens)
            self.stats.generated_tokens += len(tokens)
            for job in ready:
                self._scheduler.prefill.remove(job)
                self._scheduler.decode.append(job)
                job.phase = "decode"
                self._batch.join(job.sequence)
            if ended.any():
                by_slot = {job.slot: job for job in self._scheduler.decode}
                stopped = self._slots.stopped(slots)
                for row in np.flatnonzero(ended).tolist():
                    self._finish(by_slot[int(slots[row])], "stop" if stopped[row] else "length")
            if ready or ended.any():
                self._rebuild_rows()

    def _deliver(self) -> None:
        for job in list(self._scheduler.decode):
            self._notify(job)
        # One by one: what an exception of a callback leaves over is delivered after the next step.
        while self._ended:
            self._notify(self._ended.pop(0))

    def _notify(self, job: Job) -> None:
        if job.on_tokens is not None:
            tokens = self.generated(job)[job.delivered :]
            if len(tokens):
                job.delivered += len(tokens)
                job.on_tokens(job, tokens)

    # ------------------------------------------------------------------ life of a job

    def _pause(self, job: Job) -> None:
        """Give a job's pages up; it is recomputed later and continues with the same tokens."""
        self._release(job)
        job.tokens = np.concatenate([job.request.tokens, self.generated(job)])
        job.phase = "waiting"
        job.pauses += 1
        self.stats.pauses += 1
        self._scheduler.requeue(job)
        self._rebuild_rows()

    def _take_back(self) -> None:
        """After a failed step: pause the jobs whose states it may have overwritten. The manager suspended them."""
        for job in [*self._scheduler.decode, *self._scheduler.prefill]:
            if job.sequence is not None and job.sequence.suspended:
                self._pause(job)

    def _finish(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
        job.output = self.generated(job)
        self._release(job)
        job.phase = "done"
        job.finish_reason = reason
        job.error = error
        if job.slot >= 0:
            self._slots.give(job.slot)
            job.slot = -1
        self._scheduler.crowded = False
        self.stats.finished += 1
        if job.on_tokens is not None and reason != "cancelled":
            self._ended.append(job)

    def _release(self, job: Job) -> None:
        """Leave the lists and close the sequence, publishing what it computed."""
        if job.sequence is not None:
            if job.phase == "decode":
                # What was generated becomes known, so that others can reuse it.
                job.sequence.extend(self.generated(job)[job.sequence.known - len(job.request.tokens) :])
            if job.sequence.batch is not None:
                self._batch.leave(job.sequence)
            self.manager.close(job.sequence)
            job.sequence = None
        self._scheduler.remove(job)

    def _rebuild_rows(self) -> None:
        """Slots of the decode rows in the batch's order; only after rows came or went."""
        slots = {id(job.sequence): job.slot for job in self._scheduler.decode}
        self._decode_slots = np.array([slots[id(sequence)] for sequence in self._batch.sequences], np.int64)

    def generated(self, job: Job) -> TokenArray:
        """What a job has generated so far, whether it runs, waits or has ended."""
        return job.output if job.slot < 0 else self._slots.generated(job.slot)

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the engine is closed")
