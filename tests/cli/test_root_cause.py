from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from paceline.cli.failure import Failure, root_cause

KILLED, TERMINATED = -int(signal.SIGKILL), -int(signal.SIGTERM)


@dataclass(frozen=True)
class Ended:
    exitcode: int
    message: Any = "Signal received by PID 7"


def told(line: str, code: int = 1, *, consequence: bool = False) -> Ended:
    extra = {"trace": "", "exit_code": str(code), "consequence": str(int(consequence))}
    return Ended(code, {"message": line, "extraInfo": extra})


def line_of(failures: dict[int, Ended]) -> str:
    found = root_cause(failures)
    assert isinstance(found, Failure)
    return found.line


def test_a_cause_is_told_before_its_consequences_and_before_the_silent() -> None:
    lost = told("another rank is gone", consequence=True)
    assert line_of({0: lost, 2: Ended(KILLED), 1: told("the shard is gone")}) == "the shard is gone"


def test_a_rank_that_fell_silent_is_told_before_what_others_made_of_it() -> None:
    lost = told("another rank is gone", consequence=True)
    assert line_of({0: lost, 1: Ended(KILLED)}).startswith("rank 1 was ended by SIGKILL; was it")


def test_of_the_silent_the_first_one_seen_counts() -> None:
    """The agent kills ranks that hang in a collective with a dead one; it saw that one first."""
    assert line_of({3: Ended(KILLED), 0: Ended(KILLED)}).startswith("rank 3 was")
    assert line_of({0: Ended(TERMINATED), 1: Ended(-11)}).startswith("rank 1 was ended by SIGSEGV;")


def test_only_consequences_are_better_than_nothing() -> None:
    assert line_of({1: told("rank 0 is gone", consequence=True)}) == "rank 0 is gone"


def test_ranks_that_were_asked_to_stop_are_no_failure() -> None:
    assert root_cause({0: Ended(143), 1: Ended(143)}) == 143
    assert root_cause({0: Ended(130), 1: Ended(TERMINATED)}) == 130
    assert line_of({0: Ended(143), 1: Ended(KILLED)}).startswith("rank 1 was ended by SIGKILL")


def test_an_exit_without_a_word_and_a_signal_without_a_name() -> None:
    assert line_of({4: Ended(7)}).startswith("rank 4 ended with exit code 7 without a word")
    assert line_of({4: Ended(-40)}).startswith("rank 4 was ended by signal 40;")
