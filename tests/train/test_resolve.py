"""What settings, data and device decide, and the table of combinations that are refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from paceline.comm import settings as comm
from paceline.config import Job, RunConfig, exclusions, load_config, setting_names
from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.data import settings as data
from paceline.optim import settings as optim
from paceline.train.components import Components
from paceline.train.resolve import Facts, refuse, resolve
from refusals import refused

TABLE = (
    *exclusions.EXCLUSIONS,
    *comm.EXCLUSIONS,
    *optim.EXCLUSIONS,
    *data.EXCLUSIONS,
)


@dataclass
class Box:
    size: tuple[int, ...] = (1, 2)
    lid: str = "open"


ROW = Exclusion(
    "box.size", not_in(()), {"box.lid": one_of("open"), "job.processes": one_of(2)},
    "is not supported with {box.lid!r}", "use []",
)  # fmt: skip


def test_a_row_refuses_only_if_all_conditions_hold() -> None:
    check_exclusions([ROW], box=Box(), job=Job(processes=1))
    check_exclusions([ROW], box=Box(lid="shut"), job=Job(processes=2))
    check_exclusions([ROW], box=Box(size=()), job=Job(processes=2))
    check_exclusions([ROW], box=Box())  # the job is not known yet
    with refused("box.size") as caught:
        check_exclusions([ROW], box=Box(), job=Job(processes=2))
    assert str(caught.value) == "box.size = [1, 2]: is not supported with 'open'; use []"


def test_rows_name_settings_and_facts_and_have_a_remedy() -> None:
    known = {*setting_names(), *(f"job.{f.name}" for f in fields(Job))}
    known |= {f"program.{f.name}" for f in fields(Components)}
    parts = RunConfig().sections() | {"job": Job(processes=1), "program": Components()}
    for row in TABLE:
        assert {row.field, *row.when} <= known
        assert row.problem.format(**parts)
        assert row.remedy.format(**parts)


def test_the_defaults_are_not_refused() -> None:
    check_exclusions(
        TABLE, **RunConfig().sections(), job=Job(processes=2, device="cuda"), program=Components()
    )


@pytest.mark.parametrize(
    ("values", "job", "program", "field"),
    [
        (
            {"run.strategy": "asynchronous"},
            Job(processes=2),
            Components(optimizer=dict),
            "optimizer",
        ),
        (
            {"run.strategy": "asynchronous"},
            Job(processes=2, device="cuda"),
            None,
            "precision.amp_dtype",
        ),
        (
            {"run.strategy": "rehearsal", "run.rehearsal.nodes": 2},
            Job(processes=2),
            None,
            "run.strategy",
        ),
        (
            {"run.strategy": "synced_norms"},
            Job(processes=3),
            None,
            "run.synced_norms.ranks",
        ),
        ({"optim.name": "halp"}, Job(processes=1), Components(augment=dict), "augment"),
        ({"optim.name": "halp"}, Job(processes=1, device="cuda"), None, "precision.amp_dtype"),
    ],
)
def test_facts_about_the_job_and_the_program_are_refused(
    values: dict[str, object], job: Job, program: Components | None, field: str
) -> None:
    plain = {"run.global_batch_size": 12, "data.augment": "none", "data.flip": False}
    if values.get("optim.name") == "halp":
        plain["optim.momentum"] = 0.0
    config = RunConfig().with_values(plain | values)
    with refused(field):
        refuse(config, job, program or Components())
    facts = Facts(job=job, program=program or Components(), samples=64, classes=10)
    with pytest.raises(ConfigError):
        resolve(config, facts)


def test_resolve_leaves_the_settings_and_returns_what_they_decide() -> None:
    given = {"run.output": "here", "run.epochs": 2, "run.batch_size": 4, "optim.lr": 0.1}
    config = load_config(None, given)
    facts = Facts(job=Job(processes=2), program=Components(), samples=64, classes=10)
    found = resolve(config, facts)
    assert found.config == config
    assert (found.sizes.global_batch, found.batches.total_steps) == (8, 16)
    assert found.schedule.peak == found.peak_lr == config.optim.peak_lr(8)
    before = config.flat()
    changed = {name for name, value in found.written.flat().items() if value != before.get(name)}
    assert changed == {"run.output", "run.global_batch_size"}
