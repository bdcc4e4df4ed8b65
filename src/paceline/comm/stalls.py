"""What is reported when an exchange stalls: the progress of all ranks as one line, `cause; remedy`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.comm.job import RankHost, RankHosts, format_ranks
from paceline.comm.progress import BucketInfo, RankProgress
from paceline.core.errors import CommError

_NAMED_RANKS = 8


def stall_error(
    progress: Mapping[int, RankProgress],
    silent: Collection[int],
    buckets: Sequence[BucketInfo],
    stalled_s: float,
    timeout_s: float,
    hosts: RankHosts | None = None,
) -> CommError:
    """Which exchange or collective stalled, and because of whom. At least one rank `waits`; `silent`
    ranks have published nothing for a while, so what is known of them is out of date."""
    hosts = hosts or RankHosts()
    known = {rank: s for rank, s in progress.items() if rank not in silent}
    waiting = {rank: s for rank, s in known.items() if s.waits}
    inside = [s for s in waiting.values() if s.in_exchange]
    if inside:
        # The earliest place at which somebody waits: later ones wait for that one too.
        first = min(inside, key=lambda s: (s.step, s.ended))
        what = f"step {first.step + 1}: the exchange of {_bucket(first.ended, buckets)}"
        place = (first.step, first.ended + 1)
        absent = [rank for rank, s in known.items() if (s.step, s.begun) < place]
    else:
        calls = min(s.calls for s in waiting.values())
        called = next(s.call for s in waiting.values() if s.calls == calls)
        what, absent = called, [rank for rank, s in known.items() if s.calls < calls]
    named = _culprits(progress, absent, silent, hosts)
    left_out = len(named) - _NAMED_RANKS
    if left_out > 0:
        named = [*named[:_NAMED_RANKS], f"{left_out} more ranks likewise"]
    why = "; ".join(named) or "all ranks are in it, and the network does not complete it"
    return CommError(
        f"{what} stalled for {stalled_s:.3g} s: {why}",
        f"look into {_look(absent, silent, hosts)}; comm.timeout_s = {timeout_s:g} sets the wait; go on "
        "with --resume auto",
    )


def unreachable_error(
    progress: RankProgress,
    rank: int,
    host: str,
    silent_s: float,
    closed: bool,
    hosts: RankHosts | None = None,
    reached: Sequence[RankHost] | None = None,
) -> CommError:
    """The rendezvous store does not answer; `closed`: its connection was closed, so its process has
    ended. `reached`: of the hosts other than rank 0's and this one, those that answer; None where
    there are none."""
    hosts = hosts or RankHosts()
    answer = "has been gone" if closed else "has not answered"
    there = f"rank 0's host {hosts.of(0) or f'({host})'}"
    cause = f"{hosts.rank_label(rank)}, {progress.doing}: {there} {answer} for {silent_s:.3g} s"
    cut = "it or this host has ended or is cut off the network"
    if reached:
        cause += f", though {', '.join(map(str, reached))} can be reached"
        cut = "that host has ended, or the network between it and this host is cut"
    elif reached is not None and not closed:
        cause += ", nor does any other host answer"
        cut = f"this host {hosts.of(rank)} is cut off the network"
    return CommError(cause, f"{cut}; go on with --resume auto")


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
    """Silent ranks first, as whole hosts where all ranks of a host are silent. Ranks that have not
    arrived but still publish come last: they may only be slower than the others."""
    gone = hosts.whole_hosts(silent)
    named = [
        f"host {host} with {format_ranks(ranks)} gives no sign of life "
        f"(last seen {progress[ranks[0]].doing})"
        for host, ranks in gone.items()
    ]
    named_with_host = {rank for ranks in gone.values() for rank in ranks}
    for rank in sorted(set(silent) - named_with_host):
        last = progress[rank].doing
        named.append(f"{hosts.rank_label(rank)} gives no sign of life (last seen {last})")
    for rank in sorted(set(absent) - set(silent)):
        named.append(f"{hosts.rank_label(rank)} did not arrive ({progress[rank].doing})")
    return named


def _look(absent: Collection[int], silent: Collection[int], hosts: RankHosts) -> str:
    culprits = sorted(silent) or sorted(absent)
    if not culprits:
        return "the network between the hosts"
    where = f"rank {culprits[0]}'s log and host"
    # A host that publishes nothing may be running, with its link cut.
    apart = silent and all(hosts.of(rank) not in (None, hosts.of(0)) for rank in silent)
    return f"{where}, and the network to it" if apart else where
