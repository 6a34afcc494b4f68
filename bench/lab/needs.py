"""Checks whether the machine has everything that the lab needs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

BESIDE_PYTHON = str(Path(sys.executable).parent)
SEARCH = os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PACKAGES = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **{"iptables": "iptables", "cc": "gcc", "mount": "mount", "hostname": "hostname"},
    **dict.fromkeys(("unshare", "nsenter", "setpriv", "taskset"), "util-linux"),
}

# The namespaces of a node: option of unshare and nsenter, and file in /proc/*/ns.
NAMESPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt"}


class LabError(RuntimeError):
    """An operation of the lab failed."""


class Missing(LabError):
    """The machine lacks something that the lab needs."""


@functools.cache
def missing() -> str | None:
    """A line that says what this machine lacks and how to get it, or None."""
    if not sys.platform.startswith("linux"):
        return "the network lab needs Linux"
    if os.geteuid() != 0:
        return "the network lab needs root: run it with sudo"
    tools = [name for name in PACKAGES if tool(name) is None]
    if tools:
        packages = " ".join(sorted({PACKAGES[name] for name in tools}))
        return f"the network lab needs {', '.join(tools)}: apt-get install {packages}"
    options = [f"--{kind}" for kind in NAMESPACES]
    tried = subprocess.run([tool("unshare"), *options, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"the network lab cannot create namespaces here: {tried.stderr.strip()}"
    return None


def tool(name: str) -> str | None:
    """The path of a program that the lab uses, or None."""
    if name == "iptables":  # the newer iptables needs another kernel option to queue packets
        return which("iptables-legacy") or which("iptables")
    return which(name)


def which(name: str) -> str | None:
    return shutil.which(name, path=SEARCH)
