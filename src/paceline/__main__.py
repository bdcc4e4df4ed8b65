"""`python -m paceline`, by which torchrun, srun and mpirun start a rank, and the script `paceline`."""

import os
import signal
import sys

from paceline.core.errors import CommError
from paceline.core.host import hold_back
from paceline.core.topology import Topology


def main() -> None:
    """Holds back signals of a training, whose imports take a while, then runs the command: SIGUSR1 and
    SIGUSR2 until the settings say what they mean (`train.stop_signals.without_save_requests`), and those
    that end a rank until it can tell the other ranks (`paceline.comm.group`)."""
    if sys.argv[1:2] in (["train"], ["rehearse"]):
        held = {signal.SIGUSR1, signal.SIGUSR2}
        if not _is_alone() and "--dry-run" not in sys.argv:
            held |= {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
        hold_back(held)
    from paceline.cli.app import main as run

    run()


def _is_alone() -> bool:
    """Returns True if no other rank waits for this process in vain."""
    try:
        return Topology.from_env(os.environ).ends_together
    except CommError:  # the command reports it
        return True


if __name__ == "__main__":
    main()
