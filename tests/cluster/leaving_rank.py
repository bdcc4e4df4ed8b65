"""A rank that fails by itself while its host is cut off, and has to get out of torch's store."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import DataError
from paceline.core.topology import Topology


def main() -> None:
    settings = CommSettings(timeout_s=600.0, rendezvous_timeout_s=60.0)
    with Group(Topology.from_env(os.environ), settings, torch.device("cpu")) as group:
        group.all_reduce_sum(torch.ones(1))
        (Path(sys.argv[1]) / str(group.rank)).touch()
        while not (Path(sys.argv[1]) / "cut").exists():
            time.sleep(0.1)
        raise DataError("the shard is gone")


if __name__ == "__main__":
    main()
