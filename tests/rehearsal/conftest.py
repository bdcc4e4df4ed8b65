"""The command line in the test's own process, as for the tests of `cli`."""

from cli.conftest import call

__all__ = ["call"]
