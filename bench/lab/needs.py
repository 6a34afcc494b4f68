"""What the lab needs of the machine, and how it says what is missing."""

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

# What a node has of its own; the option of unshare and nsenter: the file in /proc/*/ns.
NAMESPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt"}


class LabError(RuntimeError):
    """Something of the lab did not work."""


class Missing(LabError):
    """This machine cannot have a lab as it is."""


@functools.cache
def missing() -> str | None:
    """What the lab lacks on this machine and how to get it, in one line; None if nothing."""
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
        return f"the network lab may not make namespaces here: {tried.stderr.strip()}"
    return None


def tool(name: str) -> str | None:
    """The path of a program that the lab uses."""
    if name == "iptables":  # its newer form needs a kernel option more to queue packets
        return which("iptables-legacy") or which("iptables")
    return which(name)


def which(name: str) -> str | None:
    return shutil.which(name, path=SEARCH)
