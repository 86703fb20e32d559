"""Training data: every token once an epoch, the same rows under any layout, held-out data never trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt import data as data_module
from tessera_rt.config import DataSection
from tessera_rt.data import IGNORED, Data, Layout, Part, Tokens, Windows, open_data, shuffled
from tessera_rt.errors import SpecError
from tessera_rt.moe import steps


def test_positions_without_a_label_have_the_engines_label() -> None:
    assert IGNORED == steps.IGNORED


def section(**fields: object) -> DataSection:
    return DataSection.model_validate({"sequence": 8} | fields)


def write(path: Path, count: int, first: int = 0) -> str:
    path.write_bytes(bytes((first + i) % 251 for i in range(count)))
    return str(path)


def rows_read(data: Data, first: int, layout: Layout) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of a step over all data ranks, in the order of their global numbers."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for rank in range(layout.ranks):
        mine = Layout(rank=rank, ranks=layout.ranks, microbatches=layout.microbatches, rows=layout.rows)
        tokens, labels = data.batch(first, mine)
        assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape
        found |= dict(zip(mine.numbers(first), zip(tokens.tolist(), labels.tolist(), strict=True), strict=True))
    assert sorted(found) == list(range(first, first + layout.rows_per_step))
    return [found[number] for number in sorted(found)]


@given(size=st.integers(1, 300), key=st.text(max_size=4))
def test_shuffled_is_a_permutation(size: int, key: str) -> None:
    assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_shuffled_mixes_and_depends_on_the_key() -> None:
    orders = [[shuffled(i, 1000, key) for i in range(1000)] for key in ("0/0", "0/1", "1/0")]
    for order in orders:
        assert sum(a == i for i, a in enumerate(order)) < 10
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == [shuffled(i, 1000, "0/0") for i in range(1000)]


@given(count=st.integers(9, 100), sequence=st.integers(1, 8), parts=st.integers(1, 4))
def test_every_token_but_the_first_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, sequence: int, parts: int
) -> None:
    folder = tmp_path_factory.mktemp("windows")
    ids = np.arange(count, dtype=np.uint8)
    cuts = np.array_split(ids, parts)
    files = []
    for i, cut in enumerate(cuts):
        (folder / str(i)).write_bytes(cut.tobytes())
        files.append(Part(folder / str(i), np.dtype(np.uint8), 0, len(cut)))
    windows = Windows(Tokens(tuple(files), 256), sequence)
    seen: Counter[int] = Counter()
    for index in range(len(windows)):
        tokens, labels = windows.row(index)
        assert len(tokens) == len(labels) == sequence
        counted = labels != IGNORED
        assert np.array_equal(labels[counted], tokens[counted] + 1)  # the next token
        assert counted.sum() == windows.labels(index)
        seen.update(labels[counted].tolist())
    assert seen == Counter(range(1, count))


def test_any_layout_reads_the_same_rows(tmp_path: Path) -> None:
    data = open_data(section(files=[write(tmp_path / "a", 1000)]), vocab=256, seed=3)
    one = rows_read(data, 0, Layout(rank=0, ranks=1, microbatches=8, rows=2))
    assert rows_read(data, 0, Layout(rank=0, ranks=4, microbatches=2, rows=2)) == one
    assert rows_read(data, 0, Layout(rank=0, ranks=2, microbatches=8, rows=1)) == one
    # A run that is resumed with half the rows a step goes on where it was.
    half = Layout(rank=0, ranks=2, microbatches=2, rows=2)
    assert rows_read(data, 0, half) + rows_read(data, 8, half) == one


def test_an_epoch_has_every_window_once_then_another_order_comes(tmp_path: Path) -> None:
    data = open_data(section(files=[write(tmp_path / "a", 41)], held_out=0.0), vocab=256, seed=0)
    assert len(data.train) == 5
    layout = Layout(rank=0, ranks=1, microbatches=1, rows=5)
    epochs = [rows_read(data, 5 * epoch, layout) for epoch in range(6)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)
    other = open_data(section(files=[str(tmp_path / "a")], held_out=0.0), vocab=256, seed=1)
    assert any(rows_read(other, 5 * epoch, layout) != epochs[epoch] for epoch in range(6))


def test_the_end_of_one_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"t" * 900 + b"h" * 100)
    data = open_data(section(files=[str(path)], held_out=0.1), vocab=256, seed=0)
    assert data.held_out is not None
    assert data.train.tokens.read(0, 900).tolist() == [ord("t")] * 900 and len(data.train.tokens) == 900
    assert data.held_out.tokens.read(0, 100).tolist() == [ord("h")] * 100


def test_whole_files_are_held_out_where_that_is_about_the_share(tmp_path: Path) -> None:
    for name, count in (("a", 500), ("b", 400), ("c", 100)):
        (tmp_path / name).write_bytes(name.encode() * count)

    def held_out(share: float) -> bytes:
        found = open_data(section(files=[str(tmp_path / "*")], held_out=share), vocab=256, seed=0).held_out
        return b"" if found is None else bytes(found.tokens.read(0, len(found.tokens)).tolist())

    assert held_out(0.08) == b"c" * 100
    assert held_out(0.3) == b"b" * 400 + b"c" * 100
    assert held_out(0.02) == b"c" * 20  # the whole file would be five times the share
    assert held_out(0.0) == b""


def test_held_out_files_are_never_trained_on_even_if_named(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 50)
    files = [str(tmp_path / "*")]
    data = open_data(section(files=files, held_out_files=[str(tmp_path / "b")]), vocab=256, seed=0)
    assert data.held_out is not None
    assert bytes(data.train.tokens.read(0, 100).tolist()) == b"a" * 50 + b"c" * 50
    assert bytes(data.held_out.tokens.read(0, 50).tolist()) == b"b" * 50


def test_held_out_batches_count_every_label_once(tmp_path: Path) -> None:
    held = write(tmp_path / "held", 75)  # 74 labels in windows of 8: 10 windows
    data = open_data(section(files=[write(tmp_path / "a", 50)], held_out_files=[held]), vocab=256, seed=0)
    layouts = [Layout(rank=rank, ranks=2, microbatches=2, rows=1) for rank in range(2)]
    assert data.held_out_batches(0, layouts[0]) == 3  # of 4 windows
    assert data.held_out_batches(2, layouts[0]) == 2 and data.held_out_batches(9, layouts[0]) == 3
    seen: Counter[int] = Counter()
    total = 0
    for index in range(3):
        batches = [data.held_out_batch(index, layout) for layout in layouts]
        counted = sum(int((labels != IGNORED).sum()) for _, labels, _ in batches)
        assert {count for _, _, count in batches} == {counted}
        assert all(tokens.shape == (2, 8) for tokens, _, _ in batches)
        total += counted
        for _, labels, _ in batches:
            seen.update(labels[labels != IGNORED].tolist())
    assert total == 74 and seen == Counter(range(1, 75))


def test_the_default_is_the_standard_library(tmp_path: Path) -> None:
    data = open_data(section(sequence=128), vocab=256, seed=0)
    assert len(data.train.tokens) > 1_000_000 and data.held_out is not None
    names = {part.path.name for part in (*data.train.tokens.parts, *data.held_out.tokens.parts)}
    assert {"argparse.py", "ast.py"} <= names
    assert not {part.path for part in data.train.tokens.parts} & {part.path for part in data.held_out.tokens.parts}
    assert not any("test" in part.path.parts for part in data.train.tokens.parts)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("ending", [".npy", ".bin"])
def test_arrays_of_token_ids(tmp_path: Path, dtype: str, ending: str) -> None:
    ids = np.arange(100).astype(dtype)
    path = tmp_path / f"ids{ending}"
    if ending == ".npy":
        np.save(path, ids)
        given = section(tokens=str(path), held_out=0.2)
    else:
        ids.tofile(path)
        given = section(tokens=str(path), held_out=0.2, dtype=dtype)
    data = open_data(given, vocab=100, seed=0)
    assert data.held_out is not None
    assert data.train.tokens.read(0, 80).tolist() == list(range(80))
    assert data.held_out.tokens.read(0, 20).tolist() == list(range(80, 100))


def test_ids_outside_of_the_vocabulary_are_named_with_their_place(tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.int32)
    ids[37] = 5000
    ids[38] = -1
    ids.tofile(tmp_path / "ids.bin")
    data = open_data(section(tokens=str(tmp_path / "ids.bin"), dtype="int32", held_out=0.0), vocab=100, seed=0)
    with pytest.raises(SpecError, match=r"ids\.bin, token 37 = 5000: must be a token id from 0 to 99"):
        data.batch(0, Layout(rank=0, ranks=1, microbatches=1, rows=len(data.train)))


@pytest.mark.parametrize("ending", [".npy", ".bin"])
@pytest.mark.parametrize(("place", "value"), [(7, -3), (150, 100), (199, 2**31 - 1)])
def test_all_ids_are_checked_at_the_start_also_those_held_out(
    tmp_path: Path, ending: str, place: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_SCANNED_IDS", 64)
    ids = np.arange(200, dtype=np.int32) % 100
    path = tmp_path / f"ids{ending}"

    def opened() -> Data:
        np.save(path, ids) if ending == ".npy" else ids.tofile(path)
        return open_data(section(tokens=str(path), dtype="int32", held_out=0.3), vocab=100, seed=0)

    opened().check_ids()
    ids[place] = value
    with pytest.raises(SpecError) as caught:
        opened().check_ids()
    (problem,) = caught.value.problems
    assert problem.field.endswith(f"ids{ending}, token {place}") and problem.value == value
    assert problem.allowed == "a token id from 0 to 99"


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 100)
    data = open_data(section(files=[path], held_out=0.0), vocab=256, seed=0)
    Path(path).write_bytes(b"short")
    with pytest.raises(SpecError, match="become shorter"):
        data.batch(0, Layout(rank=0, ranks=1, microbatches=1, rows=12))
    Path(path).unlink()
    with pytest.raises(SpecError, match="readable file"):
        data.batch(0, Layout(rank=0, ranks=1, microbatches=1, rows=12))


def faults(given: DataSection, vocab: int = 256) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        open_data(given, vocab=vocab, seed=0)
    return {problem.field: str(problem) for problem in caught.value.problems}


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    long, short = write(tmp_path / "long", 400), write(tmp_path / "short", 8)
    assert faults(section(files=[str(tmp_path / "no*"), long])).keys() == {"data.files"}
    both = faults(section(files=[str(tmp_path / "no")], held_out_files=[str(tmp_path / "never")]))
    assert both.keys() == {"data.files", "data.held_out_files"}
    assert "8 tokens" in faults(section(files=[short], held_out=0.0))["data.files"]
    assert "8 tokens" in faults(section(files=[long], held_out_files=[short]))["data.held_out_files"]
    assert "4 tokens" in faults(section(files=[long], held_out=0.01))["data.held_out"]
    assert "0 tokens" in faults(section(files=[long], held_out_files=[long]))["data.files"]
    (tmp_path / "empty").touch()
    assert "0 tokens" in faults(section(files=[str(tmp_path / "empty")]))["data.files"]


def test_arrays_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"x" * 101)
    assert "101 bytes" in faults(section(tokens=str(tmp_path / "odd.bin"), dtype="uint16"))["data.tokens"]
    assert faults(section(tokens=str(tmp_path / "odd.bin"))).keys() >= {"data.dtype"}
    np.save(tmp_path / "matrix.npy", np.zeros((10, 10), np.int32))
    assert "one-dimensional" in faults(section(tokens=str(tmp_path / "matrix.npy")))["data.tokens"]
    np.save(tmp_path / "floats.npy", np.zeros(100))
    assert "float64" in faults(section(tokens=str(tmp_path / "floats.npy")))["data.tokens"]
    np.save(tmp_path / "good.npy", np.zeros(100, np.int32))
    assert faults(section(tokens=str(tmp_path / "good.npy"), dtype="uint16")).keys() == {"data.dtype"}
    whole = (tmp_path / "good.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    assert "array file of numpy" in faults(section(tokens=str(tmp_path / "cut.npy")))["data.tokens"]
    (tmp_path / "empty.npy").touch()
    assert "array file of numpy" in faults(section(tokens=str(tmp_path / "empty.npy")))["data.tokens"]
    (tmp_path / "no.npy").write_bytes(b"no array")
    assert "array file of numpy" in faults(section(tokens=str(tmp_path / "no.npy")))["data.tokens"]
