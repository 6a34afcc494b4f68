"""Injects faults into a job, to test how it reacts.

It imports :mod:`jdaso.checkpoint` and :mod:`jdaso.core`. Only ``jdaso/__init__.py`` and
``__main__.py`` import it.
"""

from jdaso.faults.fault import Fault, Kind
from jdaso.faults.inject import FaultyCheckpoints, faulty, faulty_gradients

__all__ = ["Fault", "FaultyCheckpoints", "Kind", "faulty", "faulty_gradients"]
