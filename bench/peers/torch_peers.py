"""Measures PyTorch's methods of data-parallel training, on the same network and links as jdaso's.

    python bench/lab/lab.py up --nodes 2 --rate 200mbit --delay 1ms
    python bench/lab/lab.py each --pin -- /path/to/torch/bin/python bench/peers/torch_peers.py

Needs its own environment, not that of the project. The CPU build of PyTorch is enough:

    python -m venv /path/to/torch
    /path/to/torch/bin/pip install torch==2.13.0 numpy pillow
    /path/to/torch/bin/pip install torchft==0.2.0    # only for torchft-diloco

Runs on every node, started with the variables of torch.distributed (RANK, WORLD_SIZE, MASTER_ADDR),
with gloo and one thread. Prints a line of JSON for each variant: the seconds of a step, the images
per second over all nodes, and the bytes that a node sends per step, counted on its eth0. Times are
those of rounds of ``--period`` steps on the slowest node, because only one step of a period
communicates in the last two variants.

- ``none``: no communication
- ``ddp``: DistributedDataParallel, which sums buckets of gradients during the backward pass
- ``ddp-4mb``: the same in buckets of 4 MB instead of 1 and 25, for more overlap
- ``ddp-fp16``: ``ddp`` in half precision (fp16_compress_hook)
- ``powersgd``: gradients as products of rank 2 (powerSGD_hook, from the third step on)
- ``postlocal``: post-local SGD, all parameters averaged once a period (PeriodicModelAverager)
- ``torchft-diloco``: torchft's DiLoCo, with one fragment that is synchronized once a period. It is
  not among the default variants.

With ``--train FOLDER`` it trains on the images of FOLDER/train/<class>/*.jpg until the mean loss
of the last ``--log-every`` steps over all nodes is at most ``--target-loss``, and prints a line of
JSON with each such mean. The time does not contain the reading of the images.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import socket
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import workload
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("none", "ddp", "ddp-4mb", "ddp-fp16", "powersgd", "postlocal")
DILOCO = "torchft-diloco"
TIMEOUT = datetime.timedelta(minutes=5)
POWER_SGD_RANK = 2
# Size of a bucket of gradients in MB, where it differs from torch's default. PowerSGD has one
# bucket. With several, it may start sums in different orders on different nodes. Then gloo aborts.
BUCKETS = {"ddp-4mb": 4, "powersgd": 1024}


class Flatten(nn.Module):
    """Flattens images in the order (height, width, channel)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


def build(network: str, seed: int) -> nn.Sequential:
    """Creates the network with its initial parameters, in torch's layout."""
    modules: list[nn.Module] = []
    layers = workload.NETWORKS[network]
    parameters = workload.first_parameters(network, seed)
    for place, (kind, inputs, outputs) in enumerate(layers):
        values = {name: torch.from_numpy(array) for name, array in parameters[place].items()}
        if kind == "conv":
            layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layer.weight.data = values["kernel"].permute(3, 2, 0, 1).contiguous()
            modules += [layer, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        else:
            if place == 0 or layers[place - 1][0] == "conv":
                modules.append(Flatten())
            layer = nn.Linear(inputs, outputs)
            layer.weight.data = values["kernel"].T.contiguous()
            layer.bias.data = values["bias"]
            modules.append(layer)
            if place < len(layers) - 1:
                modules.append(nn.ReLU())
    return nn.Sequential(*modules)


def make(variant: str, options: argparse.Namespace):
    """Creates model and optimizer of a variant."""
    model = build(options.network, options.seed)
    if variant not in ("none", DILOCO):
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKETS.get(variant))
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, workload.MOMENTUM)
    if variant == "ddp-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif variant == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif variant == "postlocal":
        alone, _ = dist.new_subgroups(group_size=1)  # so that gradients stay on their node
        state = post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=alone, start_localSGD_iter=0
        )
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=options.period, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=averager)
    elif variant == DILOCO:
        start_diloco(model, optimizer, options)
    return model, optimizer


def start_diloco(model, optimizer, options: argparse.Namespace) -> None:
    """Makes the optimizer run torchft's DiLoCo until ``options.ending`` ends.

    Each node is a replica group of one process, with a store of its own. The nodes reach each other
    by their host names. A failed synchronization is an error.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    nodes, node, lighthouse = dist.get_world_size(), dist.get_rank(), [None]
    if node == 0:
        server = LighthouseServer(bind="[::]:0", min_replicas=nodes)
        options.ending.callback(server.shutdown)
        lighthouse = [server.address()]
    dist.broadcast_object_list(lighthouse)
    host = socket.gethostname()
    # The store ends when there is no reference to it.
    options.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        rank=0,
        world_size=1,
        replica_id=str(node),
        min_replica_size=nodes,
        store_addr=host,
        store_port=options.store.port,
        lighthouse_addr=lighthouse[0],
        use_async_quorum=False,
        init_sync=False,
        max_retries=0,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )
    options.ending.callback(manager.shutdown)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    options.ending.enter_context(DiLoCo(manager, [model], optimizer, outer, options.period))


def take_step(model, optimizer, images, labels) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def bytes_sent() -> int:
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def over_nodes(values: list[float], operation=dist.ReduceOp.SUM) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=operation)
    return total.tolist()


def measure(variant: str, options: argparse.Namespace) -> dict:
    """Measures the times of steps on random images."""
    model, optimizer = make(variant, options)
    draw = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(options.batch, 3, 32, 32, generator=draw)
    labels = torch.randint(10, (options.batch,), generator=draw)

    def take_round() -> float:
        start = time.perf_counter()
        for _ in range(options.period):
            take_step(model, optimizer, images, labels)
        return (time.perf_counter() - start) / options.period

    take_round()  # first use of memory and buckets, and PowerSGD's uncompressed first steps
    dist.barrier()
    sent, busy = bytes_sent(), time.process_time()
    mine = [take_round() for _ in range(options.rounds)]
    steps = options.rounds * options.period
    sent, busy = (bytes_sent() - sent) / steps, (time.process_time() - busy) / steps
    seconds = over_nodes(mine, dist.ReduceOp.MAX)
    sent, busy = (total / dist.get_world_size() for total in over_nodes([sent, busy]))
    middle = statistics.median(seconds)
    return {
        "seconds_per_step": {"median": middle, "min": min(seconds), "max": max(seconds)},
        "images_per_second": dist.get_world_size() * options.batch / middle,
        "bytes_sent_per_step": round(sent),
        "processor_seconds_per_step": busy,
        "steps": steps,
    }


def train(variant: str, options: argparse.Namespace) -> dict:
    """Trains until the target loss, and prints the loss over time. Returns the time it took."""
    images, labels = options.images
    model, optimizer = make(variant, options)
    nodes, node = dist.get_world_size(), dist.get_rank()
    losses, step, loss, reached = [], 0, None, False
    dist.barrier()
    start, sent = time.perf_counter(), bytes_sent()
    for epoch in range(options.epochs):
        for places in workload.order(len(images), nodes, node, options.batch, epoch, options.seed):
            batch = workload.scaled(images[places]).transpose(0, 3, 1, 2)
            batch = torch.from_numpy(np.ascontiguousarray(batch))
            losses.append(take_step(model, optimizer, batch, torch.from_numpy(labels[places])))
            step += 1
            if step % options.log_every == 0:
                loss = over_nodes([float(torch.stack(losses).mean())])[0] / nodes
                losses.clear()
                seconds = time.perf_counter() - start
                say({"variant": variant, "step": step, "seconds": seconds, "loss": loss})
                reached = loss <= options.target_loss
                if reached:
                    break
        if reached:
            break
    total = time.perf_counter() - start
    return {
        "reached": reached,
        "target_loss": options.target_loss,
        "loss": loss,
        "seconds": total,
        "images_per_second": nodes * options.batch * step / total,
        "bytes_sent_per_step": round(over_nodes([(bytes_sent() - sent) / step])[0] / nodes),
        "steps": step,
    }


def say(line: dict) -> None:
    """Prints a line of JSON on the first node."""
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variants", nargs="+", default=VARIANTS, choices=(*VARIANTS, DILOCO))
    add("--network", default="conv", choices=workload.NETWORKS)
    add("--batch", type=int, help="images per node and step; the network's own by default")
    add("--period", type=int, default=4)
    add("--rounds", type=int, default=5, help="timed rounds of --period steps")
    add("--learning-rate", type=float, default=0.01)
    add("--seed", type=int, default=0)
    add("--train", type=Path, metavar="FOLDER", help="folder with train/<class>/*.jpg")
    add("--target-loss", type=float, default=1.0)
    add("--epochs", type=int, default=10, help="largest number of epochs")
    add("--log-every", type=int, default=20, metavar="STEPS")
    options = parser.parse_args()
    options.batch = options.batch or workload.BATCH[options.network]

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    about = {
        "network": options.network,
        "parameters": workload.number_of_parameters(options.network),
        "nodes": dist.get_world_size(),
        "batch": options.batch,
        "period": options.period,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if options.train:
        options.images = workload.load(options.train / "train")
    for variant in options.variants:
        with contextlib.ExitStack() as options.ending:
            result = train(variant, options) if options.train else measure(variant, options)
        say({"peer": "torch", "variant": variant, **result, **about})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
