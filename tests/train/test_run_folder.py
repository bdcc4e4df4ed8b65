from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.train.run_folder import RunFolder, choose_run_folder
from small_runs import small_config


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(folder: RunFolder, *, step: int | None = None, finished: bool = False) -> None:
    folder.write_config(small_config(""))
    if step is not None:
        folder.checkpoints.mkdir(exist_ok=True)
        (folder.checkpoints / f"step-{step:08d}.pt").touch()
    if finished:
        (folder.path / "summary.json").touch()


def test_new_runs_are_numbered() -> None:
    names = [str(choose_run_folder(small_config(""), restarted=False).path) for _ in range(3)]
    assert names == ["runs/small-001", "runs/small-002", "runs/small-003"]


@pytest.mark.parametrize("how", ["flag", "restart"])
def test_auto_finds_the_newest_unfinished_run_of_this_configuration(how: str) -> None:
    folders = [choose_run_folder(small_config(""), restarted=False) for _ in range(4)]
    started(folders[0], step=5)
    started(folders[1], step=7)
    started(folders[2], step=9, finished=True)
    folders[3].write_config(small_config("", optim__lr=0.5))
    config = small_config("", run__resume="auto" if how == "flag" else "", data__workers=3)
    found = choose_run_folder(config, restarted=how == "restart")
    assert found == RunFolder(
        Path("runs/small-002"), Path("runs/small-002/checkpoints/step-00000007.pt")
    )


def test_auto_finds_a_run_from_before_there_were_some_settings() -> None:
    folder = choose_run_folder(small_config(""), restarted=False)
    started(folder, step=5)
    config = folder.path / "config.toml"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(("mixup", "cutmix"))]
    assert len(older) == len(lines) - 2
    config.write_text("".join(older), encoding="utf-8")
    found = choose_run_folder(small_config("", run__resume="auto"), restarted=False)
    assert found.resume_from == folder.path / "checkpoints/step-00000005.pt"
    other = choose_run_folder(small_config("", run__resume="auto", run__mixup=0.2), restarted=False)
    assert other.resume_from is None


@pytest.mark.parametrize("content", [b"run = 3\n", b"[run\n", b"\xff"])
def test_auto_passes_by_what_is_no_configuration(content: bytes) -> None:
    folder = choose_run_folder(small_config(""), restarted=False)
    started(folder, step=5)
    (folder.path / "config.toml").write_bytes(content)
    found = choose_run_folder(small_config("", run__resume="auto"), restarted=False)
    assert found == RunFolder(Path("runs/small-002"), None)


def test_auto_starts_anew_where_there_is_nothing_to_resume() -> None:
    found = choose_run_folder(small_config("", run__resume="auto"), restarted=False)
    assert found == RunFolder(Path("runs/small-001"), None)


def test_a_restart_before_the_first_checkpoint_starts_over_in_the_same_folder() -> None:
    started(RunFolder(Path("here"), None))
    assert choose_run_folder(small_config("here"), restarted=True) == RunFolder(Path("here"), None)


def test_an_output_that_holds_a_run_is_not_overwritten() -> None:
    started(RunFolder(Path("here"), None), step=3)
    with pytest.raises(
        ConfigError, match=r"run.output = 'here': already holds a run; add --resume"
    ):
        choose_run_folder(small_config("here"), restarted=False)
    found = choose_run_folder(small_config("here", run__resume="auto"), restarted=False)
    assert found.resume_from == Path("here/checkpoints/step-00000003.pt")


def test_a_checkpoint_by_name_continues_its_own_run() -> None:
    started(RunFolder(Path("here"), None), step=3)
    file = "here/checkpoints/step-00000003.pt"
    found = choose_run_folder(small_config("", run__resume=file), restarted=False)
    assert found.path.resolve() == Path("here").resolve()
    elsewhere = choose_run_folder(small_config("there", run__resume=file), restarted=False)
    assert elsewhere == RunFolder(Path("there"), Path(file))
    by_folder = choose_run_folder(small_config("", run__resume="here"), restarted=False)
    assert by_folder.resume_from == Path(file)


@pytest.mark.parametrize("resume", ["nowhere.pt", "empty"])
def test_a_checkpoint_that_is_not_there_is_named(resume: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        choose_run_folder(small_config("", run__resume=resume), restarted=False)


def test_an_output_that_cannot_be_made_is_named() -> None:
    Path("file").touch()
    with pytest.raises(PacelineError, match="choose another --output"):
        choose_run_folder(small_config("file/run"), restarted=False)
    with pytest.raises(PacelineError, match="is not a folder"):
        choose_run_folder(small_config("file"), restarted=False)


def test_a_restart_goes_on_from_what_the_run_saved_since() -> None:
    started(RunFolder(Path("a"), None), step=1000)
    file = "a/checkpoints/step-00001000.pt"
    started(RunFolder(Path("b"), None), step=5000)
    config = small_config("b", run__resume=file)
    with pytest.raises(ConfigError, match="already holds a run"):
        choose_run_folder(config, restarted=False)
    found = choose_run_folder(config, restarted=True)
    assert found == RunFolder(Path("b"), Path("b/checkpoints/step-00005000.pt"))


def test_auto_says_what_it_did_not_find() -> None:
    started(choose_run_folder(small_config(""), restarted=False), step=5)
    config = small_config("", run__resume="auto", optim__lr=0.5)
    found = choose_run_folder(config, restarted=False)
    assert found.resume_from is None
    assert found.note.endswith("a new one starts (runs/small-001 differs in optim.lr)")


def test_a_folder_that_may_not_be_looked_into_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(PacelineError, match="here cannot be used: Permission denied"):
        choose_run_folder(small_config("here"), restarted=False)


def test_auto_finds_a_run_from_before_the_share_of_warm_up() -> None:
    """Command lines now set a share; a run without one keeps its own schedule."""
    folder = choose_run_folder(small_config(""), restarted=False)
    started(folder, step=5)
    config = folder.path / "config.toml"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    config.write_text("".join(x for x in lines if not x.startswith("warmup_max_share")))
    asked = {"run__resume": "auto", "optim__warmup_max_share": 0.2}
    found = choose_run_folder(small_config("", **asked), restarted=False)
    assert found.resume_from == folder.path / "checkpoints/step-00000005.pt"
    config.write_text("".join(lines))
    other = choose_run_folder(small_config("", **asked), restarted=False)
    assert other.resume_from is None
