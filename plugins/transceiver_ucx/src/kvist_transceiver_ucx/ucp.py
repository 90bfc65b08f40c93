"""UCP as a few objects. Nothing here waits; what is under way is a :class:`Request` that its owner asks about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvist.errors import TransferError
from kvist_transceiver_ucx import declarations as d
from kvist_transceiver_ucx.declarations import ffi
from kvist_transceiver_ucx.library import Library

#: Where neither the caller nor an environment variable says otherwise. cma is slower than plain shared memory here, and
#: UCX prefers it. Without MM_ERROR_HANDLING, endpoints that report failures would not use shared memory at all.
DEFAULTS: Mapping[str, str] = {"TLS": "^cma", "MM_ERROR_HANDLING": "y", "KEEPALIVE_INTERVAL": "2s"}

_AM_ID = 11
#: Memory handles can be given with an operation from this version on; before, UCX looks them up.
_MEMH_SINCE = (1, 14)


class UcxError(TransferError):
    """UCX refused a call. ``status``: its code."""

    def __init__(self, library: Library, status: int, doing: str) -> None:
        self.status = status
        super().__init__(f"UCX could not {doing}: {describe(library, status)}")


def describe(library: Library, status: int) -> str:
    """UCX's words for a status."""
    text: bytes = ffi.string(library.lib.ucs_status_string(status))
    return f"{text.decode()} ({status})"


class Request:
    """Something that UCX does meanwhile. ``keep``: memory that it reads until then."""

    __slots__ = ("_lib", "_pointer", "keep")

    def __init__(self, lib: Any, pointer: Any, keep: object = None) -> None:
        self._lib, self._pointer, self.keep = lib, pointer, keep

    def poll(self) -> int | None:
        """The final status, or ``None`` while it is under way. Must not be called again after the final one."""
        status: int = self._lib.ucp_request_check_status(self._pointer)
        if status == d.IN_PROGRESS:
            return None
        self._lib.ucp_request_free(self._pointer)
        return status


class Context:
    """UCX with one set of settings. Closed last of all."""

    def __init__(self, library: Library, settings: Mapping[str, str]) -> None:
        self.library, self.lib = library, library.lib
        self._memories: list[Memory] = []
        config = ffi.new("ucp_config_t **")
        self.check(self.lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "read its configuration")
        try:
            self.settings = {
                **{key: value for key, value in DEFAULTS.items() if f"UCX_{key}" not in os.environ},
                **settings,
            }
            for key, value in self.settings.items():
                status = self.lib.ucp_config_modify(config[0], key.encode(), str(value).encode())
                self.check(status, f"set {key}={value}")
            params = ffi.new("ucp_params_t *")
            params.field_mask = d.PARAM_FEATURES | d.PARAM_MT_WORKERS_SHARED
            params.features = d.FEATURE_RMA | d.FEATURE_AM | d.FEATURE_WAKEUP
            # Memory is registered by other threads than the one that owns the worker.
            params.mt_workers_shared = 1
            handle = ffi.new("ucp_context_h *")
            self.check(self.lib.ucp_init_version(1, 13, params, config[0], handle), "start")
        finally:
            self.lib.ucp_config_release(config[0])
        self.handle = handle[0]

    def check(self, status: int, doing: str) -> None:
        if status != d.OK:
            raise UcxError(self.library, status, doing)

    def request(self, pointer: Any, doing: str, keep: object = None) -> Request | None:
        """What a non-blocking call returned: ``None`` when it is done already."""
        if pointer == ffi.NULL:
            return None
        value = int(ffi.cast("intptr_t", pointer))
        if d.ERR_LAST <= value < 0:
            raise UcxError(self.library, value, doing)
        return Request(self.lib, pointer, keep)

    def lanes(self) -> str:
        """The setting TLS that is in force."""
        return self.settings.get("TLS") or os.environ.get("UCX_TLS", "all")

    def devices(self) -> frozenset[str]:
        """Kinds of memory that this UCX can move, of those that Kvist names."""
        found = ffi.new("ucp_context_attr_t *")
        found.field_mask = d.ATTR_MEMORY_TYPES
        self.check(self.lib.ucp_context_query(self.handle, found), "say what memory it can move")
        return frozenset(name for name, bit in d.MEMORY_TYPES.items() if found.memory_types >> bit & 1)

    def map(self, address: int | None, byte_count: int, device: str) -> Memory:
        """Register memory of the caller, or allocate some where ``address`` is ``None``."""
        memory = Memory(self, address, byte_count, device)
        self._memories.append(memory)
        return memory

    def close(self) -> None:
        for memory in self._memories:
            self.lib.ucp_mem_unmap(self.handle, memory.handle)
        self._memories.clear()
        self.lib.ucp_cleanup(self.handle)


class Memory:
    """Registered memory. ``parameters``: of operations that read it."""

    def __init__(self, context: Context, address: int | None, byte_count: int, device: str) -> None:
        self._context, self.allocated, self.byte_count = context, address is None, byte_count
        params = ffi.new("ucp_mem_map_params_t *")
        params.field_mask = d.MEM_MAP_PARAM_LENGTH | d.MEM_MAP_PARAM_MEMORY_TYPE
        params.length, params.memory_type = byte_count, d.MEMORY_TYPES[device]
        if address is None:
            params.field_mask |= d.MEM_MAP_PARAM_FLAGS
            params.flags = d.MEM_MAP_ALLOCATE
        else:
            params.field_mask |= d.MEM_MAP_PARAM_ADDRESS
            params.address = ffi.cast("void *", address)
        handle = ffi.new("ucp_mem_h *")
        doing = f"{'allocate' if address is None else 'register'} {byte_count} bytes of {device!r} memory"
        context.check(context.lib.ucp_mem_map(context.handle, params, handle), doing)
        self.handle = handle[0]
        found = ffi.new("ucp_mem_attr_t *")
        found.field_mask = d.MEM_ATTR_ADDRESS
        context.check(context.lib.ucp_mem_query(self.handle, found), "say where memory lies")
        self.address = int(ffi.cast("uintptr_t", found.address))
        self.parameters = ffi.new("ucp_request_param_t *")
        self.parameters.op_attr_mask = d.OP_MEMORY_TYPE
        self.parameters.memory_type = d.MEMORY_TYPES[device]
        if context.library.version >= _MEMH_SINCE:
            self.parameters.op_attr_mask |= d.OP_MEMH
            self.parameters.memh = self.handle

    def key(self) -> bytes:
        """What a peer needs to write here."""
        lib = self._context.lib
        buffer, size = ffi.new("void **"), ffi.new("size_t *")
        self._context.check(lib.ucp_rkey_pack(self._context.handle, self.handle, buffer, size), "pack a memory key")
        packed = bytes(ffi.buffer(buffer[0], size[0]))
        lib.ucp_rkey_buffer_release(buffer[0])
        return packed


class Worker:
    """Progress and connections. One thread at a time may call it.

    on_message: gets the header and the data of everything that arrives, inside of ``progress``; it must only put them
        away.
    """

    def __init__(self, context: Context, on_message: Callable[[bytes, bytes], None]) -> None:
        self.context, self._lib = context, context.lib
        self._endpoints: dict[int, Endpoint] = {}
        self._made = 0
        params = ffi.new("ucp_worker_params_t *")
        params.field_mask = d.WORKER_PARAM_THREAD_MODE
        handle = ffi.new("ucp_worker_h *")
        context.check(self._lib.ucp_worker_create(context.handle, params, handle), "make a worker")
        self.handle = handle[0]

        def arrived(_: Any, header: Any, header_length: int, data: Any, length: int, __: Any) -> int:
            on_message(bytes(ffi.buffer(header, header_length)), bytes(ffi.buffer(data, length)) if length else b"")
            return d.OK

        def failed(number: Any, _: Any, status: int) -> None:
            endpoint = self._endpoints.get(int(ffi.cast("uintptr_t", number)))
            if endpoint is not None:
                endpoint.failure = status

        # Called by UCX as long as the worker lives.
        self._arrived = ffi.callback("ucp_am_recv_callback_t", arrived)
        self._failed = ffi.callback("ucp_err_handler_cb_t", failed)
        handler = ffi.new("ucp_am_handler_param_t *")
        handler.field_mask = d.AM_HANDLER_ID | d.AM_HANDLER_FLAGS | d.AM_HANDLER_CB
        handler.id, handler.flags, handler.cb = _AM_ID, d.AM_WHOLE_MSG, self._arrived
        context.check(self._lib.ucp_worker_set_am_recv_handler(self.handle, handler), "take messages")

    def event_descriptor(self) -> int:
        """Readable when there may be something to do, after :meth:`arm`. Belongs to the worker."""
        found = ffi.new("int *")
        self.context.check(self._lib.ucp_worker_get_efd(self.handle, found), "give an event descriptor")
        return int(found[0])

    def address(self) -> bytes:
        address, size = ffi.new("ucp_address_t **"), ffi.new("size_t *")
        self.context.check(self._lib.ucp_worker_get_address(self.handle, address, size), "give its address")
        packed = bytes(ffi.buffer(address[0], size[0]))
        self._lib.ucp_worker_release_address(self.handle, address[0])
        return packed

    def progress(self) -> bool:
        """Do what can be done now; did anything happen?"""
        return bool(self._lib.ucp_worker_progress(self.handle))

    def arm(self) -> bool:
        """May the caller sleep on the event descriptor? Not while something has happened already."""
        status = self._lib.ucp_worker_arm(self.handle)
        if status == d.ERR_BUSY:
            return False
        self.context.check(status, "arm its event descriptor")
        return True

    def connect(self, address: bytes) -> Endpoint:
        """An endpoint that leads to the worker at ``address``, and says when it is broken."""
        self._made += 1
        params, keep = ffi.new("ucp_ep_params_t *"), ffi.from_buffer(address)
        params.field_mask = d.EP_PARAM_REMOTE_ADDRESS | d.EP_PARAM_ERR_MODE | d.EP_PARAM_ERR_HANDLER
        params.address = ffi.cast("ucp_address_t *", keep)
        params.err_mode = d.ERR_MODE_PEER
        params.err_handler.cb = self._failed
        params.err_handler.arg = ffi.cast("void *", self._made)
        handle = ffi.new("ucp_ep_h *")
        self.context.check(self._lib.ucp_ep_create(self.handle, params, handle), "connect")
        endpoint = self._endpoints[self._made] = Endpoint(self, handle[0], self._made)
        return endpoint

    def forget(self, endpoint: Endpoint) -> None:
        """For endpoints: it has been closed."""
        self._endpoints.pop(endpoint.number, None)

    def close(self) -> None:
        """All endpoints must have been closed."""
        self._lib.ucp_worker_destroy(self.handle)


@attrs.define(eq=False)
class Endpoint:
    """One way to another worker. ``failure``: the status with which UCX said that it is broken, else 0."""

    worker: Worker
    handle: Any
    number: int
    failure: int = 0
    _keys: list[Any] = attrs.Factory(list)

    def key(self, packed: bytes) -> Any:
        """The peer's memory key, for :meth:`put`. Lives as long as the endpoint."""
        context, handle = self.worker.context, ffi.new("ucp_rkey_h *")
        status = context.lib.ucp_ep_rkey_unpack(self.handle, ffi.from_buffer(packed), handle)
        context.check(status, "use the peer's memory key")
        self._keys.append(handle[0])
        return handle[0]

    def flush(self) -> Request | None:
        """Done when all that was put before is in the peer's memory."""
        context = self.worker.context
        return context.request(context.lib.ucp_ep_flush_nbx(self.handle, _nothing), "flush")

    def send(self, header: bytes, data: bytes) -> Request | None:
        """A message, which the other side gets whole."""
        context, begin, body = self.worker.context, ffi.from_buffer(header), ffi.from_buffer(data)
        pointer = context.lib.ucp_am_send_nbx(self.handle, _AM_ID, begin, len(header), body, len(data), _eager)
        return context.request(pointer, "send a message", (header, data, begin, body))

    def close(self) -> Request | None:
        """End at once: whatever is under way over this endpoint ends too. Release it when that is done."""
        context = self.worker.context
        return context.request(context.lib.ucp_ep_close_nbx(self.handle, _force), "close a connection")

    def release(self) -> None:
        """It has been closed, and all its requests have ended."""
        for key in self._keys:
            self.worker.context.lib.ucp_rkey_destroy(key)
        self._keys.clear()
        self.worker.forget(self)


def prove(context: Context) -> None:
    """Write eight bytes to ourselves and look at them, before a peer relies on it.

    Raises TransferError when the library does not do what it should.
    """
    memory = context.map(None, 16, "cpu")
    worker = Worker(context, lambda *_: None)
    endpoint = worker.connect(worker.address())
    seen = ffi.cast("unsigned char *", memory.address)
    ffi.buffer(seen, 16)[:] = bytes(range(1, 9)) + bytes(8)
    lib, key = context.lib, endpoint.key(memory.key())
    source = ffi.cast("void *", memory.address)
    pointer = lib.ucp_put_nbx(endpoint.handle, source, 8, memory.address + 8, key, memory.parameters)
    for doing in (context.request(pointer, "write"), endpoint.flush()):
        _wait(worker, doing, "write to itself")
    same = bytes(ffi.buffer(seen, 16)[8:]) == bytes(range(1, 9))
    _wait(worker, endpoint.close(), "close a connection to itself")
    endpoint.release()
    worker.close()
    if not same:
        raise TransferError(
            f"UCX {context.library.version_text} at {context.library.path} did not write what it was told to",
            hint="use another build of UCX",
        )


def _wait(worker: Worker, request: Request | None, doing: str) -> None:
    until_s = time.monotonic() + 10.0
    while request is not None:
        worker.progress()
        status = request.poll()
        if status is not None:
            worker.context.check(status, doing)
            return
        if time.monotonic() > until_s:
            raise TransferError(f"UCX did not {doing} within 10 s", hint="use another build of UCX, or other settings")


_nothing = ffi.new("ucp_request_param_t *")
_eager = ffi.new("ucp_request_param_t *", {"op_attr_mask": d.OP_FLAGS, "flags": d.AM_SEND_EAGER})
_force = ffi.new("ucp_request_param_t *", {"op_attr_mask": d.OP_FLAGS, "flags": d.EP_CLOSE_FORCE})
