"""What holds for all tests, whatever the load of the host.

torch has one thread in each process of the tests, unless the caller asks for more: several test processes
run at a time, and many start ranks. Threads that outnumber the cores spin at every barrier: on two busy
cores one thread takes about half the CPU time of two.

Hypothesis draws the same examples in every run and has no time limit: a test fails because of a change,
never because of a draw or a busy host. `pytest --hypothesis-profile explore` draws others.
"""

import os

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` the tests of a directory run in one process, one after the other, but for
    those with another group of their own."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(item.path.parent.name))
