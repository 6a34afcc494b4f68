"""Processes of one host train one model in shared memory: ASSM, PASSM, PASSM+.

    topology = jdaso.discover_topology()
    memory = passm.shared_memory(topology, params)
    order = passm.order_of_use(loss_fn, params, *batch)
    blocks = passm.partition(params, memory.processes, order)
    training = passm.passm(memory, blocks, loss_fn, learning_rate=1.0, momentum=0.9)
    state = training.init()
    for batch in batches:  # those of this process
        state, loss = training.step(state, *batch)
    params = passm.settled(memory)

Kungurtsev et al., Asynchronous Optimization Methods for Efficient Training of Deep Neural Networks
with Guarantees, AAAI 2021.

This entry holds the methods and the shared memory, MPI window and file locks below them. Only
``jdaso/__init__.py`` and ``__main__.py`` import it.
"""

from jdaso.passm.block_gradient import restricted_value_and_grad
from jdaso.passm.layer_blocks import Block, partition
from jdaso.passm.layer_order import order_of_use
from jdaso.passm.memory import Memory, settled, simulated_memory
from jdaso.passm.methods import assm, passm, passm_plus
from jdaso.passm.minibatches import minibatches
from jdaso.passm.mpi_window import server_group, shared_memory
from jdaso.passm.switching import Phase, phases, switches_around
from jdaso.passm.training import State, Training

__all__ = [
    "Block",
    "Memory",
    "Phase",
    "State",
    "Training",
    "assm",
    "minibatches",
    "order_of_use",
    "partition",
    "passm",
    "passm_plus",
    "phases",
    "restricted_value_and_grad",
    "server_group",
    "settled",
    "shared_memory",
    "simulated_memory",
    "switches_around",
]
