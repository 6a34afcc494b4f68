"""Distributed checkpoints: every node saves its own part, with its exchanges in flight.

- ``checkpoints``: the class that a training uses. ``verify``: the command.
- ``node_part``: what one node writes. ``in_flight``: exchanges that are posted when it saves.
- ``folder``: which checkpoints are complete or old. ``lock``: one job writes to a folder.
"""

from jdaso.checkpoint.checkpoints import Checkpoints, Restored
from jdaso.checkpoint.in_flight import at_step

__all__ = ["Checkpoints", "Restored", "at_step"]
