"""Faults of signalling code that the interpreter cannot show: it runs in order and ignores fences.

Three checks read PTX; they are conservative about what they understand: straight-line text between labels and branches.
One reads the source, because the compiler drops a loop that waits by a plain load before there is any PTX.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RELEASE = re.compile(r"\b(?:atom|red|st|fence)\b[\w.:]*\.(?:release|acq_rel)\b")
_BARRIER = re.compile(r"\bbar(?:rier)?\.(?:cta\.)?(?:red\.)?sync\b")
_WRITE = re.compile(r"\b(?:st|atom|red)\.(?!shared|param|local)[\w.:]*")
_LABEL = re.compile(r"^(\$?[\w$]+):")
_BRANCH = re.compile(r"^(?:@(!?)(%\w+)\s+)?bra(?:\.uni)?\s+(\$?[\w$]+)\s*;")
_TARGETS = re.compile(r"^(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%[\w]+)")
_POLL = re.compile(r"\b(?:ld|atom|mbarrier)\b")
_WORK = re.compile(r"^(?:@!?%\w+\s+)?(?:st|red|bar|barrier|cp|add|sub|mad|fma|mul|wgmma|mma|tcgen05)\b")
_STRONG_POLL = re.compile(r"\b(?:ld|atom)\b(?=[\w.:]*\.(?:volatile|relaxed|acquire|acq_rel)\b)(?=[\w.:]*global)")
_LOAD = re.compile(r"\bld\.(?P<how>[\w.:]*).*\[\s*(?P<address>%\w+)")


def releases_without_barrier(ptx: str) -> list[str]:
    """Release operations that may overtake other threads' writes: no CTA barrier stands between them and the last
    global write (or the start of the kernel). Triton 3.6 to 3.8 put none there by themselves."""
    found = []
    lines = _statements(ptx)
    for number, line in enumerate(lines):
        if _RELEASE.search(line):
            for before in reversed(lines[:number]):
                if _BARRIER.search(before):
                    break
                if _WRITE.search(before) or before.startswith(".visible .entry"):
                    found.append(line)
                    break
            else:
                found.append(line)
    return found


def plain_loads_in_wait_loops(ptx: str) -> list[str]:
    """Spinning loops that poll by a plain load of a fixed address, or that have nothing left that could end them: both
    can spin forever. A spinning loop writes no memory, has no barrier and counts nothing."""
    found = []
    for loop in _spinning_loops(ptx):
        written = {register for line in loop.body for register in _written(line)}
        polls = [line for line in loop.body if _POLL.search(line)]
        for line in polls:
            load = _LOAD.search(line)
            if load and "global" in load["how"]:
                strong = any(word in load["how"] for word in ("volatile", "acquire", "relaxed", "mmio"))
                if not strong and load["address"] not in written:
                    found.append(line)
        if not polls:
            found.append(f"loop {loop.label} polls nothing")
    return found


def waits_without_acquire(ptx: str) -> list[str]:
    """Polls of global memory in loops none of whose polls acquires: what is read after such a wait may be old. A loop
    that also counts its polls is one too."""
    found = []
    for loop in _loops(_statements(ptx)):
        polls = [line for line in loop.body if _STRONG_POLL.search(line)]
        if polls and not any(".acquire" in line or ".acq_rel" in line for line in polls):
            found += polls
    return found


def plain_waits_in_source(source: str) -> list[str]:
    """The conditions of ``while`` loops of Python source that wait by ``load`` without volatile=True, as text: the
    condition loads, or a variable of it is loaded again in the loop from an address that stays the same."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.While):
            continue
        assigned = [step for part in node.body for step in ast.walk(part) if isinstance(step, ast.Assign)]
        changed = {name for step in assigned for target in step.targets for name in _names(target)}
        changed |= {name for part in node.body for step in ast.walk(part) if isinstance(step, ast.AugAssign)
                    for name in _names(step.target)}  # fmt: skip
        polls = list(_plain_loads(node.test))
        for step in assigned:
            if any(_names(target) & _names(node.test) for target in step.targets):
                polls += [load for load in _plain_loads(step.value) if not _names(load) & changed]
        found += [ast.unparse(node.test)] if polls else []
    return found


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _plain_loads(node: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "load":
            given = {word.arg: word.value for word in call.keywords}
            volatile = given.get("volatile")
            if not (isinstance(volatile, ast.Constant) and volatile.value is True):
                yield call


@dataclass(frozen=True, slots=True)
class _Loop:
    label: str
    body: Sequence[str]


def _spinning_loops(ptx: str) -> Iterator[_Loop]:
    return (loop for loop in _loops(_statements(ptx)) if not any(_WORK.match(line) for line in loop.body))


def _loops(lines: Sequence[str]) -> Iterator[_Loop]:
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = number
        branch = _BRANCH.match(line)
        if branch and branch[3] in labels:
            yield _Loop(branch[3], lines[labels[branch[3]] : number + 1])


def _written(line: str) -> list[str]:
    """Registers a statement writes: its first operand (or the list of them); none for stores and branches."""
    if re.match(r"^(?:@!?%\w+\s+)?(?:st|bra|bar|red|ret|call)\b", line):
        return []
    target = _TARGETS.match(line)
    both = re.match(r"^(?:@!?%\w+\s+)?setp[\w.:]*\s+(%\w+)\|(%\w+)", line)
    if both:
        return [both[1], both[2]]
    return re.findall(r"%\w+", target[1]) if target else []


def _statements(ptx: str) -> list[str]:
    text = re.sub(r"//[^\n]*", "", ptx)
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(".loc")]
