"""The cost model of exchanges, and measurements for it.

It imports :mod:`jdaso.exchange`, :mod:`jdaso.cluster` and :mod:`jdaso.core`. Its commands are
``python -m jdaso tune`` and ``python -m jdaso predict``. In all of its modules, times are in
seconds, sizes in bytes, bandwidths in bytes per second.
"""

from jdaso.perf.model import (
    ALGORITHMS,
    Algorithm,
    Prediction,
    Recommendation,
    mean_step_time,
    predict,
    recommend,
)
from jdaso.perf.network import MODELLED_PATTERNS, Network, allreduce_time, fit, wire_bytes

__all__ = [
    "ALGORITHMS",
    "MODELLED_PATTERNS",
    "Algorithm",
    "Network",
    "Prediction",
    "Recommendation",
    "allreduce_time",
    "fit",
    "mean_step_time",
    "predict",
    "recommend",
    "wire_bytes",
]
