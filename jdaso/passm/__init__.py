"""Processes of one host train one model in shared memory: ASSM, PASSM, PASSM+.

    topology = jdaso.discover_topology()
    memory = passm.shared_memory(topology, params)
    order = passm.order_of_use(loss_fn, params, *batch)
    blocks = passm.partition(params, memory.processes, order)
    training = passm.passm(memory, blocks, loss_fn, learning_rate=1.0, momentum=0.9)
    state = training.init(*batch)
    for batch in batches:  # those of this process
        state, loss = training.step(state, *batch)
    params = passm.settled(memory)

Kungurtsev et al., Asynchronous Optimization Methods for Efficient Training of Deep Neural Networks
with Guarantees, AAAI 2021.
"""

from jdaso.passm.blocks import Block, order_of_use, partition, restricted_value_and_grad
from jdaso.passm.memory import Memory, server_group, settled, shared_memory, simulated_memory
from jdaso.passm.methods import assm, minibatches, passm, passm_plus, phases, switches_around
from jdaso.passm.training import Phase, State, Training

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
