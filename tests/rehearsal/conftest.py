"""Runs the command line in the test's own process, as the tests of `cli` do."""

from cli.conftest import call

__all__ = ["call"]
