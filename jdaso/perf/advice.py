"""What the commands say about the choice of wire, period and delay."""

from collections.abc import Mapping

from jdaso import perf
from jdaso.core.wire import block_bits
from jdaso.perf.choice import STEPS_PER_STALENESS

#: The wires that ``tune`` and ``predict`` compare.
COMPARED_WIRES = ("float32", "bfloat16", "int8", "float4")
# The longest delay of DaSGD's Fig. 6(e), and the nodes of the smaller setting of DASO's Table 2.
LONGEST_DELAY, FEW_NODES = 7, 8
# The largest mean age in steps for which the rule of the choice was measured.
OLDEST = 6
# The output mentions a cost per step that exceeds this share of the step time.
COSTLY = 0.05


def advice(step_time: float, costs: Mapping[str, perf.WireCosts], nodes: int) -> list[str]:
    """Recommends wire, period and delay, with what to expect, and two alternatives.

    >>> for line in advice(0.17, {"bfloat16": perf.WireCosts(0.32, slowdown=0.03)}, nodes=2)[:2]:
    ...     print(line)
    Choose wire bfloat16, period 3, delay 2: a step takes 0.18 s (+5.9%). What a node knows of the \
others is 3 steps old on average.
    Merges of DASO take back 22% of the progress, DaSGD's 50%. The choice does not count this. \
Keep the learning rate, or also try one 1.29 times as high, which would make up for DASO's share. \
Measurements confirm this only in part.
    """
    best, *others = perf.recommend(step_time, costs, nodes)
    lines = [f"Choose {expected(best, step_time)}"]
    if best.delay:
        dasgd = perf.taken_back("dasgd", best.period, best.delay, nodes)
        lines.append(
            f"Merges of DASO take back {best.taken_back:.0%} of the progress, DaSGD's {dasgd:.0%}. "
            "The choice does not count this. Keep the learning rate, or also try one "
            f"{best.rate_factor:.3g} times as high, which would make up for DASO's share. "
            "Measurements confirm this only in part."
        )
    else:
        lines.append("Exchanges block, and nothing is stale.")
    lines += [f"Or {expected(other, step_time)}" for other in others]
    lines.append(
        "Settings are compared by step time, and each step of age counts as "
        f"{STEPS_PER_STALENESS:.0%} more steps. Rounding counts as nothing, except for the "
        "time of copies."
    )
    if text := too_old(best.staleness):
        lines.append(text)
    if best.delay and (best.delay > LONGEST_DELAY or nodes > FEW_NODES):
        lines.append(
            f"Delay {best.delay} may cost accuracy. In the papers, delays up to {LONGEST_DELAY} "
            "had little effect with DaSGD (Fig. 6(e)). With DASO (Table 2), delays of 1 to 8 steps "
            f"cost up to 1.1 points on {FEW_NODES} nodes, and up to 4 points on 32 nodes."
        )
    if bits := block_bits(best.wire):
        lines.append(
            f"{best.wire} rounds changes to {bits} bits, and sends the errors later. In the "
            "measurements of jdaso this cost DASO half a point of accuracy on images. On text it "
            "was measured with Streaming DiLoCo only, and cost less than the noise of the seeds."
        )
        exact = {wire: each for wire, each in costs.items() if not block_bits(wire)}
        if exact:
            found = perf.recommend(step_time, exact, nodes)[0]
            lines.append(f"Without this rounding, choose {expected(found, step_time)}")
    overhead, slowdown = costs[best.wire].overhead, costs[best.wire].slowdown
    if overhead > COSTLY * step_time * best.period:
        lines.append(
            "Posting and merging lengthen steps by "
            f"{overhead / (step_time * best.period):.1%} on average, which no delay hides."
        )
    if slowdown > COSTLY * step_time * best.period:
        lines.append(
            "Moving messages on the same cores lengthens steps by "
            f"{slowdown / (step_time * best.period):.1%} on average. Give each process one more "
            "core (srun --cpus-per-task)."
        )
    return [*lines, f"\n{code(best)}"]


def too_old(staleness: float) -> str:
    """What to do if what a node knows is older than ``OLDEST`` steps; empty if it is not."""
    if staleness <= OLDEST:
        return ""
    return (
        f"The rule was measured up to an age of {OLDEST} steps only. Choose a larger batch per "
        "node, or diloco, which is made for long periods."
    )


def expected(found: perf.Recommendation, step_time: float) -> str:
    """A setting, and what to expect of it."""
    return (
        f"wire {found.wire}, period {found.period}, delay {found.delay}: a step takes "
        f"{found.step_time:.3g} s ({found.step_time / step_time - 1:+.1%}). What a node knows of "
        f"the others is {found.staleness:g} steps old on average."
    )


def code(found: perf.Recommendation) -> str:
    """The line to copy into a program."""
    if found.delay == 0:
        return f'jdaso.local_sgd(exchange, period={found.period}, wire="{found.wire}")'
    schedule = f"jdaso.constant(period={found.period}, delay={found.delay})"
    return f'jdaso.daso(exchange, {schedule}, wire="{found.wire}")'
