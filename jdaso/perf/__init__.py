"""The cost model of exchanges, measurements for it, and the choice of wire, period and delay.

- ``model``: the time of an exchange and of a step. ``choice``: the best setting, in numbers and
  in words.
- ``predict_command``, ``tune_command``: ``python -m jdaso predict`` and ``tune``.

Times are in seconds, sizes in bytes, and bandwidths in bytes per second.
"""

from jdaso.perf.choice import Recommendation, WireCosts, recommend, taken_back
from jdaso.perf.model import (
    ALGORITHMS,
    MODELLED_PATTERNS,
    Algorithm,
    Network,
    PeriodAndDelay,
    Prediction,
    allreduce_time,
    fit,
    hiding_schedule,
    mean_step_time,
    predict,
    wire_bytes,
)

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
