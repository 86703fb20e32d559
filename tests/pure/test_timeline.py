"""How a step's time splits, against counting nanosecond by nanosecond."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.timeline import Span, StepSplit, Timeline


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A few spans of all kinds on two ranks, overlapping or not, some without length."""
    spans = []
    for _ in range(draw(st.integers(0, 12))):
        lane = draw(st.sampled_from(["COMP", "COMM", "LINK"]))
        names = {"COMP": ["F_MLP:L0", "B_MLP:L0", "W_MLP:L0"], "COMM": ["F_DISP:L0", "B_COMB:L0"], "LINK": ["SEND_F"]}
        start = draw(st.integers(0, 30))
        spans.append(
            Span(
                rank=draw(st.integers(0, 1)),
                lane=lane,
                name=draw(st.sampled_from(names[lane])),
                stage=0,
                microbatch=0,
                start_ns=start,
                end_ns=start + draw(st.integers(0, 10)),
            )
        )
    return Timeline(label="", source="simulated", ranks=2, spans=tuple(spans))


def counted(timeline: Timeline, rank: int) -> StepSplit:
    compute = [s for s in timeline.spans if s.rank == rank and s.lane == "COMP"]
    comm = [s for s in timeline.spans if s.rank == rank and s.lane == "COMM"]
    first_backward = min((s.start_ns for s in compute if s.name.startswith("B_")), default=timeline.step_ns)
    last_forward = max((s.end_ns for s in compute if s.name.startswith("F_")), default=0)
    parts = dict.fromkeys(("compute_ns", "exposed_ns", "warmup_ns", "imbalance_ns", "cooldown_ns"), 0)
    for t in range(timeline.step_ns):
        if any(s.start_ns <= t < s.end_ns for s in compute):
            parts["compute_ns"] += 1
        elif any(s.start_ns <= t < s.end_ns for s in comm):
            parts["exposed_ns"] += 1
        elif t < first_backward:
            parts["warmup_ns"] += 1
        elif t < last_forward:
            parts["imbalance_ns"] += 1
        else:
            parts["cooldown_ns"] += 1
    return StepSplit(**parts)


@given(timelines())
def test_split_is_what_counting_gives(timeline: Timeline) -> None:
    splits = [timeline.split(rank) for rank in range(2)]
    assert splits == [counted(timeline, rank) for rank in range(2)]
    for split in splits:
        assert split.compute_ns + split.exposed_ns + split.bubble_ns == timeline.step_ns
    mean = timeline.mean_split()
    assert mean.compute_ns == round((splits[0].compute_ns + splits[1].compute_ns) / 2)
    assert mean.cooldown_ns == round((splits[0].cooldown_ns + splits[1].cooldown_ns) / 2)


def test_spans_of_a_rank_come_by_start() -> None:
    def span(rank: int, lane: str, start: int) -> Span:
        return Span(rank=rank, lane=lane, name="F_MLP:L0", stage=0, microbatch=0, start_ns=start, end_ns=start + 1)

    spans = (span(0, "COMP", 5), span(1, "COMP", 1), span(0, "COMM", 3), span(0, "COMP", 2))
    timeline = Timeline(label="", source="emulated", ranks=2, spans=spans)
    assert timeline.step_ns == 6
    assert [s.start_ns for s in timeline.of(0)] == [2, 3, 5]
    assert [s.start_ns for s in timeline.of(0, "COMP")] == [2, 5]
