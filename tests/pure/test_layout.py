"""The layout of the repository: links and import names, size of files, nothing of the machine it was written on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "scheduler", "planner")
MAX_LINES = 500
# Modules of these packages may be missing: they come with extras.
EXTRAS = ("transformers", "triton")
NOT_OURS = {"build", "dist", "runs", "htmlcov", "__pycache__"}


def our_files() -> Iterator[Path]:
    """Every file of the tree that git would keep; hidden folders are caches, except .ci."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name
            for name in names
            if name not in NOT_OURS and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
        ]
        yield from (Path(folder, name) for name in files if not name.startswith(".coverage"))


def modules_of(folder: Path, package: str) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        names.append(".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))))
    return names


def run_python(program: str, *args: str) -> str:
    """Runs a program from the root, in a process of its own; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", program, *args], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "tessera_rt" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()
    assert not (ROOT / name / "__init__.py").exists()


def test_every_module_imports_by_its_name_in_the_package() -> None:
    names = modules_of(ROOT / "tessera_rt", "tessera_rt")
    names += [module for name in LINKED for module in modules_of(ROOT / name, f"tessera_rt.{name}")]
    program = """
import importlib, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
root, extras, *names = sys.argv[1:]
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in extras.split(","):
            raise
        continue
    assert module.__name__ == name
    assert Path(root) in Path(module.__file__).parents, f"{name} comes from {module.__file__}, not from this repository"
print(len(names))
"""
    assert run_python(program, str(ROOT), ",".join(EXTRAS), *dict.fromkeys(names)) == str(len(set(names)))


@pytest.mark.parametrize("name", LINKED)
def test_root_folders_do_not_shadow_packages_of_their_name(name: str) -> None:
    program = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print("" if spec is None or spec.origin is None else spec.origin)
"""
    origin = run_python(program, name)
    assert not origin or ROOT not in Path(origin).parents


def test_python_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in our_files()
        if path.suffix == ".py"
    }
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def machine_traces(text: str, root: Path, home: Path) -> list[str]:
    """Parts of a text that hold only on one machine: its folders, addresses of package registries."""
    folders = [root]
    if root.parent not in (Path("/"), Path("/tmp"), Path("/home"), Path("/var/tmp"), Path("/opt"), Path("/srv")):
        folders.append(root.parent)
    if home != Path("/"):
        folders.append(home)
    patterns = [rf"(?<![\w.]){re.escape(str(folder))}(?![\w.-])" for folder in folders]
    patterns += [r"--(?:extra-)?index-url\b", r"--find-links\b", r"https?://[\w.-]*py" + r"pi[\w.-]*"]
    return [match.group() for pattern in patterns for match in re.finditer(pattern, text)]


def test_no_file_depends_on_one_machine() -> None:
    traces = {}
    for path in our_files():
        content = path.read_bytes()
        if b"\0" in content or path == Path(__file__).resolve():
            continue
        if found := machine_traces(content.decode("utf-8", "replace"), ROOT, Path.home()):
            traces[str(path.relative_to(ROOT))] = found
    assert traces == {}


def test_machine_traces_are_found() -> None:
    root, home = Path("/data/me/tessera"), Path("/users/me")
    for text in ("cd /data/me/tessera", "x = '/data/me/other'", "/users/me/.cache", "pip --extra-index-url x"):
        assert machine_traces(text, root, home), text
    for text in ("/other/data/me/tessera", "tessera/data", "/users/me2", "http://www.apache.org/licenses/"):
        assert not machine_traces(text, root, home), text
