"""The command `paceline`, also as `python -m paceline` for torchrun, srun and mpirun."""

import os
import signal
import sys

from paceline.core.errors import CommError
from paceline.core.host import hold_back
from paceline.core.topology import Topology


def main() -> None:
    """Runs the command.

    A training takes seconds to import. Until its handlers are installed, this function blocks SIGUSR1
    and SIGUSR2, and on several ranks also the signals that end a rank
    (`train.stop_signals.without_save_requests`, `paceline.comm.group`).
    """
    if sys.argv[1:2] in (["train"], ["rehearse"]):
        held = {signal.SIGUSR1, signal.SIGUSR2}
        if not _is_alone() and "--dry-run" not in sys.argv:
            held |= {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
        hold_back(held)
    from paceline.cli.app import main as run

    run()


def _is_alone() -> bool:
    """Returns True if no other rank would wait for this process."""
    try:
        return Topology.from_env(os.environ).ends_together
    except CommError:  # the command reports it
        return True


if __name__ == "__main__":
    main()
