"""A rank that exchanges until it no longer can, and then says why in one line."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT_S = 3


def main() -> None:
    rank, begun = os.environ["RANK"], Path(sys.argv[1]) / os.environ["RANK"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.ones(1 << 14)
    try:
        while True:
            dist.all_reduce(tensor)
            begun.touch()
    except RuntimeError as error:
        sys.stderr.write(f"rank {rank}: all-reduce failed: {str(error).splitlines()[0]}\n")
        sys.stderr.flush()
    # Not by way of destructors: they wait for a store that may be out of reach.
    os._exit(3)


if __name__ == "__main__":
    main()
