"""``python -m jdaso verify CHECKPOINT``: whether a training can continue from a checkpoint.

It checks that all parts exist, that their checksums match, that parameters and moments are finite,
that all nodes are at the same step, and that the arrays that all nodes share are equal bit for bit.
One process does this without MPI and holds one part in memory at a time.
"""

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from jdaso.checkpoint.folder import SavedCheckpoint, describe_incomplete, list_checkpoints
from jdaso.checkpoint.node_part import (
    NodePart,
    awaited_names,
    checkpointer,
    describe_posted,
    differences,
    other_bits,
    raw_bytes,
    read_part,
)
from jdaso.core.command_line import path_option, text_table
from jdaso.core.types import JdasoError

# Fields of an averaging state that may differ between nodes. Of the state of a merge, only the
# fields center, anchor and outer must be equal. Merges that users write may have any others.
_LOCAL = re.compile(
    r"(skipped|left_out|losses|fragments\.\d+\.(healthy|exchange|feedback\.residual"
    r"|merge(?!\.(center|anchor|outer)(\.|$))))(\.|$)"
)
_HEAD = ("node", "arrays", "MB", "step", "exchanges", "in flight", "skipped", "left out", "finite")


class Summary(NamedTuple):
    """What one part of a checkpoint contains, and its defects."""

    row: tuple[str, ...]  # of the table
    shapes: dict[str, str]  # shape and dtype of each array
    shared: dict[str, str]  # value or digest of each array that must be equal on all nodes
    in_flight: dict[str, str]  # description of each exchange in flight, by name
    run: int  # that saved it
    defects: list[str]  # of this part alone


def verify(path: Path) -> tuple[str, list[str]]:
    """Returns a table with a row for each node, and a text for each defect of a checkpoint.

    In a folder, it verifies the newest complete checkpoint. It raises ValueError if there is none.
    """
    checkpoint, incomplete = _chosen(path)
    if not checkpoint.parts:
        return "", [f"{name} is not complete" for name in incomplete]
    reader, summaries, defects = checkpointer(), [], []
    for node, part_folder in enumerate(checkpoint.parts):
        try:
            summaries.append(_summary(node, read_part(reader, part_folder)))
        except (JdasoError, ValueError) as error:  # ValueError: of another format
            defects.append(str(error))
    reader.close()
    for summary in summaries:
        defects += [f"node {summary.row[0]}: {text}" for text in summary.defects]
        defects += _differences(summaries[0], summary)
    rows = [_HEAD, *(summary.row for summary in summaries)]
    head = [f"{checkpoint.path}, step {checkpoint.step}"]
    head += [f"newer, {name} is not complete" for name in incomplete]
    return "\n".join([*head, text_table(rows, numbers=False)]), defects


def add_command(commands: Any) -> None:
    parser = commands.add_parser("verify", help="check that training can resume from a checkpoint")
    text = "a checkpoint, or a folder, of which the newest complete checkpoint is verified"
    parser.add_argument("checkpoint", type=path_option, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the table. With defects, exits with status 1 and a line for each of them."""
    try:
        table, defects = verify(arguments.checkpoint)
    except (ImportError, JdasoError, OSError, ValueError) as error:
        raise SystemExit(f"jdaso verify: {error}") from error
    print(table)
    if defects:
        chosen, _ = _chosen(arguments.checkpoint)
        others = list_checkpoints(chosen.path.parent)
        before = [x for x in others if x.parts and x.number < chosen.number]
        if healthy := next((x.path.name for x in reversed(before) if not verify(x.path)[1]), None):
            defects.append(f"the newest earlier checkpoint without a defect is {healthy}")
        raise SystemExit("\n".join(f"jdaso verify: {defect}" for defect in defects))
    print("A training can continue from this checkpoint.")


def _chosen(path: Path) -> tuple[SavedCheckpoint, list[str]]:
    """Returns the checkpoint to verify, and names the incomplete ones that a reader should know.

    Those are the checkpoint itself, or in a folder of checkpoints also newer ones.
    """
    path = path.absolute()
    if not path.is_dir():
        raise ValueError(f"the folder {path} does not exist.")
    for checkpoint in list_checkpoints(path.parent):
        if checkpoint.path.name == path.name:
            return checkpoint, [] if checkpoint.parts else [describe_incomplete(checkpoint.path)]
    if not (inside := list_checkpoints(path)):
        raise ValueError(f"{path} is not a checkpoint, such as 000001_step_9, and contains none.")
    chosen = max(inside, key=lambda checkpoint: (bool(checkpoint.parts), checkpoint.number))
    least = chosen.number if chosen.parts else 0
    incomplete = [x.path for x in inside if not x.parts and x.number >= least]
    return chosen, [describe_incomplete(path) for path in incomplete]


def _summary(node: int, part: NodePart) -> Summary:
    arrays = part.state
    # The name of an averaging state is what comes before the names of its fragments.
    roots = sorted(
        {m[1] for name in arrays if (m := re.match(r"(.*?)fragments\.\d+\.posted$", name))}
    )
    shared = {
        name: hashlib.sha256(raw_bytes(x)).hexdigest()[:16] if x.ndim else str(x)
        for name, x in arrays.items()
        for root in roots
        if name.startswith(root) and not _LOCAL.match(name[len(root) :])
    }
    defects = [f"{name} is not finite" for name in part.lost()]
    finite = "no" if defects else "yes"
    defects += differences(awaited_names(arrays), part.in_flight)
    defects += other_bits(arrays, part.in_flight)

    def number(field: str) -> str:
        return ",".join(str(arrays[root + field]) for root in roots if root + field in arrays)

    size = sum(x.nbytes for x in arrays.values()) / 1e6
    in_flight = ",".join(str(number) for _, number in part.in_flight)
    before, after = (map(number, x) for x in (("step", "exchanges"), ("skipped", "left_out")))
    cells = (str(node), str(len(arrays)), f"{size:.1f}", *before, in_flight, *after, finite)
    row = tuple(cell or "-" for cell in cells)
    shapes = {name: f"{x.dtype.name}{x.shape}" for name, x in arrays.items()}
    return Summary(row, shapes, shared, describe_posted(part.in_flight), part.run, defects)


def _differences(first: Summary, other: Summary) -> list[str]:
    """Returns what differs between two parts and must be equal."""
    who = f"node {other.row[0]} differs from node {first.row[0]}"
    if different := sorted({name for name, _ in first.shapes.items() ^ other.shapes.items()}):
        name = different[0]
        return [
            f"{who}: {name} is {other.shapes.get(name, 'missing')}, not "
            f"{first.shapes.get(name, 'missing')} ({len(different)} arrays differ in shape or type)"
        ]
    texts = [
        f"{who}: {name} is {other.shared[name]}, not {x}"
        for name, x in first.shared.items()
        if other.shared[name] != x
    ]
    if first.run != other.run:
        texts.append(f"{who}: another job saved it, which wrote to this folder at the same time")
    if first.in_flight != other.in_flight:
        texts.append(f"{who}: the exchanges in flight are {other.in_flight}, not {first.in_flight}")
    return texts
