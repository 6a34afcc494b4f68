"""Distributed checkpoints: every node saves its own part, with its exchanges in flight.

It imports :mod:`jdaso.cluster` and :mod:`jdaso.core`. Besides ``jdaso/__init__.py`` and
``__main__.py``, only :mod:`jdaso.faults` imports it.

- ``checkpoints``: the class that a training uses. ``verify``: the command.
- ``node_part``: what one node writes. ``checksums``: of its arrays. ``host_arrays``: their names.
- ``in_flight``: exchanges that are posted when a node saves.
- ``folder``: names of folders, and which checkpoints are complete or old. ``lock``: one job writes.
- ``restore``, ``agreement``: reading on the same or another number of nodes, alike on all nodes.
"""

from jdaso.checkpoint.checkpoints import Checkpoints, Restored
from jdaso.checkpoint.in_flight import at_step

__all__ = ["Checkpoints", "Restored", "at_step"]
