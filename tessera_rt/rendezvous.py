"""Does a plan's message order ever block? A run of its actions without times, under unbuffered sends.

Every rank walks its list: a pass starts when its input is there, and its output is offered when its last task has been
issued. A message moves only when the receiver has posted the receive for it. A rank posts receives while it waits for
an input: on every incoming edge one, for the next message in the order in which the edge's sender sends them
(``messages_from``). The sender does not wait. All dp x ep ranks of a pipeline rank run the same list, so one of them
stands for all, and their collectives come in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tessera_rt.plan import Action, ActionKind, Message, Plan, messages_from, output_of
from tessera_rt.tasks import Pass

Input = tuple[Pass, int, int]  # what a pass needs: F or B, stage, micro-batch


@dataclass(frozen=True, slots=True)
class PassEvent:
    """A pass starts (needs its input) or ends (its output exists). ``index``: of its action in the rank's list."""

    index: int
    part: Action
    starts: bool


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that waits for ever in action ``index`` of its list; ``reason`` says for what and where that stands."""

    rank: int
    index: int
    action: Action
    reason: str


def pass_events(plan: Plan, rank: int, *, overlap: bool = True) -> list[PassEvent]:
    """Starts and ends of the passes of a rank, in the order in which the rank comes to them.

    In an overlap a pass starts at its first task and ends at its last one; a pass over an empty stage does both at
    once, when the action begins. With overlap off the passes of an action follow one another as listed.
    """
    patterns: dict[str, list[tuple[int, bool]]] = {}
    events: list[PassEvent] = []
    for index, action in enumerate(plan.actions[rank]):
        key = action.key if overlap else ""
        if not overlap or len(action.passes) == 1:
            pattern = [(part, starts) for part in range(len(action.passes)) for starts in (True, False)]
        elif key in patterns:
            pattern = patterns[key]
        else:
            pattern = patterns[key] = _pattern(action, plan.interleavings[key].order)
        events += [PassEvent(index, action.passes[part], starts) for part, starts in pattern]
    return events


def find_stuck(plan: Plan, *, overlap: bool = True) -> tuple[Stuck, ...]:
    """The ranks that never reach the end of their list (none: the plan runs through).

    The plan's stages, actions and interleavings must already be known to be whole (``check_plan`` looks first).
    """
    return _Run(plan, overlap).result()


def _pattern(action: Action, order: tuple[str, ...]) -> list[tuple[int, bool]]:
    """(part, starts) by position in the order."""
    marks: list[tuple[int, int, int, bool]] = []
    for number, part in enumerate(action.passes):
        letter = {ActionKind.F: "F_", ActionKind.W: "W_"}.get(part.kind, "B_")
        positions = [i for i, name in enumerate(order) if name.startswith(letter)] or [-1]
        marks.append((positions[0], number, 0, True))
        marks.append((positions[-1], number, 1, False))
    return [(number, starts) for _, number, _, starts in sorted(marks)]


class _Run:
    """State of the simulation: how far every rank is, and what lies on every edge."""

    def __init__(self, plan: Plan, overlap: bool) -> None:
        self.plan = plan
        self.overlap = overlap
        self.events = [pass_events(plan, rank, overlap=overlap) for rank in range(plan.mesh.pp)]
        self.at = [0] * plan.mesh.pp
        self.offered: set[Message] = set()
        self.arrived: set[Input] = set()  # by message, or made on the rank itself
        self.edges: list[dict[int, deque[Message]]] = [{} for _ in range(plan.mesh.pp)]  # [target][source], in order
        for rank in range(plan.mesh.pp):
            for message in messages_from(plan, rank, overlap=overlap):
                self.edges[message.target].setdefault(rank, deque()).append(message)

    def result(self) -> tuple[Stuck, ...]:
        waiting = deque(range(self.plan.mesh.pp))
        while waiting:
            waiting.extend(self._advance(waiting.popleft()))
        return tuple(
            Stuck(rank, events[at].index, self.plan.actions[rank][events[at].index], self._reason(rank))
            for rank, (events, at) in enumerate(zip(self.events, self.at, strict=True))
            if at < len(events)
        )

    def _advance(self, rank: int) -> set[int]:
        """Walk on until an input is missing; returns the ranks that were offered something."""
        woken: set[int] = set()
        events = self.events[rank]
        while self.at[rank] < len(events):
            event = events[self.at[rank]]
            if event.starts:
                needed = self._input(event.part)
                if needed and needed not in self.arrived:
                    self._receive(rank)
                    if needed not in self.arrived:
                        break
            elif event.part.kind is not ActionKind.W:
                message = output_of(self.plan, event.part)
                if message:
                    self.offered.add(message)
                    woken.add(message.target)
                else:
                    forward = event.part.kind is ActionKind.F
                    to_stage = event.part.stage + (1 if forward else -1)
                    self.arrived.add((Pass.F if forward else Pass.B, to_stage, event.part.microbatch))
            self.at[rank] += 1
        return woken

    def _receive(self, rank: int) -> None:
        """The rank waits: take from every incoming edge what is offered, in the edge's order."""
        for edge in self.edges[rank].values():
            while edge and edge[0] in self.offered:
                message = edge.popleft()
                self.arrived.add((message.pass_, message.to_stage, message.microbatch))

    def _input(self, part: Action) -> Input | None:
        """What a pass waits for besides what its own rank's list already guarantees."""
        match part.kind:
            case ActionKind.F if part.stage > 0:
                return Pass.F, part.stage, part.microbatch
            case ActionKind.B | ActionKind.I if part.stage < len(self.plan.stages) - 1:
                return Pass.B, part.stage, part.microbatch
            case _:
                return None

    def _reason(self, rank: int) -> str:
        event = self.events[rank][self.at[rank]]
        needed = self._input(event.part)
        assert needed is not None
        pass_, stage, microbatch = needed
        sender_stage = stage + (-1 if pass_ is Pass.F else 1)
        sender = self.plan.stages[sender_stage].rank
        producer = f"{sender_stage}{pass_}{microbatch}"
        if sender == rank:
            return f"{event.part} waits for {producer}, which comes later on the same rank"
        at = self.events[sender][self.at[sender]] if self.at[sender] < len(self.events[sender]) else None
        state = f"waits in {self.plan.actions[sender][at.index]}" if at else "has ended"
        return f"{event.part} waits for {sender_stage}SEND_{pass_}{microbatch} from rank {sender}, which itself {state}"
