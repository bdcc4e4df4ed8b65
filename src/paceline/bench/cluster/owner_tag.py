"""Owner tags: names that say which process made a thing.

In: this process, or the name of a thing found on the machine. Out: a tag that no other cluster has;
whether the process that made the thing is gone. A process id alone does not tell, as ids are used again:
the tag carries the time at which its process started, too.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

_TAG = re.compile(r"paceline-(\d+)-(\d+)-\d+(?:-|$)")
_serials = itertools.count()


def new_tag() -> str:
    pid = os.getpid()
    return f"paceline-{pid}-{_start_ticks(pid)}-{next(_serials)}"


def owner_is_gone(name: str) -> bool:
    """False, too, for names that are not ours: those are nobody's to remove."""
    found = _TAG.match(name)
    return found is not None and _start_ticks(int(found[1])) != int(found[2])


def _start_ticks(pid: int) -> int | None:
    """When a living process started, in the kernel's clock ticks; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold blanks and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
