from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.sources.image_folder import ImageFolder
from paceline.data.sources.retry import Retry


class Flaky:
    """Fails `failures` times, then answers."""

    def __init__(self, failures: int, number: int) -> None:
        self.left, self.number = failures, number

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise OSError(self.number, "some trouble")
        return "read"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_trouble_that_passes(number: int) -> None:
    waits: list[float] = []
    retry = Retry(6, sleep=waits.append)
    assert retry.call(Flaky(3, number)) == "read"
    assert retry.count == 3
    assert waits == [0.1, 0.2, 0.4]


def test_trouble_that_stays() -> None:
    waits: list[float] = []
    retry = Retry(8, sleep=waits.append)
    flaky = Flaky(100, errno.EIO)
    with pytest.raises(OSError, match="some trouble"):
        retry.call(flaky)
    assert flaky.left == 100 - 9
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR])
def test_what_does_not_pass_is_not_waited_for(number: int) -> None:
    retry = Retry(6, sleep=lambda wait_s: pytest.fail("waited"))
    with pytest.raises(OSError, match="some trouble"):
        retry.call(Flaky(1, number))
    assert retry.count == 0


def test_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"image")
    source = ImageFolder(tmp_path, retry=Retry(2, sleep=lambda wait_s: None))
    real, flaky = Path.read_bytes, Flaky(2, errno.EIO)
    monkeypatch.setattr(Path, "read_bytes", lambda path: flaky() and real(path))
    assert source.read(0) == b"image"
    assert source.retry.count == 2
    flaky.left = 3
    with pytest.raises(DataError, match=r"a/1\.jpg: cannot be read \(some trouble\)"):
        source.read(0)
