"""Builds the wheel, and checks that it is whole and that its types hold.

Usage: python tools/check_wheel.py [ROOT]. Prints what is wrong, and then exits with 1.

Whole: it holds each file of the two packages, byte for byte, and nothing else. A sub-package that
was forgotten in pyproject.toml is missing from the wheel, but not from the editable install.

Types: mypy cannot follow the editable install, and from the root a plain `import runtime` would
pass. So the wheel goes into an environment of its own, and mypy runs from a folder outside the
project, as it would for a user.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from tempfile import TemporaryDirectory

PACKAGES = {"top": "turnkeeper", "runtime": "turnkeeper/runtime", "actors": "turnkeeper/actors"}
PROGRAMS = ("tests", "examples", "benchmarks", "tools")
SKIPPED = ("__pycache__", "*.pyc")
# mypy gives its workers 3 s to start, which a busy machine exceeds.
WORKER_IS_LATE = "Failed to establish connection with worker"


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command; return its exit status, and all that it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def build(root: Path, scratch: Path) -> Path:
    """Build from a copy: what an earlier build left behind gets into a wheel."""
    source = scratch / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(root / name, source)
    for folder in PACKAGES:
        copytree(root / folder, source / folder, ignore=ignore_patterns(*SKIPPED))
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    status, output = run([sys.executable, "-c", code, str(scratch)], source)
    if status:
        sys.exit(f"the wheel could not be built:\n{output}")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def differences(root: Path, wheel: Path) -> Iterator[str]:
    """One line for each file that the wheel and the tree do not share."""
    in_tree = {
        f"{target}/{path.relative_to(root / folder).as_posix()}": path.read_bytes()
        for folder, target in PACKAGES.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and not any(path.match(p) or path.parent.match(p) for p in SKIPPED)
    }
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {
            name: archive.read(name)
            for name in archive.namelist()
            if not name.partition("/")[0].endswith(".dist-info")
        }
    for name in sorted(in_tree.keys() | in_wheel.keys()):
        if name not in in_wheel:
            yield f"{name}: not in the wheel; name its package or its data in pyproject.toml"
        elif name not in in_tree:
            yield f"{name}: in the wheel, not in the tree"
        elif in_tree[name] != in_wheel[name]:
            yield f"{name}: the wheel's is not the tree's"


def types_hold(root: Path, wheel: Path, scratch: Path) -> bool:
    """Run mypy over the wheel, in an environment that has what .venv has, less the project."""
    place = scratch / "environment"
    venv.create(place, symlinks=os.name != "nt")
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    site_packages = Path(paths["purelib"])
    # A .pth file in a folder that a .pth file names is not read: so no editable install.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)

    packages = ["--package=turnkeeper"]
    programs = [str(root / name) for name in PROGRAMS if any((root / name).rglob("*.py"))]
    mypy = [
        *(sys.executable, "-m", "mypy", "--show-absolute-path"),
        *("--python-executable", str(Path(paths["scripts"], "python"))),
        *("--config-file", str(root / "pyproject.toml")),
        *("--cache-dir", str(root / ".mypy_cache")),
    ]
    is_right = True
    for what in (packages, programs):
        if what:
            status, output = run([*mypy, "--num-workers=auto", *what], scratch)
            if WORKER_IS_LATE in output:
                status, output = run([*mypy, *what], scratch)
            for prefix in (site_packages / "turnkeeper", root):
                output = output.replace(f"{prefix}{os.sep}", "")
            print(output, end="")
            is_right = is_right and status == 0
    return is_right


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    with TemporaryDirectory() as scratch:
        place = Path(scratch).resolve()
        wheel = build(root, place)
        lines = list(differences(root, wheel))
        for line in lines:
            print(line)
        is_right = not lines and types_hold(root, wheel, place)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
