"""iproute2's `ip` and `tc`, called as programs.

In: their arguments. Out: nothing, or an error of one line with what they said.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from paceline.core.errors import LaunchError

_LIMIT_S = 20.0


def find_tool(name: str) -> str | None:
    """Its path. The folders of administration count also where they are not on the PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin:/sbin"]))


def call_tool(name: str, *arguments: str) -> None:
    command = [find_tool(name) or name, *arguments]
    shown = " ".join([name, *arguments])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            # A Ctrl-C is for the cluster's owner, who tears down; not for a tool at its work.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shown}: {error}", "install iproute2 and run as root") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else f"exit code {done.returncode}"
        raise LaunchError(f"{shown}: {said}")
