"""The documents agree with the code: links, commands, settings and programs are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import paceline as pl
from paceline.cli.app import app
from paceline.config import SECTIONS, parse_assignment, setting_names

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md")]
TOP.append(ROOT / "benchmarks/README.md")
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Files of the run folder and of records, and methods that callbacks call.
NOT_SETTINGS = {"run.lock", "run.log", "run.stop", "run.save", "run.note", "data.jsonl"}
_KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})(\.[a-z][a-z0-9_]*)+)")


def blocks(text: str, *languages: str) -> list[str]:
    # Every fence is matched, so that the end of a block in another language does not begin one.
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [block for language, block in found if language in languages]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def commands(text: str) -> list[list[str]]:
    """The `paceline` commands of a page that are complete, without their comments."""
    found = []
    for line in shell_lines(text):
        start = line.find("paceline ") if "-m paceline " in line else 0
        if line[start:].startswith("paceline "):
            found.append(shlex.split(line[start:], comments=True)[1:])
    return found


def shell_lines(text: str) -> list[str]:
    """Lines of code without a language or in bash, but for those with an ellipsis or an [OPTION]."""
    lines = "".join(blocks(text, "", "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if "…" not in line and not re.search(r"\[[-A-Z]", line)]


COMMANDS = [
    (name, line)
    for name, page in zip(NAMES, PAGES, strict=True)
    for line in commands(page.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, part = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            missing.append(target)
        elif part:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            if part not in map(anchor, headings):
                missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_that_are_named_exist(page: Path) -> None:
    named = {match[0] for match in _KEY.findall(page.read_text())}
    known = set(setting_names())
    tables = {name.rpartition(".")[0] for name in known}
    assert named - known - tables - NOT_SETTINGS == set()


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[" ".join(line) for _, line in COMMANDS])
def test_commands_parse(page: str, line: list[str]) -> None:
    command = typer.main.get_command(app)
    arguments = list(line)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        command = command.get_command(None, arguments.pop(0))
    parameters = command.make_context(line[0], arguments).params
    for assignment in parameters.get("settings") or []:
        assert parse_assignment(assignment)[0] in setting_names(), f"{page}: {assignment}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_code_is_in_a_language_that_is_not_read(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.M)
    assert set(fences[::2]) <= {"", "bash", "python", "toml", "yaml"}
    assert fences[1::2] == [""] * (len(fences) // 2), "a block is open"
    assert len(fences) % 2 == 0, "a block is open"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_programs_compile(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_programs_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"\bbenchmarks\.(\w+)", page.read_text())
    found = [ROOT / "benchmarks" / name for name in named]
    assert all(path.is_dir() or path.with_suffix(".py").is_file() for path in found), named


def test_the_api_page_documents_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = [
        name for names in re.findall(r"<!-- autodoc: (.*?) -->", page) for name in names.split()
    ]
    assert sorted(named) == sorted(set(pl.__all__) - {"__version__"})


def test_the_first_page_links_to_all_others() -> None:
    page = (ROOT / "docs/index.md").read_text()
    linked = set(re.findall(r"^- \[[^]]*\]\(([\w-]+\.md)\)", page, re.M))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_call_paths_name_modules_that_exist() -> None:
    paths = (ROOT / "DESIGN.md").read_text().split("## Call paths")[1].split("## Numeric")[0]
    rows = re.findall(r"^\| (`.*?) \|", paths, re.M)
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    assert len(named) > 30
    assert {name for name in named if not (ROOT / f"src/paceline/{name}.py").exists()} == set()
