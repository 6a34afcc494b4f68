"""Concurrent processes of one node train one model in shared memory: ASSM, PASSM, PASSM+.

    topology = jdaso.discover_topology()
    memory = passm.shared_memory(topology, params)
    order = passm.order_of_use(loss_fn, params, *batch)
    blocks = passm.partition(params, memory.processes, order)
    training = passm.passm(memory, blocks, loss_fn, learning_rate=1.0, momentum=0.9)
    state = training.init()
    for batch in batches:  # of this process
        state, loss = training.step(state, *batch)
    params = passm.settled(memory)

Kungurtsev et al., Asynchronous Optimization Methods for Efficient Training of Deep Neural Networks
with Guarantees, AAAI 2021.
"""

from jdaso.passm._blocks import Block as Block
from jdaso.passm._blocks import partition as partition
from jdaso.passm._gradient import restricted_value_and_grad as restricted_value_and_grad
from jdaso.passm._methods import assm as assm
from jdaso.passm._methods import passm as passm
from jdaso.passm._methods import passm_plus as passm_plus
from jdaso.passm._minibatches import minibatches as minibatches
from jdaso.passm._order import order_of_use as order_of_use
from jdaso.passm._switches import Phase as Phase
from jdaso.passm._switches import phases as phases
from jdaso.passm._switches import switches_around as switches_around
from jdaso.passm._training import State as State
from jdaso.passm._training import Training as Training
from jdaso.shared._memory import Memory as Memory
from jdaso.shared._memory import settled as settled
from jdaso.shared._memory import simulated_memory as simulated_memory
from jdaso.shared._servers import server_group as server_group
from jdaso.shared._window import shared_memory as shared_memory

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
