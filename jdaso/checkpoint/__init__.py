"""Distributed checkpoints: every node saves its own part, with its exchanges in flight.

- ``checkpoints``: the class that a training uses. ``verify``: the command.
- ``node_part``: what one node writes. ``folder``: which checkpoints are complete or old, and which
  job may write.
"""

from jdaso.checkpoint.checkpoints import Checkpoints, Restored, at_step

__all__ = ["Checkpoints", "Restored", "at_step"]
