"""A model of elastic membership: all interleavings of a few members, their supervisors and the store.

Each member is a small state machine (`Member.at`), and `Protocol.moves` yields everything that can happen
next: a member acts, a process is lost, or a supervisor reports lost processes. `explore` visits every
reachable state, depth first, and checks in each of them that

- no member has applied a step twice,
- no two generations are active at once,
- members differ by at most the last update, and no published step is repeated,
- somebody can act until all living members have ended with the same updates (progress), and the job
  cannot go on for ever without a step (termination).

The value of an update is the generation whose members computed it, since another number of members gives
other bits. Members are interchangeable, so a state keeps them in sorted order. Each flaw of `FLAWS`
weakens one rule of the protocol, and the explorer must reject it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Where a member can be when its process is lost, in the order of a run. The fault tests lose processes at
# each of these points.
POINTS = (
    "computing",  # the gradients of its micro-batches
    "reducing",  # has sent its part of the all-reduce
    "reduced",  # has the averaged gradients, and has not applied them
    "noticed",  # has left the collective; waits until the log of losses is longer than its generation
    "agreed",  # has read the log to its end, which is the next generation
    "regrouping",  # waits for the other members of the next generation
    "regrouped",  # has sent the number of its updates to the other members
    "serving",  # is ahead, and sends the last averaged gradients to members that are behind
    "catching up",  # is behind, and receives them
    "finishing",  # has applied the last update
)
_ACTIVE = frozenset(POINTS) - {"noticed", "agreed", "regrouping"}
_IN_COLLECTIVE = frozenset({"reducing", "regrouped", "catching up", "finishing"})

FLAWS = {
    "no generation in messages": "parts that were sent in an earlier generation count in a later one",
    "repeats without comparing": "each member goes on with the step after its own last update",
    "all repeat": "members that are ahead repeat the step, too",
    "behind recompute": "members that are behind compute the step again, others wait",
    "reused buffers": "an abandoned all-reduce can write into the buffers of the next generation",
    "one set of buffers": "the next step overwrites the gradients that a member keeps",
    "keeps nothing received": "a member that has caught up has no gradients for others",
    "published when applied": "a step is published before all have applied it",
    "forms without waiting": "a generation begins without members that have not arrived",
    "lost while alive": "a supervisor reports a process that has not ended",
    "never abandons": "a member that waits for a generation does not read the log again",
    "ends without a word": "members that have finished do not write it into the log",
    "ends after the last update": "members end before the others have applied the last update",
}  # fmt: skip

# Values of gradients; others are the generation that computed them.
NOTHING, WRONG = -1, -2


class Part(NamedTuple):
    """What a member has sent in a collective of a generation."""

    generation: int
    operation: str
    step: int
    value: int


class Member(NamedTuple):
    """One process.

    Attributes:
        at: A point of `POINTS`, or `done`.
        generation: The number of entries of the log that this member follows.
        step: The step under way; while it is serving or catching up, the step that is sent.
        updates: Step and value of the applied updates.
        kept: The averaged gradients of the last update, if the member still has them.
        reduced: The averaged gradients that are not applied yet.
        sent: Its parts of collectives.
        lost: True if the process has ended.
        reported: The entry of the log that names it; 0 if there is none.
        serves: The last generation in which it had to serve members that were behind.
        spoils: True if an abandoned all-reduce can still write into its buffers.
        first: True for the member whose loss ends the job, if there is one.
    """

    at: str = "computing"
    generation: int = 0
    step: int = 1
    updates: tuple[tuple[int, int], ...] = ()
    kept: int = NOTHING
    reduced: int = NOTHING
    sent: frozenset[Part] = frozenset()
    lost: bool = False
    reported: int = 0
    serves: int = 0
    spoils: bool = False
    first: bool = False


class State(NamedTuple):
    members: tuple[Member, ...]
    # The number of entries of the log.
    log: int = 0
    finished: bool = False
    # The values of the published steps.
    published: tuple[int, ...] = ()


class Broken(Exception):
    """An invariant does not hold; `path` has the moves that led there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []


@dataclass(frozen=True)
class Protocol:
    """A job of `ranks` members and `steps` steps, in which up to `losses` processes are lost.

    If `first_lives`, the first member is never lost. Then it alone publishes steps, and may do so as soon
    as it has applied them. Otherwise a member publishes a step once all have applied it.
    """

    ranks: int
    steps: int = 2
    losses: int = 1
    min_ranks: int = 1
    first_lives: bool = False
    flaw: str = ""

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields what members and supervisors can do next, with the state that follows."""
        before = None
        for number, member in enumerate(state.members):
            # Equal members, which are neighbours, do the same.
            if member != before and not member.lost and member.at != "done":
                for what, after in self._acts(state, number, member):
                    yield f"{number} ({member.at}) {what}", after
            before = member
        gone = [n for n, member in enumerate(state.members) if member.lost and not member.reported]
        if self.flaw == "lost while alive" and not state.log:
            gone = [0]
        for size in range(1, len(gone) + 1):
            for some in itertools.combinations(gone, size):
                yield f"reported {some}", self._report(state, some)

    def losses_of(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields the losses that can happen next."""
        if sum(member.lost for member in state.members) < self.losses:
            for number, member in enumerate(state.members):
                if not member.lost and not member.first and member.at != "done":
                    yield member.at, _with(state, number, lost=True)

    def _report(self, state: State, some: tuple[int, ...]) -> State:
        state = state._replace(log=state.log + 1)
        for number in some:
            state = _with(state, number, reported=state.log)
        return state

    def _acts(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        at, generation = member.at, member.generation
        if at in _ACTIVE and (state.log > generation or self._is_broken(state, member)):
            yield "notices", self._leave(state, number, member)
        if at == "computing":
            kept = NOTHING if self.flaw == "one set of buffers" else member.kept
            part = Part(generation, "all-reduce", member.step, generation)
            yield "sends its part", self._send(state, number, part, at="reducing", kept=kept)
        elif at == "reducing":
            yield from self._reduce(state, number, member)
        elif at == "reduced":
            yield "applies", self._apply(state, number, member.reduced)
        elif at in ("noticed", "regrouping") and state.log > generation:
            if at == "noticed" or self.flaw != "never abandons":
                changes = {"at": "done"} if state.finished else {"at": "agreed"}
                yield "reads the log", _with(state, number, generation=state.log, **changes)
        elif at == "agreed":
            part = Part(generation, "join", 0, 0)
            yield "joins", self._send(state, number, part, at="regrouping")
        if at == "regrouping" and self._parts(state, member, "join") is not None:
            part = Part(generation, "compare", 0, len(member.updates))
            yield "is connected", self._send(state, number, part, at="regrouped")
        elif at == "regrouped" and (parts := self._parts(state, member, "compare")) is not None:
            yield from self._compare(state, number, member, parts)
        elif at == "serving":
            value = member.kept if member.kept != NOTHING else WRONG
            part = Part(generation, "serve", member.step, value)
            served = self._send(state, number, part)
            yield "serves", self._go_on(served, number, member.step)
        elif at == "catching up":
            for other in state.members:
                for part in other.sent:
                    if (part.generation, part.operation) == (generation, "serve"):
                        yield "catches up", self._apply(state, number, part.value)
        elif at == "finishing":
            yield from self._finish(state, number, member)

    def _reduce(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        parts = self._parts(state, member, "all-reduce", member.step)
        if parts is None:
            return
        value = member.generation if set(parts) == {member.generation} else WRONG
        # All members have applied the step before.
        state = self._publish_agreed(state, member)
        yield "has the average", _with(state, number, at="reduced", reduced=value)
        if member.spoils:
            yield "has a spoiled average", _with(state, number, at="reduced", reduced=WRONG)

    def _apply(self, state: State, number: int, value: int) -> State:
        member = state.members[number]
        if self.flaw == "behind recompute" and len(member.updates) >= member.step:
            return self._go_on(state, number, member.step)
        received = member.at == "catching up" and self.flaw == "keeps nothing received"
        changed = member._replace(
            updates=(*member.updates, (member.step, value)), reduced=NOTHING,
            kept=NOTHING if received else value,
        )  # fmt: skip
        if member.first or self.flaw == "published when applied":
            state = self._publish(state, changed)
        members = (*state.members[:number], changed, *state.members[number + 1 :])
        return self._go_on(state._replace(members=members), number, member.step)

    def _go_on(self, state: State, number: int, last: int) -> State:
        """Begins the step after `last`, or ends: after the last step, or with too few members."""
        few = len(_members_of(state, state.members[number].generation)) < self.min_ranks
        at = "finishing" if last == self.steps or few else "computing"
        return _with(state, number, at=at, step=last + 1)

    def _leave(self, state: State, number: int, member: Member) -> State:
        spoils = member.spoils or (self.flaw == "reused buffers" and member.at == "reducing")
        return _with(state, number, at="noticed", reduced=NOTHING, spoils=spoils)

    def _compare(
        self, state: State, number: int, member: Member, counts: list[int]
    ) -> Iterator[tuple[str, State]]:
        own = len(member.updates)
        most, least = max(counts, default=own), min(counts, default=own)
        if self.flaw == "repeats without comparing":
            yield "repeats", self._go_on(state, number, own)
        elif self.flaw in ("all repeat", "behind recompute"):
            yield "repeats", self._go_on(state, number, least)
        elif most == least:
            yield "is equal", self._go_on(self._publish_agreed(state, member), number, most)
        elif any(other.serves == member.generation for other in state.members):
            if own < most:
                yield "is behind", _with(state, number, at="catching up", step=most)
            elif member.serves == member.generation:
                yield "has to serve", _with(state, number, at="serving", step=most)
            else:
                yield "is ahead", self._go_on(state, number, most)
        else:  # the same rule at all members chooses one that is ahead, alive or not
            for other in _members_of(state, member.generation):
                place = state.members.index(other)
                sent = {p.value for p in other.sent if p[:2] == (member.generation, "compare")}
                if sent == {most}:
                    yield "chooses", _with(state, place, serves=member.generation)

    def _finish(self, state: State, number: int, member: Member) -> Iterator[tuple[str, State]]:
        part = Part(member.generation, "finish", 0, 0)
        if self.flaw == "ends after the last update":
            yield "ends", _with(state, number, at="done")
        elif part not in member.sent:
            yield "has finished", self._send(state, number, part)
        elif self._parts(state, member, "finish") is not None:
            state = self._publish_agreed(state, member)
            if self.flaw != "ends without a word" and not state.finished:
                state = state._replace(log=state.log + 1, finished=True)
            yield "ends", _with(state, number, at="done")

    def _send(self, state: State, number: int, part: Part, **changes: object) -> State:
        """Sends a part, and forgets parts of generations in which no member is left."""
        sent = state.members[number].sent | {part}
        state = _with(state, number, sent=sent, **changes)
        if self.flaw != "no generation in messages":
            oldest = min((m.generation for m in state.members if not m.lost), default=0)
            state = state._replace(
                members=tuple(
                    m._replace(sent=frozenset(p for p in m.sent if p.generation >= oldest))
                    for m in state.members
                )
            )
        return state

    def _parts(
        self, state: State, member: Member, operation: str, step: int = 0
    ) -> list[int] | None:
        """Returns what the members of `member`'s generation have sent; None if a part is missing."""
        mixes = self.flaw == "no generation in messages" and operation == "all-reduce"
        values = []
        for other in _members_of(state, member.generation):
            # The oldest part arrives first.
            found = min(
                (
                    part for part in other.sent
                    if part.operation == operation and part.step == step
                    and (part.generation == member.generation or mixes)
                ),
                default=None,
            )  # fmt: skip
            if found is not None:
                values.append(found.value)
            elif self.flaw != "forms without waiting" or operation not in ("join", "compare"):
                return None
        return values

    def _is_broken(self, state: State, member: Member) -> bool:
        """Returns True if the member's collective can fail: another member has left or has ended."""
        return member.at in _IN_COLLECTIVE and any(
            other.lost or other.at in ("noticed", "done") or other.generation != member.generation
            for other in _members_of(state, member.generation)
        )

    def _publish_agreed(self, state: State, member: Member) -> State:
        """Publishes the last update of a member, which all members have applied."""
        return self._publish(state, member) if member.updates and not self.first_lives else state

    def _publish(self, state: State, member: Member) -> State:
        step, value = member.updates[-1]
        published = (*state.published, *[NOTHING] * (step - len(state.published)))
        if published[step - 1] not in (NOTHING, value):
            raise Broken(f"step {step} is published twice, with different values")
        return state._replace(published=(*published[: step - 1], value, *published[step:]))

    def check(self, state: State, can_act: bool) -> None:
        """Raises Broken if an invariant does not hold.

        Args:
            state: A reachable state.
            can_act: True if a member or a supervisor can act in it.
        """
        living = [member for member in state.members if not member.lost]
        longest = max((member.updates for member in living), key=len, default=())
        for updates in {member.updates for member in living}:
            if [step for step, _ in updates] != list(range(1, len(updates) + 1)):
                raise Broken(f"steps {[step for step, _ in updates]} were applied")
            if updates != longest[: len(updates)]:
                raise Broken("members of one job differ")
            if len(longest) - len(updates) > 1:
                raise Broken("members differ by more than one update")
        for step, value in longest:
            if value == WRONG:
                raise Broken("a wrong value was applied")
            if state.published[step - 1 : step] not in ((), (NOTHING,), (value,)):
                raise Broken(f"published step {step} was repeated")
        active = {member.generation for member in living if member.at in _ACTIVE}
        if len(active) > 1:
            raise Broken("two generations are active")
        if not can_act:
            self._check_end(state, living)

    def _check_end(self, state: State, living: list[Member]) -> None:
        if any(member.at != "done" for member in living):
            raise Broken("living members wait for ever")
        counts = {len(member.updates) for member in living}
        if len(living) >= self.min_ranks:
            if counts != {self.steps}:
                raise Broken(f"ended after {counts} of {self.steps} steps")
        elif len(counts) > 1:
            raise Broken(f"ended after {counts} steps")


def _with(state: State, number: int, **changes: object) -> State:
    members = list(state.members)
    members[number] = members[number]._replace(**changes)  # type: ignore[arg-type]
    return state._replace(members=tuple(members))


def _members_of(state: State, generation: int) -> list[Member]:
    """Returns the members of a generation, as everybody derives them from the log."""
    return [m for m in state.members if not 0 < m.reported <= generation]


def _in_order(state: State) -> State:
    """Returns the state that stands for all orders of the members."""
    return state._replace(members=tuple(sorted(state.members, key=_key)))


def _key(member: Member) -> tuple[Any, ...]:
    return member[:6], sorted(member.sent), member[7:]


@dataclass
class Explored:
    """What an exploration has seen: numbers of states and moves, and where processes were lost."""

    states: int = 0
    moves: int = 0
    lost_at: set[str] = field(default_factory=set)


def explore(protocol: Protocol) -> Explored:
    """Visits every state that the protocol can reach.

    Raises:
        Broken: If an invariant does not hold, with the moves that lead there.
    """
    found = Explored()
    # True once everything that can follow a state has been visited.
    ended: dict[State, bool] = {}
    path: list[tuple[str, State, Iterator[tuple[str, State]]]] = []

    def visit(what: str, state: State) -> None:
        acts, losses = list(protocol.moves(state)), list(protocol.losses_of(state))
        found.states += 1
        found.moves += len(acts) + len(losses)
        found.lost_at |= {at for at, _ in losses}
        ended[state] = False
        lost = ((f"is lost while {at}", after) for at, after in losses)
        path.append((what, state, itertools.chain(acts, lost)))
        protocol.check(state, bool(acts))

    try:
        start = (*[Member()] * (protocol.ranks - 1), Member(first=protocol.first_lives))
        visit("", _in_order(State(start)))
        while path:
            what, after = next(path[-1][2], ("", None))
            if after is None:
                ended[path.pop()[1]] = True
                continue
            after = _in_order(after)
            if after not in ended:
                visit(what, after)
            elif not ended[after]:
                raise Broken("the job can go on for ever without a step")
    except Broken as broken:
        broken.path = [what for what, _, _ in path[1:]]
        raise
    return found
