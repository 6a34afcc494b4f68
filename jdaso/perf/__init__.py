"""The cost model of exchanges, measurements for it, and the choice of wire, period and delay.

``model`` has the numbers. ``predict_command`` and ``tune_command`` are ``python -m jdaso predict``
and ``tune``. Times are in seconds, sizes in bytes, and bandwidths in bytes per second.
"""

from jdaso.perf.model import (
    ALGORITHMS,
    MODELLED_PATTERNS,
    Algorithm,
    Network,
    PeriodAndDelay,
    Prediction,
    Recommendation,
    WireCosts,
    allreduce_time,
    discarded,
    fit,
    hiding_schedule,
    mean_step_time,
    predict,
    progress,
    recommend,
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
    "discarded",
    "fit",
    "hiding_schedule",
    "mean_step_time",
    "predict",
    "progress",
    "recommend",
    "wire_bytes",
]
