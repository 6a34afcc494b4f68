"""Two nodes train a small network on handwritten digits with DASO.

    mpiexec -n 2 python examples/minimal.py

Each process is a node and trains on its own share of the images. Every 4 steps the nodes send
their parameters. One step later the mean corrects each node. A node waits only for an exchange
that takes longer than this step. Without mpiexec there is one node, which has all images.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdaso

EPOCHS, BATCH = 10, 16

topology = jdaso.discover_topology()  # the nodes of this job and their devices
exchange = jdaso.mpi_exchange(topology)  # sends arrays between nodes, in the background
averaging = jdaso.daso(exchange, period=4, delay=1, merge="delta")
tx = jdaso.chain(optax.sgd(0.02, momentum=0.9), averaging)

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(labels))  # the same on all nodes
test, train = order[:360], order[360:]
steps = len(train) // (BATCH * topology.num_nodes)  # of an epoch, as many on each node
share = train[topology.node :: topology.num_nodes][: steps * BATCH]  # of this node


def logits_of(params, pixels):
    hidden = jax.nn.relu(pixels @ params["hidden"] + params["bias"])
    return hidden @ params["out"]


def loss_fn(params, pixels, labels):
    logits = logits_of(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, pixels, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, pixels, labels)
    params, opt_state = jdaso.apply_gradients(tx, grads, opt_state, params, value=loss)
    return params, opt_state, loss


@jax.jit
def accuracy(params):
    return jnp.mean(logits_of(params, pixels[test]).argmax(-1) == labels[test])


random = np.random.default_rng(0).normal
params = {"hidden": random(0, 0.1, (64, 64)), "bias": np.zeros(64), "out": random(0, 0.1, (64, 10))}
params = jdaso.broadcast(exchange, jax.tree.map(jnp.float32, params))  # nodes start with the same
opt_state = tx.init(params)
name = f"node {topology.node} of {topology.num_nodes}"
for epoch in range(1, EPOCHS + 1):
    shuffled = np.random.default_rng((epoch, topology.node)).permutation(share)
    for batch in shuffled.reshape(steps, BATCH):
        params, opt_state, loss = train_step(params, opt_state, pixels[batch], labels[batch])
    if epoch % 2 == 0:
        print(f"{name}, epoch {epoch}: loss {loss:.3f}, test accuracy {accuracy(params):.3f}")
params, opt_state = jdaso.drain(tx, opt_state, params)  # merges what is in flight
mean = jdaso.consensus(exchange, params)  # of all nodes, to use and save
print(f"{name} has seen {len(share)} images. Test accuracy of the mean: {accuracy(mean):.3f}")
