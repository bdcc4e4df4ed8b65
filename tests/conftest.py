"""What holds for all tests, whatever the load of the host.

torch has one thread in each process of the tests, unless the caller asks for more: several test processes
run at a time, and many start ranks. Threads that outnumber the cores spin at every barrier: on two busy
cores one thread takes about half the CPU time of two.

Hypothesis draws the same examples in every run and has no time limit: a test fails because of a change,
never because of a draw or a busy host. `pytest --hypothesis-profile explore` draws others.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from allowed_skips import SkipRecorder
from paceline.core.extensions import temporary_registrations

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


def pytest_configure(config: pytest.Config) -> None:
    """Set by `make test`. Not for the workers of xdist, nor for a pytest that a test starts."""
    if file := os.environ.pop("PACELINE_SKIPS", ""):
        config.pluginmanager.register(SkipRecorder(Path(file)))


@pytest.fixture
def registrations() -> Iterator[None]:
    """Undoes what a test registers."""
    with temporary_registrations():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A process group that a test has left would be refused by the next test that makes one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_collection_finish() -> None:
    """What has been imported stays: collectors of garbage need not look through it again, a quarter of a
    second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadscope`: the tests of a file run in one process, one after the other. So do all those of
    emulated clusters, each of which removes what a killed one has left."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            # Emulated links and jobs of many ranks want the cores for themselves: one after the other.
            return "busy" if "/cluster/" in file or "/scale/" in file else file

    return ByFile(config, log) if config.getvalue("dist") == "loadscope" else None
