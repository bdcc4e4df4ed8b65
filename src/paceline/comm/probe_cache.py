"""`ProbeCache`: the constants of a cluster that an earlier run has measured, in the user's cache folder.

There is one file per cluster, in the format of plan files. Its name is a digest of everything on which
the constants depend. The contents are untrusted: a file that cannot be used is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import read_regular, user_cache, whole_file
from paceline.core.untrusted import ParseError, one_line, parse_toml
from paceline.plan.plan_file import PlanFile, ProbedCluster
from paceline.plan.schedules import NATIVE

_MOST_BYTES = 1 << 20
# Names the constants in error messages.
_FIELD = "constants"


class ProbeCache:
    """The cache file of one cluster.

    Args:
        key: Everything on which the constants depend. JSON must be able to represent it.
        folder: The cache folder; None for that of the user.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        base = folder or user_cache()
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
        self.path = base / "exchange" / f"{digest}.toml" if base is not None else None

    def read(self, cluster: ProbedCluster) -> tuple[PlanFile | None, str]:
        """Returns the constants of this cluster, or None and, for a damaged file, the reason."""
        if self.path is None or not self.path.exists():
            return None, ""
        try:
            return parse_constants(
                read_regular(self.path, _MOST_BYTES), cluster, self.path.name
            ), ""
        except OSError as error:
            problem = error.strerror or type(error).__name__
        except ConfigError as error:
            problem = error.cause
        return None, f"ignored {self.path}: {one_line(problem)}"

    def write(self, content: bytes) -> bool:
        """Writes the constants. Returns False if the file cannot be written."""
        if self.path is None:
            return False
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(content)
            return True
        return False


def parse_constants(content: bytes, cluster: ProbedCluster, path: str) -> PlanFile:
    """Parses constants, which may come from anywhere.

    Args:
        content: A plan file.
        cluster: The cluster of this run.
        path: Where they come from, for error messages.

    Raises:
        ConfigError: If the content is no valid plan file or was measured on another cluster.
    """
    try:
        tables = parse_toml(content)
    except ParseError as error:
        raise ConfigError(_FIELD, path, f"is not TOML: {error}") from None
    file = constants_of(tables, path)
    if not same_cluster(file, cluster):
        raise ConfigError(_FIELD, path, "was measured on another cluster")
    return file


def constants_of(tables: Mapping[str, Any], path: str) -> PlanFile:
    """Builds constants from the tables of a plan file. Raises ConfigError if they are invalid."""
    file = PlanFile.from_tables(tables, Path(path), _FIELD)
    sizes = [row.size_bytes for row in file.measured]
    sound = all(NATIVE in row.medians_s for row in file.measured)
    if not sizes or not sound or any(after <= before for before, after in pairwise(sizes)):
        raise ConfigError(_FIELD, path, "lacks measured sizes in ascending order")
    return file


def same_cluster(file: PlanFile, cluster: ProbedCluster) -> bool:
    """Returns True if the constants were measured on such a cluster, whatever its links."""
    return file.probed is not None and replace(file.probed, intra=None, inter=None) == cluster
