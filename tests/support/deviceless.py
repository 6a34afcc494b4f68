"""Compiles training steps for accelerators that this machine does not have, and reads the programs.

XLA compiles for an H100 on any machine that has the wheels jax-cuda12-plugin and jax-cuda12-pjrt of
the version of jax, and for a TPU v5e with libtpu. The exchange is that of ``mpi_exchange`` between
two nodes, whose messages are never sent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jdaso
from jdaso.exchange.host.layout import Shardings
from jdaso.exchange.host.program import Program
from jdaso.exchange.host.slots import Table, register_handlers
from jdaso.exchange.mpi import _MpiExchange, _Settings

#: An H100 SXM, reduced to what the compiler needs of XLA's h100_sxm.txtpb.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
#: Looks at what is live in a branch before it copies, so that less is copied. Not the default.
REGION_ANALYSIS = {"xla_gpu_copy_insertion_use_region_analysis": True}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
SGD = optax.sgd(1e-2, momentum=0.9)


def devices(platform: str, count: int) -> list:
    """Devices of one host; for "cuda" and "tpu", devices that can only be compiled for."""
    if platform == "cpu":
        return jax.devices("cpu")[:count]
    if platform == "tpu":
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes compile
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[:count]
    return topologies.get_topology_desc(
        "h100", platform="cuda", target_config=H100, topology=f"1x1x{count}"
    ).devices


def reason_to_skip(platform: str) -> str | None:
    """What is missing on this machine to compile for a platform; None if it can."""
    module = {"cuda": "jax_cuda12_plugin", "tpu": "libtpu", "cpu": "jax"}[platform]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed: run make test-accelerators"
    return None


def exchange(mesh: Mesh, native: bool, shardings=None) -> jdaso.Exchange:
    """An mpi_exchange of two nodes that never sends a message. Its program is the real one."""

    def nothing(*_, **__):
        return None

    if native:
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        register_handlers(*(("cpu", "") if on_cpu else ("CUDA", "_cuda")))
    program = Program(Table(), native, Shardings(shardings, mesh), contextlib.nullcontext)
    program._forget()  # these devices run nothing that could be waited for at exit
    topology = SimpleNamespace(num_nodes=2, joined=False)
    transport = SimpleNamespace(at_close=tuple, begin_run=nothing)
    collectives = SimpleNamespace(compare=nothing, warn_if_different=nothing)
    settings = _Settings(None, 1 << 26, True, "")
    return _MpiExchange(settings, topology, program, transport, collectives, nothing)


#: Averagings by name, of an exchange.
AVERAGINGS = {
    "daso": lambda ex: jdaso.daso(ex, 4, 1),
    "daso, guard off": lambda ex: jdaso.daso(ex, 4, 1, nonfinite="off"),
    "daso, 4 fragments": lambda ex: jdaso.daso(ex, 12, 1, fragments=4),
    "daso, bfloat16": lambda ex: jdaso.daso(ex, 4, 1, wire="bfloat16"),
    "daso, int8": lambda ex: jdaso.daso(ex, 4, 1, wire="int8"),
    "daso, float4": lambda ex: jdaso.daso(ex, 4, 1, wire="float4"),
    "dasgd": lambda ex: jdaso.dasgd(ex, 4, 1),
    "easgd": lambda ex: jdaso.easgd(ex, alpha=0.1, schedule=jdaso.constant(4, 1)),
    "diloco": lambda ex: jdaso.diloco(ex, 4, OUTER, 1, warmup=0),
}


class Case(NamedTuple):
    """A training step to compile.

    Attributes:
        name: of :data:`AVERAGINGS`, or "none".
        layout: of the parameters over several devices: "replicated", "sharded" under plain jit,
            "shard_map" for the same in the user's own shard_map, or "axis" for an axis_exchange
            between the devices, each of which is a node.
        native: whether compiled code makes the copies, where it can, and not host callbacks.
    """

    name: str
    platform: str = "cuda"
    devices: int = 1
    layout: str = "replicated"
    native: bool = True
    region_analysis: bool = True
    optimizer: optax.GradientTransformation = SGD
    megabytes: float = 16
    leaves: int = 40


class Figures(NamedTuple):
    """What a compiled program says of itself.

    Attributes:
        temporary: memory for temporary arrays, in sizes of the parameters on one device.
        copies_at_each_step: copies of arrays of 1024 numbers or more outside of conditionals
            and loops.
        operations: how often each operation appears in the optimized HLO.
        results: bytes of the results, in sizes of the arguments that they replace.
        waits: conditionals and loops outside of others, at each of which XLA's host code waits.
        calls: custom calls.
        captured: custom calls in command buffers, where they would run when they are captured only.
        text: the optimized HLO.
    """

    temporary: float
    copies_at_each_step: int
    operations: dict[str, int]
    results: float
    waits: int
    calls: int
    captured: int
    text: str

    def count(self, operation: str) -> int:
        """How often an operation appears, also in its asynchronous form."""
        return self.operations.get(operation, 0) + self.operations.get(f"{operation}-start", 0)


def compile_case(case: Case) -> Figures:
    """Lowers and compiles the step of a case."""
    mesh = Mesh(devices(case.platform, case.devices), ("local",), axis_types=(AxisType.Auto,))
    cells = round(case.megabytes * 250_000 / case.leaves / 64)
    shape = (64, cells + -cells % 4)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(case.leaves)]
    specs = [PartitionSpec()] * case.leaves
    if case.layout in ("sharded", "shard_map"):
        kinds = PartitionSpec(), PartitionSpec("local"), PartitionSpec(None, "local")
        specs = [kinds[i % len(kinds)] for i in range(case.leaves)]
    if case.layout == "axis":
        ex = jdaso.axis_exchange("local", case.devices)
        specs = [PartitionSpec("local")] * case.leaves
    else:
        native = case.native and case.platform != "tpu"
        ex = exchange(mesh, native, specs if case.layout != "replicated" else None)
    tx = case.optimizer
    if case.name != "none":
        tx = jdaso.chain(tx, AVERAGINGS[case.name](ex))

    def step(params, state, grads):
        if case.name != "none":
            return jdaso.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.default_device(jax.devices("cpu")[0]):
        state = jax.eval_shape(tx.init, params)

    def spec_of(path, x):
        """Arrays like the parameters are sharded like them; they are in lists of that length."""
        if case.layout == "axis":
            return PartitionSpec("local")
        index = [key.idx for key in path if hasattr(key, "idx")]
        return specs[index[-1]] if x.ndim == 2 and index else PartitionSpec()

    state_specs = jax.tree_util.tree_map_with_path(spec_of, state)
    if case.layout == "axis":  # each device has a node's arrays as its row

        def of_rows(params, state, grads):
            args = jax.tree.map(lambda x: x[0], (params, state, grads))
            return jax.tree.map(lambda x: x[None], step(*args))

        run, params, state = (
            of_rows,
            *jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((case.devices, *x.shape), x.dtype), (params, state)
            ),
        )
    else:
        run = step
    if case.layout in ("shard_map", "axis"):
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
            check_vma=False,
        )

    def placed(tree, specs):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
            *(tree, specs),
        )

    args = placed(params, specs), placed(state, state_specs), placed(params, specs)
    held = sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in args[0])
    options = {}
    if case.platform == "cuda":
        options = REGION_ANALYSIS if case.region_analysis else {}
    jitted = jax.jit(run, donate_argnums=(0, 1))
    return compile_step(jitted, args, case.platform, options, held)


def compile_resnet(name: str, image: int = 224, batch: int = 64) -> Figures:
    """Compiles the training step of ResNet-50 for one H100. It takes minutes."""
    import models
    from flax import nnx

    mesh = Mesh(devices("cuda", 1), ("local",), axis_types=(AxisType.Auto,))
    model = nnx.eval_shape(lambda: models.create("resnet50", 3, 1000, seed=0, dtype=jnp.bfloat16))
    graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    stats = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
    tx = SGD
    if name != "none":
        tx = jdaso.chain(SGD, AVERAGINGS[name](exchange(mesh, native=True)))

    def loss(params, images, labels):
        logits = nnx.merge(graphdef, params, stats, copy=True)(images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, state, images, labels):
        _, grads = jdaso.local_value_and_grad(loss, mesh)(params, images, labels)
        if name != "none":
            return jdaso.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    data = (
        jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (params, state, *data),
    )
    held = sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in jax.tree.leaves(params))
    return compile_step(jax.jit(step, donate_argnums=(0, 1)), args, "cuda", {}, held)


def compile_step(jitted, args, platform, options, parameter_bytes) -> Figures:
    """Compiles a jitted function for devices that need not exist."""
    with tempfile.TemporaryDirectory() as folder, _callbacks_for_cuda(), _no_cache():
        lowered = jitted.trace(*args).lower(lowering_platforms=(platform,))
        if platform == "cuda":
            options = {"xla_gpu_autotune_level": 0, "xla_dump_to": folder, **options}
            lowered._lowering.compile_args.update(host_callbacks=[])
        compiled = lowered.compile(compiler_options=options)
        thunks = [
            p.read_text() for p in Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        ]
    text, memory = compiled.as_text(), compiled.memory_analysis()
    operations: dict[str, int] = {}
    for name in re.findall(r"^\s*(?:ROOT )?%?\S+ = .*?[\])}] ([a-z][a-z0-9-]*)\(", text, re.M):
        operations[name] = operations.get(name, 0) + 1
    entry = text[text.index("\nENTRY ") :]
    copies = re.findall(r"= \w+\[(\d[\d,]*)\]\S* copy(?:-start)?\(", entry)
    large = [dims for dims in copies if np.prod([*map(int, dims.split(","))]) >= 1024]
    waits, calls, captured = _read_thunks(max(thunks, key=len)) if thunks else (0, 0, 0)
    return Figures(
        memory.temp_size_in_bytes / parameter_bytes,
        len(large),
        operations,
        memory.output_size_in_bytes / memory.argument_size_in_bytes,
        *(waits, calls, captured, text),
    )


def _read_thunks(text: str) -> tuple[int, int, int]:
    """Waits at the top level, custom calls, and those in command buffers, of a list of thunks."""
    waits = calls = captured = 0
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)", line)
        if not found:
            continue
        depth, kind = len(found[1]), found[2]
        above = [each for each in above if each[0] < depth]
        waits += kind in ("kConditional", "kWhile") and not above
        calls += kind == "kCustomCall"
        captured += kind == "kCustomCall" and any(k == "kCommandBuffer" for _, k in above)
        above.append((depth, kind))
    return waits, calls, captured


@contextlib.contextmanager
def _callbacks_for_cuda():
    """Lets JAX lower host callbacks for CUDA without a GPU, where "gpu" has no backend to mean."""
    from jax._src import xla_bridge

    before = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda p: "cuda" if p == "gpu" else before(p)
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = before


@contextlib.contextmanager
def _no_cache():
    """Compiles with optimizations, and writes the program to no cache."""
    cached = jax.config.jax_enable_compilation_cache
    before = cached, jax.config.read("jax_disable_most_optimizations")
    names = "jax_enable_compilation_cache", "jax_disable_most_optimizations"
    for name in names:
        jax.config.update(name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
