"""Chooses wire, period and delay from the costs of an exchange, and explains the choice."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jdaso.core.validation import (
    check_choice,
    check_number,
    check_period_and_delay,
    check_share,
    check_whole,
)
from jdaso.core.wire import block_bits, check_wire
from jdaso.perf.model import ALGORITHMS, hiding_schedule

#: Additional steps to the same loss for each step of mean staleness, as a share.
STEPS_PER_STALENESS = 0.05
#: The wires that ``tune`` and ``predict`` compare.
COMPARED_WIRES = ("float32", "bfloat16", "int8", "float4")
_CHOICES = 3
# Their results do not depend on the delay, so an exchange may take the whole period.
_DELAY_CHANGES_NOTHING = ("easgd", "eamsgd")
# The longest delay of DaSGD's Fig. 6(e), and the nodes of the smaller setting of DASO's Table 2.
_LONGEST_DELAY, _FEW_NODES = 7, 8
# The largest mean age in steps for which the rule of the choice was measured.
_OLDEST = 6
# The output mentions a cost per step that exceeds this share of the step time.
_COSTLY = 0.05


class WireCosts(NamedTuple):
    """The costs of an exchange on one wire, in seconds.

    Attributes:
        exchange_time: of an exchange in the background.
        overhead: of what no delay hides, such as copies and rounding.
        slowdown: by which computing takes longer while a whole exchange is in flight.
    """

    exchange_time: float
    overhead: float = 0.0
    slowdown: float = 0.0


class Recommendation(NamedTuple):
    """A setting, and what to expect of it.

    Attributes:
        wire: Dtype on the network.
        period: Optimizer steps between two exchanges.
        delay: Optimizer steps between posting and merging an exchange.
        step_time: Mean seconds of a step.
        staleness: Mean age in steps of what a node knows of the others, ``delay + (period - 1)/2``.
            The delay does not count for EASGD and EAMSGD, because it changes no result of theirs.
        taken_back: Share of a node's progress that merges take back, see :func:`taken_back`.
        rate_factor: Factor for the learning rate that would make up for it,
            ``1 / (1 - taken_back)``. Measurements confirm this only in part.
    """

    wire: str
    period: int
    delay: int
    step_time: float
    staleness: float
    taken_back: float
    rate_factor: float

    @property
    def cost(self) -> float:
        """Expected time to a loss, in units of the steps that it takes without staleness."""
        return self.step_time * (1 + STEPS_PER_STALENESS * self.staleness)


def taken_back(
    algorithm: str, period: int, delay: int, nodes: int, own_weight: float | None = None
) -> float:
    """Returns the share of a node's progress that late merges take back.

    A node moves by u in the s steps between posting x and merging. With w the weight of the mean,

        (1 - w) (x + u) + w mean  =  x + u - w (x - mean) - w u

    Averaging is ``w (x - mean)``. The rest, ``w u``, are w s steps of every k that are lost:

        w s / k,   w = P / (2 s + P) for DASO,   1 - xi for DaSGD

    Args:
        algorithm: One of ``ALGORITHMS``.
        period: k, optimizer steps between two exchanges.
        delay: s, optimizer steps between posting and merging an exchange.
        nodes: P.
        own_weight: xi, for DaSGD only. None selects the default of the algorithm.

    Returns:
        A number in [0, 1]. The delta rule of :func:`jdaso.local_sgd` takes nothing back.

    Raises:
        ValueError: for numbers out of range, an unknown algorithm, or an ``own_weight`` with
            another algorithm than ``dasgd``.

    >>> taken_back("daso", period=2, delay=1, nodes=2), taken_back("dasgd", 2, 1, nodes=2)
    (0.25, 0.375)
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_period_and_delay(period, delay)
    check_whole("nodes", nodes, 1)
    if own_weight is None:
        return ALGORITHMS[algorithm].mean_weight(nodes, delay) * delay / period
    check_share("own_weight", own_weight)
    if algorithm != "dasgd":
        raise ValueError(f"own_weight requires the algorithm dasgd, got {algorithm}.")
    return (1 - own_weight) * delay / period


def recommend(
    step_time: float, wires: Mapping[str, WireCosts], nodes: int, algorithm: str = "daso"
) -> list[Recommendation]:
    """Chooses wire, period and delay for the shortest time to a loss.

    The mean step time t is that of :func:`mean_step_time`, with the overhead and the slowdown of an
    exchange in every period. The mean age of what a node knows of the others is ``a = d + (k-1)/2``
    steps: they are d steps old when they arrive, and k - 1 steps older before the next arrive. The
    setting with the smallest

        t (1 + 0.05 a)

    of all with d < k is the first. A merge at every step that posts, d = k, takes back the most. It
    is considered only for EASGD and EAMSGD, which take nothing back. 5 % is what a step of age
    costs a small convolutional network with SGD, measured for ages up to 6.

    The share that merges take back is reported, and not in the cost. At equal ages, a larger share
    raised the loss on text and lowered it on images, so no factor for it fits both.

    Args:
        step_time: Seconds of a step without exchanges.
        wires: Costs of an exchange on each wire that may be used.
        nodes: Number of nodes.
        algorithm: One of ``ALGORITHMS`` except ``allreduce_gradients``, which has neither period
            nor delay.

    Returns:
        The best setting and the next two, at most one for each wire and delay.

    Raises:
        ValueError: for numbers out of range, no wire, an unknown wire or algorithm, costs that are
            no :class:`WireCosts`, or ``allreduce_gradients``.

    >>> wires = {"bfloat16": WireCosts(0.32, slowdown=0.03), "int8": WireCosts(0.17, overhead=0.15)}
    >>> best, *others = recommend(step_time=0.17, wires=wires, nodes=2)
    >>> best.wire, best.period, best.delay, round(best.step_time, 3), round(best.rate_factor, 2)
    ('bfloat16', 3, 2, 0.18, 1.29)
    >>> [(other.wire, other.period, other.delay) for other in others]
    [('int8', 6, 1), ('bfloat16', 6, 1)]
    """
    check_number("step_time", step_time, above=True)
    if not wires:
        raise ValueError("wires must have the costs of at least one wire, got none.")
    if algorithm == "allreduce_gradients":
        raise ValueError(
            "allreduce_gradients exchanges at every step and blocks, so there is nothing to "
            "recommend. Choose another algorithm, such as daso."
        )
    best: dict[tuple[str, int], Recommendation] = {}
    for wire, costs in wires.items():
        check_wire("each key of wires", wire)
        if not isinstance(costs, WireCosts):
            raise ValueError(f"wires[{wire!r}] must be a WireCosts, got {costs!r}.")
        for name, seconds in costs._asdict().items():
            check_number(f"wires[{wire!r}].{name}", seconds)
        for period, delay in _candidates(step_time, costs, algorithm):
            step = step_time + _exchange_seconds(step_time, costs, delay) / period
            share = taken_back(algorithm, period, delay, nodes)
            age = (0 if algorithm in _DELAY_CHANGES_NOTHING else delay) + (period - 1) / 2
            found = Recommendation(wire, period, delay, step, age, share, 1 / (1 - share))
            before = best.get((wire, delay), found)
            best[wire, delay] = min(before, found, key=lambda setting: setting.cost)
    return sorted(best.values(), key=lambda setting: setting.cost)[:_CHOICES]


def _candidates(step_time: float, costs: WireCosts, algorithm: str) -> set[tuple[int, int]]:
    """Periods and delays, the best one among them.

    For each period the cost is concave in the delay until the exchange is hidden, and grows from
    there on. For each delay it is convex in the period. So three delays suffice, each with the
    whole numbers around its best period. With EASGD an exchange takes the whole period. The
    choice can then be too long a period if an exchange takes more than 39 steps and slows them.
    """
    hidden = hiding_schedule(step_time, costs.exchange_time).delay
    free = algorithm in _DELAY_CHANGES_NOTHING
    found = set()
    for delay in {0, hidden - 1, hidden}:
        seconds = _exchange_seconds(step_time, costs, delay)
        late = 0 if free else delay
        # Here the derivative of (t_p + seconds / k) (1 + 0.05 (late + (k - 1) / 2)) by k is 0.
        best = math.sqrt(2 * seconds / step_time * (1 / STEPS_PER_STALENESS + late - 1 / 2))
        for rounded in (math.floor(best), math.ceil(best)):
            period = max(1, rounded, delay if free else delay + 1)
            found.add((period, period if free else delay))
    return found


def _exchange_seconds(step_time: float, costs: WireCosts, delay: int) -> float:
    """Returns the seconds that an exchange adds to the steps of a period."""
    exchange_time, overhead, slowdown = costs
    hidden = min(1.0, delay * step_time / exchange_time) if exchange_time else 0.0
    return max(0.0, exchange_time - delay * step_time) + overhead + hidden * slowdown


def advice(step_time: float, costs: Mapping[str, WireCosts], nodes: int) -> list[str]:
    """Returns lines that recommend a setting, say what to expect of it, and name two alternatives.

    >>> for line in advice(0.17, {"bfloat16": WireCosts(0.32, slowdown=0.03)}, nodes=2)[:2]:
    ...     print(line)
    Choose wire bfloat16, period 3, delay 2: a step takes 0.18 s (+5.9%). What a node knows of the \
others is 3 steps old on average.
    Merges of DASO take back 22% of the progress, DaSGD's 50%. The choice does not count this. \
Keep the learning rate, or also try one 1.29 times as high, which would make up for DASO's share. \
Measurements confirm this only in part.
    """
    best, *others = recommend(step_time, costs, nodes)
    lines = [f"Choose {_expected(best, step_time)}"]
    if best.delay:
        dasgd = taken_back("dasgd", best.period, best.delay, nodes)
        lines.append(
            f"Merges of DASO take back {best.taken_back:.0%} of the progress, DaSGD's {dasgd:.0%}. "
            "The choice does not count this. Keep the learning rate, or also try one "
            f"{best.rate_factor:.3g} times as high, which would make up for DASO's share. "
            "Measurements confirm this only in part."
        )
    else:
        lines.append("Exchanges block, and nothing is stale.")
    lines += [f"Or {_expected(other, step_time)}" for other in others]
    lines.append(
        "Settings are compared by step time, and each step of age counts as "
        f"{STEPS_PER_STALENESS:.0%} more steps. Rounding counts as nothing, except for the "
        "time of copies."
    )
    if text := too_old(best.staleness):
        lines.append(text)
    if best.delay and (best.delay > _LONGEST_DELAY or nodes > _FEW_NODES):
        lines.append(
            f"Delay {best.delay} may cost accuracy. In the papers, delays up to {_LONGEST_DELAY} "
            "had little effect with DaSGD (Fig. 6(e)). With DASO (Table 2), delays of 1 to 8 steps "
            f"cost up to 1.1 points on {_FEW_NODES} nodes, and up to 4 points on 32 nodes."
        )
    if bits := block_bits(best.wire):
        lines.append(
            f"{best.wire} rounds changes to {bits} bits, and sends the errors later. In the "
            "measurements of jdaso this cost DASO half a point of accuracy on images. On text it "
            "was measured with Streaming DiLoCo only, and cost less than the noise of the seeds."
        )
        exact = {wire: each for wire, each in costs.items() if not block_bits(wire)}
        if exact:
            found = recommend(step_time, exact, nodes)[0]
            lines.append(f"Without this rounding, choose {_expected(found, step_time)}")
    overhead, slowdown = costs[best.wire].overhead, costs[best.wire].slowdown
    if overhead > _COSTLY * step_time * best.period:
        lines.append(
            "Posting and merging lengthen steps by "
            f"{overhead / (step_time * best.period):.1%} on average, which no delay hides."
        )
    if slowdown > _COSTLY * step_time * best.period:
        lines.append(
            "Moving messages on the same cores lengthens steps by "
            f"{slowdown / (step_time * best.period):.1%} on average. Give each process one more "
            "core (srun --cpus-per-task)."
        )
    code = f'jdaso.local_sgd(exchange, period={best.period}, wire="{best.wire}")'
    if best.delay:
        schedule = f"jdaso.constant(period={best.period}, delay={best.delay})"
        code = f'jdaso.daso(exchange, {schedule}, wire="{best.wire}")'
    return [*lines, f"\n{code}"]


def too_old(staleness: float) -> str:
    """Returns what to do if what a node knows is older than 6 steps; empty if it is not."""
    if staleness <= _OLDEST:
        return ""
    return (
        f"The rule was measured up to an age of {_OLDEST} steps only. Choose a larger batch per "
        "node, or diloco, which is made for long periods."
    )


def _expected(found: Recommendation, step_time: float) -> str:
    return (
        f"wire {found.wire}, period {found.period}, delay {found.delay}: a step takes "
        f"{found.step_time:.3g} s ({found.step_time / step_time - 1:+.1%}). What a node knows of "
        f"the others is {found.staleness:g} steps old on average."
    )
