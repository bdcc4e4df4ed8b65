"""Programs that compare Paceline with its peers, and the emulated cluster (README.md)."""
