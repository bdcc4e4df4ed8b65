"""The C library under AddressSanitizer and UBSan: no crash, no leak, nothing undefined."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from data.region.mutations import seed_jpegs
from paceline.data.decode.build import HERE as LIBRARY
from paceline.data.decode.build import SOURCES

HERE = Path(__file__).parent
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Dimensions are drawn at random: a small limit keeps memory and time within bounds.
FLAGS = ("-std=c11", "-O1", "-g", "-DREGION_MAX_PIXELS=1000000", f"-I{LIBRARY}")


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("seeds")
    found = []
    for number, data in enumerate(seed_jpegs(24) + seed_jpegs(90)):
        (folder / f"{number}.jpg").write_bytes(data)
        found.append(str(folder / f"{number}.jpg"))
    return found


@pytest.fixture(scope="module")
def sanitizing(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a compiler with working sanitizers. Skips the test without one."""
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "nothing.c").write_text("int main(void) { return 0; }\n")
    command = [compiler, *SANITIZERS, "-o", str(folder / "nothing"), str(folder / "nothing.c")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this compiler has no sanitizers")
    return compiler


def harness(compiler: str, folder: Path, *flags: str) -> Path:
    sources = [str(HERE / "fuzz_region.c"), *(str(LIBRARY / name) for name in SOURCES)]
    program = folder / "fuzz"
    command = [compiler, *FLAGS, *SANITIZERS, *flags, "-o", str(program), *sources, "-ljpeg", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def fuzz(program: Path, count: int, seed: int, files: list[str]) -> str:
    done = subprocess.run(
        [str(program), str(count), str(seed), *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("-DREGION_PORTABLE",)])
def test_ten_thousand(
    sanitizing: str, tmp_path: Path, jpegs: list[str], flags: tuple[str, ...]
) -> None:
    said = fuzz(harness(sanitizing, tmp_path, *flags), 10_000, 1, jpegs)
    files, arrays = (
        re.fullmatch(r"10000 (?:files|arrays): (\d+) done, .*", line) for line in said.splitlines()
    )
    assert files, said
    assert arrays, said
    assert int(files[1]) > 1_000, said
    assert int(arrays[1]) > 3_000, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million(sanitizing: str, tmp_path: Path, jpegs: list[str]) -> None:
    assert fuzz(harness(sanitizing, tmp_path), 1_000_000, 2, jpegs)
