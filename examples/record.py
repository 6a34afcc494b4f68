"""Records a training: a line of metrics.jsonl for each epoch, a picture, and a summary."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

import jdaso

TOTALS = ("seconds", "seconds_in_flight", "seconds_blocked", "bytes_sent", "exchanges")
COLORS = {"warm-up": "tab:orange", "cycling": "tab:green", "cool-down": "tab:blue"}


class Record:
    """The metrics of a training, which all nodes collect and the first one writes.

    A training that continues at the step ``begin`` keeps the lines up to this step, and goes on
    counting where they end. ``per_step`` are the items of all nodes, such as 128 ``"images"``. If
    other nodes have saved the step with another number, ``saved``, the lines count as it does now.
    """

    def __init__(
        self,
        out: Path,
        topology: jdaso.Topology,
        exchange: jdaso.Exchange,
        begin: int,
        per_step: int,
        items: str,
        saved: int = 0,
    ):
        self.path, self.topology, self.exchange = out / "metrics.jsonl", topology, exchange
        self.per_step, self.speed = per_step, f"{items}_per_second"
        self.start, self.lines = time.perf_counter(), []
        saved = saved or begin
        if begin and topology.node == 0 and self.path.exists():
            for line in map(json.loads, self.path.read_text().splitlines()):
                if line["step"] <= saved:
                    self.lines.append(line | {"step": line["step"] * begin // saved})
        self.before = {key: self.lines[-1][key] if self.lines else 0 for key in TOTALS}
        if topology.node == 0:
            out.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def epoch(self, step: int, plan: jdaso.core.Metrics, **values: float) -> None:
        """Adds the line of an epoch, with the plan of its schedule and the caller's values."""
        now = {"seconds": time.perf_counter() - self.start, **self.exchange.report()}
        line = {"step": step, "epoch": len(self.lines) + 1}
        line |= {key: self.before[key] + now[key] for key in TOTALS}
        line |= {"phase": jdaso.schedules.PHASES[plan.phase]}
        line |= {"period": int(plan.period), "delay": int(plan.delay)}
        line |= {key: float(value) for key, value in values.items()}
        self.lines.append(line)
        steps, seconds = (per_epoch(self.lines, key)[-1] for key in ("step", "seconds"))
        line[self.speed] = steps * self.per_step / seconds
        if self.topology.node == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            scores = ", ".join(f"{words(key)} {line[key]:.4g}" for key in (*values, self.speed))
            plan_text = f"{line['phase']}, period {plan.period}, delay {plan.delay}"
            print(f"step {step} ({plan_text}): {scores}", flush=True)

    def finish(self) -> None:
        """Draws the picture, and says where it is and what the seconds mean."""
        if self.topology.node > 0 or not self.lines:
            return
        last, picture = self.lines[-1], self.path.with_name("metrics.png")
        draw(self.lines, picture)
        nodes, devices = self.topology.num_nodes, self.topology.num_local_devices
        print(f"\n{last['step']} steps in {last['seconds']:.0f} s on {nodes} x {devices} devices.")
        if nodes > 1:
            print(
                f"{last['exchanges']:.0f} exchanges sent {last['bytes_sent'] / 1e6:.0f} MB from "
                f"each node.\nThe training waited for them for {last['seconds_blocked']:.1f} s. "
                f"Compare this with the {last['seconds_in_flight']:.1f} s for which they were in "
                "flight:\nhad each of them blocked, it would have waited for about as long."
            )
        waits = waits_per_step(self.lines)
        if nodes > 1 and {"cool-down", "cycling"} <= waits.keys():
            print(
                "In the cool-down all nodes average at every step, as in synchronous training: a "
                f"step waited {1e3 * waits['cool-down']:.1f} ms.\nIn the cycling phase before it, "
                f"a step waited {1e3 * waits['cycling']:.1f} ms."
            )
        print(f"Metrics: {self.path}\nPicture: {picture}")


def words(key: str) -> str:
    return key.replace("_per_", "/").replace("_", " ")


def per_epoch(lines: list[dict[str, Any]], key: str) -> list[float]:
    """What each epoch adds to a total."""
    return [b - a for a, b in itertools.pairwise([0, *(line[key] for line in lines)])]


def waits_per_step(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The seconds for which a step waits, for each phase of the schedule."""
    sums: dict[str, list[float]] = {}
    for line, waited, steps in zip(
        lines, per_epoch(lines, "seconds_blocked"), per_epoch(lines, "step"), strict=True
    ):
        total = sums.setdefault(line["phase"], [0.0, 0.0])
        total[0], total[1] = total[0] + waited, total[1] + steps
    return {phase: waited / steps for phase, (waited, steps) in sums.items()}


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws losses and scores, the speed, and for how long exchanges were in flight and awaited."""
    steps = [line["step"] for line in lines]
    scores = [key for key in lines[0] if key.startswith("test_")]
    speeds = [key for key in lines[0] if "_per_second" in key]
    panels = [["loss"], scores, speeds, ["seconds_in_flight", "seconds_blocked"]]
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, keys in zip(figure.subplots(2, 2).flatten(), panels, strict=True):
        for key in keys:
            values = per_epoch(lines, key) if key in TOTALS else [line[key] for line in lines]
            axes.plot(steps, values, marker=".", label=words(key))
        for line, begin in zip(lines, [0, *steps], strict=False):  # the phases
            axes.axvspan(begin, line["step"], color=COLORS[line["phase"]], alpha=0.1, lw=0)
        axes.set(xlabel="step", ylabel=words(keys[0]) if len(keys) == 1 else "since the last point")
        if len(keys) > 1:
            axes.legend()
    phases = dict.fromkeys(line["phase"] for line in lines)
    patches = [Patch(color=COLORS[phase], alpha=0.1, label=phase) for phase in phases]
    figure.legend(handles=patches, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)
