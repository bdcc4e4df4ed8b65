"""Error messages for collectives that do not end, made from the progress of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.comm.job import RankHosts, format_ranks
from paceline.comm.progress import BucketInfo, RankProgress
from paceline.core.errors import CommError

_NAMED_RANKS = 8


def stall_error(
    progress: Mapping[int, RankProgress],
    silent: Collection[int],
    buckets: Sequence[BucketInfo],
    stalled_s: float,
    timeout_s: float,
    hosts: RankHosts,
) -> CommError:
    """Returns the error that names the stalled exchange or collective, and the ranks that caused it.

    Args:
        progress: The last known progress of all ranks. At least one of them waits.
        silent: Ranks that have sent no heartbeat for a while, so their progress is out of date.
        buckets: The buckets of the exchange.
        stalled_s: Number of seconds that this rank has waited.
        timeout_s: The time limit that was exceeded.
        hosts: The hosts of all ranks.
    """
    what, absent = _stalled(progress, silent, buckets)
    named = _culprits(progress, absent, silent, hosts)
    more = len(named) - _NAMED_RANKS
    if more > 0:
        named = [*named[:_NAMED_RANKS], f"and {more} more ranks"]
    why = "; ".join(named) or "all ranks have entered it, and the network does not complete it"
    culprits = sorted(silent) or sorted(absent)
    place_to_look = (
        f"rank {culprits[0]}'s log and host" if culprits else "the network between the hosts"
    )
    return CommError(
        f"{what} stalled for {stalled_s:.3g} s: {why}",
        f"look into {place_to_look}; comm.timeout_s = {timeout_s:g} sets the wait; resume with "
        "--resume auto",
    )


def late_ranks(progress: Mapping[int, RankProgress], silent: Collection[int]) -> set[int]:
    """Returns the ranks for which others wait: silent ones, or else those that did not arrive.

    Args:
        progress: The last known progress of all ranks. At least one of them waits.
        silent: Ranks that have published nothing for a while.
    """
    return set(silent) or set(_stalled(progress, silent, ())[1])


def _stalled(
    progress: Mapping[int, RankProgress], silent: Collection[int], buckets: Sequence[BucketInfo]
) -> tuple[str, list[int]]:
    """Returns what stalls, and the ranks that publish progress but did not arrive."""
    known = {rank: s for rank, s in progress.items() if rank not in silent}
    waiting = [s for s in known.values() if s.waits]
    inside = [s for s in waiting if s.in_exchange]
    if inside:
        # The earliest bucket in which a rank waits: ranks in later buckets indirectly wait for it, too.
        first = min(inside, key=lambda s: (s.step, s.ended))
        what = f"step {first.step + 1}: the exchange of {_bucket(first.ended, buckets)}"
        place = (first.step, first.ended + 1)
        return what, [rank for rank, s in known.items() if (s.step, s.begun) < place]
    calls = min(s.calls for s in waiting)
    what = next(s.call for s in waiting if s.calls == calls)
    return what, [rank for rank, s in known.items() if s.calls < calls]


def unreachable_error(
    progress: RankProgress,
    rank: int,
    host: str,
    silent_s: float,
    closed: bool,
    hosts: RankHosts,
) -> CommError:
    """Returns the error for a rendezvous store that does not answer.

    Args:
        progress: This rank's progress.
        rank: This rank.
        host: The address of rank 0's host.
        silent_s: Number of seconds since the last answer of the store.
        closed: True if the store's connection was closed, which means that its process has ended.
        hosts: The hosts of all ranks.
    """
    answer = "has been gone" if closed else "has not answered"
    return CommError(
        f"{hosts.rank_label(rank)}, {progress.doing}: rank 0's host {hosts.of(0) or f'({host})'} "
        f"{answer} for {silent_s:.3g} s",
        "rank 0's host or this host has ended or lost its network; resume with --resume auto",
    )


def _bucket(index: int, buckets: Sequence[BucketInfo]) -> str:
    if index < len(buckets):
        return buckets[index].describe(index + 1, len(buckets))
    return f"bucket {index + 1}"


def _culprits(
    progress: Mapping[int, RankProgress],
    absent: Collection[int],
    silent: Collection[int],
    hosts: RankHosts,
) -> list[str]:
    """Returns a description of each rank or host that caused a stall.

    Hosts whose ranks are all silent come first, then other silent ranks. Ranks that still publish
    progress but have not reached the exchange come last, because they might only be slower.
    """
    silent_hosts = hosts.whole_hosts(silent)
    named = [
        f"host {host} with {format_ranks(ranks)} gives no sign of life "
        f"(last seen {progress[ranks[0]].doing})"
        for host, ranks in silent_hosts.items()
    ]
    named_with_host = {rank for ranks in silent_hosts.values() for rank in ranks}
    for rank in sorted(set(silent) - named_with_host):
        last = progress[rank].doing
        named.append(f"{hosts.rank_label(rank)} gives no sign of life (last seen {last})")
    for rank in sorted(set(absent) - set(silent)):
        named.append(f"{hosts.rank_label(rank)} did not arrive ({progress[rank].doing})")
    return named
