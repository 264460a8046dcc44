"""Builds the sdist and the wheel, and tries the wheel in a fresh environment of each Python 3.11 to 3.14 that is here.

    python -m tests.release [--keep]

In each: without a C compiler on PATH the command says in one line what to install; with gradc[cpu], which brings one,
``user.py`` compiles, trains and saves; mypy --strict and pyright accept it against the installed package, and see that
``wrong.py`` is wrong.  Packages come from the index that pip is set to.  Everything but dist/ is in build/release.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "build" / "release"
DIST = ROOT / "dist"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TOOLS = ("build", "hatchling", "mypy", "pyright")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description="Build the wheel, and try it.")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/release")
    keep = parser.parse_args().keep
    shutil.rmtree(HERE, ignore_errors=True)
    tools = environment(Path(sys.executable), HERE / "tools")
    pip(tools, *TOOLS)
    wheel = build(tools)
    pythons = {version: found for version in VERSIONS if (found := python(version)) is not None}
    failed = False
    for version, executable in pythons.items():
        wrong = trial(version, executable, wheel, tools)
        failed |= bool(wrong)
        print(f"Python {version}: {wrong or 'fine'}", flush=True)
    print(f"not here: {', '.join(v for v in VERSIONS if v not in pythons) or 'none'}")
    if not keep:
        shutil.rmtree(HERE, ignore_errors=True)
    return int(failed or not pythons)


def build(tools: Path) -> Path:
    """The wheel, built from the sdist, which so has everything that a wheel needs."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([tools / "python", "-m", "build", "--no-isolation", "--outdir", DIST, ROOT])
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    needed = {"gradc/py.typed", "gradc/demo/corpus.txt"}
    needed |= {f"gradc/{path.relative_to(ROOT)}" for path in (ROOT / "templates").rglob("*") if path.is_file()}
    needed |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "gradc").rglob("*.json")}
    if lacking := needed - names:
        sys.exit(f"{wheel.name} lacks {min(lacking)}")
    if extra := [name for name in names if not name.startswith(("gradc/", "gradc-"))]:
        sys.exit(f"{wheel.name} has {min(extra)}")
    with tarfile.open(sdist) as file:
        print(f"{sdist.name}: {len(file.getnames())} files; {wheel.name}: {len(names)} files")
    return wheel


def python(version: str) -> Path | None:
    """An interpreter of this version on PATH or under pyenv, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    asks = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
    for each in candidates:
        if subprocess.run([each, "-c", asks], capture_output=True).returncode == 0:
            return each
    return None


def environment(executable: Path, folder: Path) -> Path:
    """A new virtual environment; its folder of programs."""
    run([executable, "-m", "venv", folder])
    return folder / ("Scripts" if os.name == "nt" else "bin")


def pip(programs: Path, *packages: str) -> None:
    run([programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])


def trial(version: str, executable: Path, wheel: Path, tools: Path) -> str:
    """What is wrong with the wheel under an interpreter, or ""."""
    folder = HERE / version
    programs = environment(executable, folder)
    (folder / "cache").mkdir()
    for name in ("user.py", "wrong.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    alone = {"PATH": str(programs), "HOME": str(folder), "GRADC_CACHE_DIR": str(folder / "cache")}
    pip(programs, str(wheel))
    (folder / "square.gir").write_text("graph @square<N>(%x: f32[N]) {\n  %0: f32[N] = mul %x, %x\n  return y=%0\n}\n")
    code, _, said = attempt([programs / "gradc", "run", "square.gir", "--dims", "N=3"], folder, alone)
    if code != 2 or len(said.splitlines()) != 1 or "pip install gradc[cpu]" not in said:
        return f"without a compiler gradc says (exit status {code}): {said}"
    code, _, said = attempt(
        [programs / "gradc", "run", "square.gir", "--dims", "N=3", "--target", "numpy"], folder, alone
    )
    if code != 0:
        return f"the target numpy needs a compiler? {said}"
    pip(programs, f"gradc[cpu] @ {wheel.as_uri()}")
    code, told, said = attempt([programs / "python", "user.py"], folder, alone)
    if code != 0 or not told.startswith("loss "):
        return f"user.py with gradc[cpu]: {told}{said}"
    return typed(folder, programs, tools)


def typed(folder: Path, programs: Path, tools: Path) -> str:
    """What mypy or pyright says that it should not, or the other way round."""
    interpreter = str(programs / "python")
    checkers: dict[str, list[str | Path]] = {
        "mypy": [tools / "mypy", "--strict", "--python-executable", interpreter],
        "pyright": [tools / "pyright", "--pythonpath", interpreter],
    }
    for name, command in checkers.items():
        code, told, said = attempt([*command, "user.py"], folder, os.environ)
        if code != 0:
            return f"{name} on user.py: {told}{said}"
        code, told, _ = attempt([*command, "wrong.py"], folder, os.environ)
        marked = [n for n, line in enumerate((folder / "wrong.py").read_text().splitlines(), 1) if "# wrong" in line]
        if code != 1 or not all(f"wrong.py:{line}:" in told for line in marked):
            return f"{name} on wrong.py, which is wrong in the lines {marked}: {told}"
    return ""


def attempt(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command."""
    done = subprocess.run(command, cwd=folder, env=dict(variables), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def run(command: Sequence[str | Path]) -> None:
    """Runs a command that must succeed; otherwise its output is the end."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
