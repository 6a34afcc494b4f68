"""The timeline of one exchange: when it was posted, moved messages, was waited for and merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jdaso.exchange import ExchangeRecord

#: The spans of an exchange, with what they are called and drawn in.
SPANS = {
    "copy_to_host": ("post", "tab:orange"),
    "transfer": ("flight", "tab:olive"),
    "wait": ("wait", "tab:red"),
    "copy_to_device": ("merge", "tab:green"),
}
LABEL = "time since the post, ms"


def typical(history: Sequence[ExchangeRecord], steps: range, delay: int) -> dict[str, Any] | None:
    """One exchange for metrics.jsonl, in seconds since its post, or None if there is none.

    It has the median transfer time among the exchanges that were posted and, ``delay`` steps later,
    merged within ``steps``.
    """
    found = [
        record
        for record in history
        if record.step in steps and record.step + delay in steps and any(record.copy_to_device)
    ]
    if not found:
        return None
    found.sort(key=lambda record: record.transfer[1] - record.transfer[0])
    record = found[len(found) // 2]
    zero = record.copy_to_host[0]
    spans = {name: [time - zero for time in getattr(record, name)] for name in SPANS}
    return {"step": record.step, "delay": delay, **spans}


def is_valid(found: Any) -> bool:
    """Whether a value of a metrics.jsonl is what :func:`typical` returns."""
    if not isinstance(found, dict) or not all(_is_span(found.get(name)) for name in SPANS):
        return False
    delay = found.get("delay")
    return isinstance(found.get("step"), int) and isinstance(delay, int) and 0 <= delay < 1000


def _is_span(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(time, int | float) and math.isfinite(time) for time in value)
    )


def draw(axes: Axes, found: dict[str, Any]) -> None:
    """Draws the spans of an exchange below the training steps from its post to its merge.

    The steps are drawn equally long.
    """
    axes.use_sticky_edges = False  # a margin, in which a short post is seen
    begin, end = found["copy_to_host"][1], found["wait"][0]
    rows = ["training steps", *(name for name, _ in SPANS.values())]
    for place in range(found["delay"]):
        step = 1e3 * (end - begin) / found["delay"]
        left = 1e3 * begin + place * step
        axes.barh(0, step, left=left, height=0.6, color="tab:blue", edgecolor="white")
    for row, (name, (_, colour)) in enumerate(SPANS.items(), start=1):
        first, last = (1e3 * time for time in found[name])
        axes.barh(row, last - first, left=first, height=0.6, color=colour, edgecolor=colour)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel=LABEL, title=f"the exchange posted after step {found['step']}")
