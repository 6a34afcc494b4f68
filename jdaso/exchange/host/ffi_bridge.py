"""Copies between a program's arrays and staging buffers by compiled code.

``copies_cpu.cc`` and ``copies_cuda.cc`` define XLA custom calls that copy the leaves and the sums.
They submit what needs Python to the queue of ``ffi_queue.cc``, and threads of :class:`FfiBridge`
execute it. The program itself calls no Python, so JAX dispatches it as fast as a program without
exchanges. Where no compiled code is available, host callbacks do the same and cost more time.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.cluster.ending import at_exit
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED
from jdaso.core.types import Leaves, Number
from jdaso.exchange.host import compiled, ffi_calls
from jdaso.exchange.host.layout import Layout
from jdaso.exchange.host.pinned_memory import PinnedMemory
from jdaso.exchange.host.transport_protocol import Message, Transport

# The longest wait at exit until the last exchanges are posted.
_SHUTDOWN_SECONDS = 5.0
# The kinds of calls, in the order of ffi_queue.h.
_RESERVE, _POST, _COLLECT, _FAIL = range(4)


class _Arguments(ctypes.Structure):
    """The arguments of a call; see ffi_queue.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("argument", ctypes.c_int32),
        ("pin", ctypes.c_int32),
        ("header", ctypes.c_float * HEADER_SIZE),
        ("message", ctypes.c_char * 256),
    )


class FfiBridge:
    """Executes the calls of compiled programs in threads.

    All threads start here, because the interpreter starts none at exit, and a process may reach
    its limit later.

    Args:
        transport: Posts and collects.
        platform: ``cpu`` or ``gpu``.
        devices: Number of local devices.
    """

    def __init__(self, transport: Transport, platform: str, devices: int):
        loaded = compiled.load()
        assert not isinstance(loaded, str)
        self._transport, self._library = transport, loaded
        self._queue = loaded.jdaso_open()
        self._on_cpu = platform == "cpu"
        self._layouts: list[Layout] = []
        self._pinned = PinnedMemory(loaded.jdaso_pin, loaded.jdaso_unpin)
        self._collects: queue.SimpleQueue[tuple[int, _Arguments] | None] = queue.SimpleQueue()
        # A collect may wait for an exchange that another device posts through this queue. Each
        # device waits in one collect, or in two while consensus runs beside a step.
        targets = [self._run, *[self._run_collects] * (2 * devices)]
        self._threads = [
            threading.Thread(target=target, name="jdaso-ffi", daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()
        self._forget = at_exit(self.close)

    def post(
        self, layouts: Sequence[Layout], device: Number, token, message: Message, sends=True
    ) -> tuple[jax.Array, Leaves]:
        """As in :class:`HostCalls`. :meth:`computes_feedback` must hold for feedback."""
        self._layouts += [x for x in layouts if x not in self._layouts]
        indices = np.array([self._layouts.index(x) for x in layouts], np.int32)
        number, step, choice, header, leaves, feedback = message
        scalars = [jnp.asarray(x, jnp.int32) for x in (device, number, step, choice, sends)]
        dtypes = [layout.dtypes for layout in layouts]
        inputs = token, *scalars, header
        return ffi_calls.post(
            inputs, dtypes, leaves, feedback, self._on_cpu, queue=self._queue, layouts=indices
        )

    def computes_feedback(self, dtypes: Sequence[np.dtype]) -> bool:
        """Whether the copies compute error feedback of leaves with these dtypes on the wire."""
        return self._on_cpu and {*dtypes} <= ffi_calls.FEEDBACK_DTYPES

    def collect(
        self,
        readers: int,
        device: Number,
        shapes: Sequence,
        token,
        number,
        part: slice,
        last: bool,
        feedback: tuple[jax.Array, Leaves, Leaves] | None = None,
        keep: bool = False,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """As in :class:`HostCalls`."""
        inputs = token, jnp.asarray(device, jnp.int32), jnp.asarray(number, jnp.int32)
        attributes = {"queue": self._queue, "first": part.start, "last": last, "readers": readers}
        return ffi_calls.collect(inputs, shapes, feedback, keep, attributes)

    order = staticmethod(ffi_calls.order)

    def _run(self) -> None:
        arguments = _Arguments()
        while call := self._library.jdaso_next(self._queue, ctypes.addressof(arguments)):
            copy = _Arguments.from_buffer_copy(arguments)
            if copy.kind == _COLLECT:
                self._collects.put((call, copy))
            else:
                self._execute(call, copy)
        for _ in self._threads[1:]:
            self._collects.put(None)

    def _run_collects(self) -> None:
        while (item := self._collects.get()) is not None:
            self._execute(*item)

    def _execute(self, address: int, call: _Arguments) -> None:
        message, places, header = None, None, None
        try:
            with self._transport.abort_on_error():
                if call.kind == _RESERVE:
                    staging = self._transport.reserve(call.number, self._layouts[call.argument])
                    places = staging.places_to_fill(call.device, call.number)
                elif call.kind == _POST:
                    self._transport.post(call.number, call.step, np.array(call.header, np.float32))
                elif call.kind == _COLLECT:
                    staging, header = self._transport.collect(call.number, call.argument)
                    places = staging.places_to_read(call.device)
                else:
                    self._transport.pending.discard(call.number)
                    raise RuntimeError(call.message.decode())
                if call.pin and call.number != UNCOUNTED:  # whose buffers are used only once
                    self._pinned.add(staging)
        except BaseException as error:  # the program waits for an answer in any case
            message = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        # The places live as long as the buffers.
        at, count = (None, 0) if places is None else (places.ctypes.data, len(places))
        pointer = None if header is None else header.ctypes.data
        self._library.jdaso_complete(self._queue, address, message, at, count, pointer)

    def close(self) -> None:
        """Fails all calls from now on, and ends the threads."""
        self._forget()
        self._library.jdaso_close(self._queue)
        self._library.jdaso_await_copies()
        self._library.jdaso_shut_down(self._queue)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._library.jdaso_fail_taken(self._queue)
