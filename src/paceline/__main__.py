"""`python -m paceline`, which is how torchrun, srun and mpirun start a rank."""

from paceline.cli.app import main

if __name__ == "__main__":
    main()
