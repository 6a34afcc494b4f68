"""What of an exchange runs inside a compiled program.

Each device of the node copies its own shards to the host. It does so inside ``shard_map`` over the
mesh of the node, which :class:`NodeMesh` adds where the program is not in one already. The handlers
of ``slots.cc`` copy on the platforms that they support, and host callbacks do elsewhere. Both fill
and read the same slots.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jdaso.cluster.ending import at_exit
from jdaso.cluster.local_devices import await_programs
from jdaso.core.block_format import format_of
from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    HEADER_SIZE,
    UNCOUNTED,
    BoundExchange,
    PostedExchange,
    SentLeaf,
)
from jdaso.core.tree import finite_leaves
from jdaso.core.types import JdasoError, Leaves, Number, PyTree
from jdaso.core.wire import (
    WIRE_OF_BITS,
    Wire,
    pack,
    sum_dtype,
    sum_padding,
    unpadded,
    wire_dtypes,
)
from jdaso.exchange.host import slots
from jdaso.exchange.host.layout import Layout, Memory, Shardings, make_layout
from jdaso.exchange.host.slots import Table

REPLICATED = PartitionSpec()
Specs = tuple[PartitionSpec, ...]
_TOKEN = jax.ShapeDtypeStruct((), jnp.int32)
_HEADER = jax.ShapeDtypeStruct((HEADER_SIZE,), jnp.float32)
# The most arrays of a call that orders them. To compile one with n aliases, XLA takes a time like
# n^3.
_ALIASES = 64


class Program:
    """The devices, the slots and the shardings of an exchange.

    Args:
        table: The slots of the exchange.
        compiled: Whether compiled handlers copy the leaves, which they can do in parts, or else
            host callbacks.
        shardings: Of the leaves, on the mesh of the node.
        reporting: A context in which an error of a host callback is reported.
    """

    def __init__(
        self,
        table: Table,
        compiled: bool,
        shardings: Shardings,
        reporting: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self.table, self.reporting, self.compiled = table, reporting, compiled
        self.shardings, self.mesh = shardings, NodeMesh(shardings)
        self.computes = compiled and slots.computes(self.mesh.platform)
        self.pins = compiled and self.mesh.platform == "gpu"
        #: Waits for all programs that were dispatched.
        self.complete = functools.partial(await_programs, shardings.mesh.local_devices)
        # Registered after the objects that programs call, so it runs before their exit functions.
        self._forget = at_exit(self.complete)

    def close(self) -> None:
        """Waits for all programs that were dispatched. Posts and collects fail from then on."""
        self._forget()
        self.complete()
        self.table.close()
        self.mesh.compiled.clear()  # with host callbacks, a cycle that Python cannot collect

    def register(self, params: PyTree) -> list[str]:
        """Finds and checks the shardings of parameters; see :meth:`Shardings.register`."""
        if self.shardings.given and self.mesh.inside():
            raise ValueError(
                "init inside shard_map gets shards, and shardings are of whole parameters: call "
                "it outside of shard_map."
            )
        return self.shardings.register(params)

    def finite_leaves(self, leaves: Leaves) -> jax.Array:
        """Whether all numbers of each leaf are finite on all devices of the node, bool[leaves]."""
        if not (self.computes and leaves) or self.mesh.device_index() is None:
            return self.mesh.all_devices(finite_leaves(leaves))
        # JAX cannot differentiate the call, and need not, because a bool has no derivative.
        call = jax.ffi.ffi_call(slots.FINITE_LEAVES, jax.ShapeDtypeStruct((len(leaves),), bool))
        # The handler does not know float8.
        narrow = [x.astype(jnp.bfloat16) if x.dtype.itemsize < 2 else x for x in leaves]
        return self.mesh.all_devices(call(*map(lax.stop_gradient, narrow)))

    def posted_layout(self, sent: Sequence[SentLeaf], posted: PostedExchange) -> Layout:
        """The layout of leaves that a checkpoint has saved."""
        whole = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in sent]
        names, shapes, _ = zip(*sent, strict=True)
        wires = tuple(WIRE_OF_BITS[bits] for bits in posted.block_bits)
        dtypes = wire_dtypes([leaf.dtype for leaf in posted.leaves], wires)
        specs = tuple(self.shardings.specs(names, whole))
        return make_layout(shapes, dtypes, specs, self.shardings.mesh, posted.relative, names)


class ProgramLeaves(BoundExchange):
    """The calls of an exchange of some leaves, whose state has one leaf: a token, an int32 scalar.

    The token orders the calls of a program. ``check(number, leaves, wire)`` may refuse a post.

    Attributes:
        specs: the shardings of the leaves. Without names they are replicated.
    """

    def __init__(
        self,
        program: Program,
        names: Sequence[str],
        leaves: Leaves,
        check: Callable[[Number, Leaves, Wire], None] = lambda *_: None,
    ):
        self._program, self.mesh, self._table = program, program.mesh, program.table
        self.in_parts, self._check = program.compiled, check
        inside = self.mesh.inside()
        self.specs: Specs = (REPLICATED,) * len(leaves)
        if names:
            self.specs = tuple(program.shardings.specs(names, leaves, inside))
        self._shapes = tuple(x.shape for x in leaves)
        if inside:
            each = zip(self._shapes, self.specs, strict=True)
            self._shapes = tuple(self.mesh.whole_shape(*pair) for pair in each)
        self._dtypes, self._names = [x.dtype for x in leaves], tuple(names)

    def post(
        self,
        state: PyTree,
        number: Number,
        step: Number,
        leaves: Leaves,
        header: jax.Array,
        wire: Wire,
        relative: bool = False,
    ) -> tuple[PyTree, Number]:
        if header.shape != (HEADER_SIZE,):
            raise ValueError(f"header must be float32[{HEADER_SIZE}], got {header.shape}.")
        self._check(number, leaves, wire)
        specs, mesh = self.specs, self._program.shardings.mesh
        dtypes = wire_dtypes(self._dtypes, wire)
        layout = make_layout(self._shapes, dtypes, specs, mesh, relative, self._names)
        pinned = self._program.pins and not is_uncounted(number)  # whose memory is used once
        index = self._table.register(layout, pinned)
        (token,) = jax.tree.leaves(state)
        token = self.mesh.run(
            ("post", layout, specs),
            functools.partial(self._post, layout, index),
            (REPLICATED, REPLICATED, REPLICATED, REPLICATED, list(specs)),
            REPLICATED,
            *(token, jnp.asarray(number, jnp.int32), jnp.asarray(step, jnp.int32), header, leaves),
        )
        # The condition always holds. It makes the next exchange depend on this one, so that all
        # nodes post in the same order.
        return _with(state, token), jnp.where(token >= 0, number + 1, number)

    def _post(
        self, layout: Layout, index: int, token, number, step, header, leaves: Leaves
    ) -> jax.Array:
        """Posts the leaves of one device. Returns the token."""
        program, device, size = self._program, self.mesh.device_index(), self.mesh.size
        assert device is not None

        def packed(x, dtype):
            if program.compiled:
                # A leaf that stays in its dtype is copied as it lies in memory, and compiled code
                # rounds while it copies, where it can.
                narrow = dtype == jnp.bfloat16 or format_of(dtype)
                if x.dtype == dtype or (program.computes and x.dtype == jnp.float32 and narrow):
                    return x
            return pack(x, dtype)

        def post(token, header):
            arrays = [packed(*each) for each in zip(leaves, layout.dtypes, strict=True)]
            if not program.compiled:
                return self._post_by_callback(index, token, device, number, step, header, arrays)
            # XLA is told of no side effects. The token orders the calls.
            call = jax.ffi.ffi_call(slots.POST, _TOKEN)
            scalars = (jnp.asarray(x, jnp.int32) for x in (token, device, number, step))
            attributes = {"table": np.int32(self._table.id), "layout": np.int32(index)}
            return call(*scalars, header, *arrays, **attributes)

        if size == 1:
            return post(token, header)
        if layout.replicated and not layout.joined:
            turn = jnp.maximum(number, 0) % size
            token = lax.cond(device == turn, lambda t: post(t, header), lambda t: t, token)
        else:
            # All processes post, also those that send nothing: they receive the sums.
            token = post(token, _same_header(header, device, self.mesh.axes))
        # Another device may be the first to post the next exchange. It has to wait for this one.
        return lax.pmax(token, self.mesh.axes)

    def _post_by_callback(
        self, index: int, token, device, number, step, header, arrays: Leaves
    ) -> jax.Array:
        table = self._table

        def call(token, device, number, step, header, *arrays):
            device, number = int(device), int(number)
            with self._program.reporting():
                # NumPy, because JAX's operations would wait for the program that waits here.
                header = np.asarray(header)
                slot = table.begin_post(number, int(step), header, index)
                try:
                    memory = table.memory(slot)
                    shards = memory.layout.shards_of(device)
                    sends = memory.layout.sent_by(device, number)
                    for shard, sent, array in zip(shards, sends, arrays, strict=True):
                        if sent:
                            memory.leaves[shard][...] = np.asarray(array) if header[0] > 0 else 0
                except BaseException:
                    table.discard(slot)
                    raise
                table.end_post(slot)
            return token

        return io_callback(call, token, token, device, number, step, header, *arrays)

    def collect(
        self, state: PyTree, number: Number, like: Leaves, part: slice | None = None
    ) -> tuple[Leaves, jax.Array, PyTree]:
        part = part or slice(0, len(self.specs))
        specs, shapes = self.specs[part], [x.shape for x in like]
        if self.mesh.device_index() is None:
            mesh, each = self._program.shardings.mesh, zip(shapes, specs, strict=True)
            shapes = [NamedSharding(mesh, spec).shard_shape(shape) for shape, spec in each]
        sums = tuple(
            jax.ShapeDtypeStruct(shape, sum_dtype(x.dtype))
            for shape, x in zip(shapes, like, strict=True)
        )
        uncounted, last = is_uncounted(number), part.stop == len(self.specs)
        (token,) = jax.tree.leaves(state)
        found, header, token = self.mesh.run(
            ("collect", sums, specs, part.start, last, uncounted),
            functools.partial(self._collect, sums, part.start, last, uncounted),
            (REPLICATED, REPLICATED),
            (list(specs), REPLICATED, REPLICATED),
            *(token, jnp.asarray(number, jnp.int32)),
        )
        return found, header, _with(state, token)

    def _collect(
        self, sums: Sequence, first: int, last: bool, uncounted: bool, token, number
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Collects a part of the sums on one device."""
        device = self.mesh.device_index()
        assert device is not None
        if self._program.compiled:
            call = jax.ffi.ffi_call(slots.COLLECT, [_TOKEN, _HEADER, *sums])
            attributes = {"table": self._table.id, "first": first, "last": last}
            attributes["readers"] = self.mesh.local_size
            integers = {name: np.int32(value) for name, value in attributes.items()}
            token, header, *total = call(token, jnp.asarray(device, jnp.int32), number, **integers)
        else:
            total, header, token = self._collect_by_callback(sums, token, device, number)
        if uncounted and self.mesh.size > 1:
            # The next consensus has the same number. It begins when all devices have this one.
            token = lax.pmax(token, self.mesh.axes)
        return list(total), header, token

    def _collect_by_callback(
        self, shapes: Sequence, token, device, number
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        table, readers = self._table, self.mesh.local_size

        def call(token, device, number):
            with self._program.reporting():
                slot, read = table.begin_collect(int(number), readers), False
                try:
                    memory = table.memory(slot)
                    found = memory.sums_of(int(device))
                    _check_sizes(int(number), memory, int(device), shapes)
                    # A float64 leaf on a narrower wire arrives as float32.
                    each = zip(found, shapes, strict=True)
                    sums = [np.array(unpadded(s, x.shape), x.dtype) for s, x in each]
                    header, read = np.array(slot.total, np.float32), True
                finally:
                    table.end_collect(slot, readers, read)
            return [*sums, header, token]

        *sums, header, token = call_back(call, [*shapes, _HEADER, token], token, device, number)
        return sums, header, token

    def rounded(self, leaves: Leaves, bits: int | jax.Array) -> Leaves:
        if not self._program.computes or any(x.dtype != jnp.float32 for x in leaves):
            return super().rounded(leaves, bits)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        return [*jax.ffi.ffi_call(slots.ROUND, shapes)(jnp.asarray(bits, jnp.int32), *leaves)]

    def after(
        self, state: PyTree, part: slice, lists: list[Leaves], into: list[Leaves] | None = None
    ) -> tuple[PyTree, list[Leaves]]:
        specs = [list(self.specs[part][: len(arrays)]) for arrays in lists]

        def order(token, lists, into):
            places, treedef = jax.tree.flatten(lists if into is None else into)
            copied = [] if into is None else jax.tree.leaves(lists)
            ordered: list[jax.Array] = []
            for first in range(0, len(places), _ALIASES):
                run = [token, *places[first : first + _ALIASES]]
                shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in run]
                aliases = {i: i for i in range(len(run))}
                call = jax.ffi.ffi_call(slots.ORDER, shapes, input_output_aliases=aliases)
                token, *results = call(*run, *copied[first : first + _ALIASES])
                ordered += results
            return token, jax.tree.unflatten(treedef, ordered)

        (token,) = jax.tree.leaves(state)
        token, lists = self.mesh.run(
            ("order", tuple(map(tuple, specs)), into is None),
            order,
            (REPLICATED, specs, None if into is None else specs),
            (REPLICATED, specs),
            *(token, lists, into),
        )
        return _with(state, token), lists

    def per_shard(self, function: Callable, part: slice) -> Callable:
        if self.mesh.device_index() is not None:
            return function
        leaves = list(self.specs[part])

        def is_leaves(node: PyTree) -> bool:
            return isinstance(node, list) and len(node) == len(leaves)

        def specs_of(tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda node: leaves if is_leaves(node) else REPLICATED, tree, is_leaf=is_leaves
            )

        def call(*args):
            results = specs_of(jax.eval_shape(function, *args))
            return self.mesh.mapped(function, specs_of(args), results)(*args)

        return call


def _with(state: PyTree, token: jax.Array) -> PyTree:
    return jax.tree.map(lambda _: token, state)


def is_uncounted(number: Number) -> bool:
    return isinstance(number, int) and number == UNCOUNTED


def call_back(call: Callable, like: Sequence, *args: Any) -> Leaves:
    """The arrays that a function of the host returns, which have given shapes and dtypes.

    They cross as vectors. In a program for several TPUs, JAX gives the sharding of the first result
    to all of them, and it must fit their ranks.
    """
    vectors = [jax.ShapeDtypeStruct((math.prod(x.shape),), x.dtype) for x in like]
    found = io_callback(lambda *args: [*map(np.ravel, call(*args))], vectors, *args)
    return [vector.reshape(x.shape) for vector, x in zip(found, like, strict=True)]


def _check_sizes(number: int, memory: Memory, device: int, shapes: Sequence) -> None:
    """Raises JdasoError unless the sums fit these shapes. Compiled code checks the same."""
    sums, dtypes = memory.sums_of(device), memory.layout.dtypes
    if len(sums) != len(shapes):
        raise JdasoError(
            f"exchange {number} has {len(sums)} leaves, the program copies {len(shapes)}"
        )
    for i, (total, dtype, x) in enumerate(zip(sums, dtypes, shapes, strict=True)):
        size, most = math.prod(x.shape) * total.itemsize, total.nbytes
        if not most - sum_padding(dtype) <= size <= most:
            raise JdasoError(
                f"leaf {i} of exchange {number} has {most} bytes, the program copies {size}"
            )


def _same_header(header: jax.Array, device: Number, axes: Sequence[str]) -> jax.Array:
    """One header for all devices, whose last number depends on the shared state of all of them.

    Inside the user's own ``shard_map``, each device has computed it from its own shards.
    """
    assert AGREEMENT_NAMES[-1] == "the shared state"
    shared = lax.psum(header[-1].astype(jnp.int32), axes) & 0xFFFFFF
    first = lax.psum(jnp.where(device == 0, header, jnp.zeros_like(header)), axes)
    return first.at[-1].set(shared.astype(jnp.float32))


class NodeMesh:
    """The devices of a node, on which a program runs a function with ``shard_map``.

    A program may be in a ``shard_map`` over the mesh already. Then each device has its own index,
    and the leaves are its shards.
    """

    def __init__(self, shardings: Shardings):
        self._shardings = shardings
        self.size = shardings.mesh.size
        self.platform = shardings.mesh.devices.flat[0].platform
        self.local_size = len(shardings.mesh.local_devices)  # those of this process
        # Outside jit, a function that is compiled again for every call would be slow, and JAX would
        # keep what it compiles of each exchange.
        self.compiled: dict[Any, Callable] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        return self._shardings.mesh.axis_names

    def device_index(self) -> jax.Array | int | None:
        """The index of this device, None outside of ``shard_map`` over several devices.

        Raises:
            ValueError: inside ``shard_map`` over some of the mesh's axes.
        """
        if self.size == 1:
            return 0
        bound = []
        for axis in self.axes:
            with contextlib.suppress(NameError):  # raised outside of shard_map over the axis
                lax.axis_index(axis)
                bound.append(axis)
        if not bound:
            return None
        if len(bound) < len(self.axes):
            raise ValueError(
                f"inside shard_map over {bound}, an exchange with a mesh of the axes {self.axes} "
                "cannot be used: use shard_map over all of them, or none."
            )
        return lax.axis_index(self.axes)

    def inside(self) -> bool:
        """Whether the program is in ``shard_map`` over several devices."""
        return self.size > 1 and self.device_index() is not None

    def all_devices(self, flag: jax.Array) -> jax.Array:
        """Whether a flag holds on all devices. Outside ``shard_map`` they have the same flag."""
        if not self.inside():
            return flag
        return lax.pmin(flag.astype(jnp.int32), self.axes) > 0

    def whole_shape(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """The shape of a leaf whose shards have this shape."""
        sizes = [1] * len(shape)
        for axis, names in enumerate(spec):
            for name in jax.tree.leaves(names):
                sizes[axis] *= self._shardings.mesh.shape[name]
        return tuple(n * size for n, size in zip(shape, sizes, strict=True))

    def run(
        self, key: Any, function: Callable, in_specs: PyTree, out_specs: PyTree, *args: Any
    ) -> Any:
        """Applies a function to the shards of each device.

        Args:
            key: equal for equal functions, which are compiled only once.
            in_specs: ``PartitionSpec`` of the arguments.
            out_specs: ``PartitionSpec`` of the results.
        """
        inside = self.device_index() is not None
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if inside and (traced or self.size > 1):
            return function(*args)
        if not inside:
            self._check_axes(args)
        if key not in self.compiled:
            mapped = function if inside else self.mapped(function, in_specs, out_specs)
            self.compiled[key] = jax.jit(mapped)
        if not (inside or traced):
            mesh = self._shardings.mesh
            args = jax.device_put(args, jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs))
        return self.compiled[key](*args)

    def _check_axes(self, args: PyTree) -> None:
        """Raises ValueError in a program, or for explicit arrays, of a mesh with other axes."""
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
        meshes = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
        for mesh in (jax.sharding.get_abstract_mesh(), *meshes):
            if mesh.axis_names and mesh.axis_names != self.axes:
                raise ValueError(
                    f"the program has a mesh with the axes {mesh.axis_names}, and the exchange one "
                    f"with {self.axes}: tell the exchange how the parameters lie on your mesh, as "
                    "in mpi_exchange(topology, shardings=NamedSharding(mesh, PartitionSpec())) if "
                    "they are replicated. For jax.pmap, pass axis_name='local'."
                )

    def mapped(self, function: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        # JAX cannot know that exchanged values are equal on all nodes, so check_vma=False.
        mesh = self._shardings.mesh
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
