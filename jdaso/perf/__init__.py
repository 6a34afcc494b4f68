"""The cost model of exchanges, and measurements for it.

It imports :mod:`jdaso.exchange`, :mod:`jdaso.algorithms`, :mod:`jdaso.cluster` and
:mod:`jdaso.core`. Only ``jdaso/__init__.py`` and ``__main__.py`` may import it. Its commands are
``python -m jdaso tune`` and ``python -m jdaso predict``. In all of its modules, times are in
seconds, sizes in bytes, bandwidths in bytes per second.
"""

from jdaso.perf.choice import Recommendation, WireCosts, recommend, taken_back
from jdaso.perf.model import (
    ALGORITHMS,
    Algorithm,
    PeriodAndDelay,
    Prediction,
    hiding_schedule,
    mean_step_time,
    predict,
)
from jdaso.perf.network import MODELLED_PATTERNS, Network, allreduce_time, fit, wire_bytes

__all__ = [
    "ALGORITHMS",
    "MODELLED_PATTERNS",
    "Algorithm",
    "Network",
    "PeriodAndDelay",
    "Prediction",
    "Recommendation",
    "WireCosts",
    "allreduce_time",
    "fit",
    "hiding_schedule",
    "mean_step_time",
    "predict",
    "recommend",
    "taken_back",
    "wire_bytes",
]
