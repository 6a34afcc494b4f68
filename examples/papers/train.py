"""Trains a ResNet on several nodes with DASO or another algorithm of jdaso.

    mpiexec -n 2 python examples/papers/train.py --devices 2 --out runs/demo
    srun -K python examples/papers/train.py \\
        --config examples/papers/configs/imagenet_resnet50_daso.py \\
        --data /data/imagenet --out runs/imagenet --resume

Gradients are averaged over the devices of a node at every step. --sync selects how parameters are
averaged between nodes. Without an MPI launcher there is one node.
"""

from __future__ import annotations

import sys

import loop
from classification import Classification, task
from config import parse

if __name__ == "__main__":
    sys.exit(loop.run(parse(description=__doc__, defaults=Classification()), task))
