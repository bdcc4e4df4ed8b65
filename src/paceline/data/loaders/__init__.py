"""The training loader and the evaluation loader, and the choice of their decoder."""
