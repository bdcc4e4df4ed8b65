"""`python -m paceline`, by which torchrun, srun and mpirun start a rank, and the script `paceline`."""

import signal
import sys


def main() -> None:
    """Holds back SIGUSR1 and SIGUSR2 until a training knows what its settings make of them
    (`train.stop_signals.without_save_requests`), then runs the command. The imports take a while."""
    if sys.argv[1:2] in (["train"], ["rehearse"]):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    from paceline.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
