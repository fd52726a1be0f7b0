"""Builds what is uploaded for a release, and checks it.

Usage: python tools/build_release.py [FOLDER]. The wheel and the source distribution go to `dist/`,
or to the folder. Both are built from a copy in which the README's links are absolute, since they
are read on the index's page, too. The source distribution has all that a clone has: documents,
examples, tests, the lock. Prints what is wrong, and then exits with 1.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
BUILD = (
    "import sys; from setuptools import build_meta; folder = sys.argv[1];"
    "build_meta.build_sdist(folder); build_meta.build_wheel(folder)"
)


def tracked_files() -> list[str]:
    """Return the files of the project: those that git knows, or all in a source distribution."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if names := [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]:
        return names
    manifest = ROOT / "turnkeeper.egg-info" / "SOURCES.txt"
    return [name for name in manifest.read_text().splitlines() if "egg-info" not in name]


def with_absolute_links(readme: str, address: str, tag: str) -> str:
    """Return a README whose links lead to the repository, at a tag."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"  # a picture is shown, a page is opened
        return f"{link[1]}[{link[2]}]({address}/{kind}/{tag}/{link[3]})"

    return LINK.sub(absolute, readme)


def build(folder: Path) -> tuple[Path, Path]:
    """Build both into an empty folder; return the wheel and the source distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = tracked_files()
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        for name in names:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        readme = (ROOT / "README.md").read_text()
        address, tag = project["urls"]["Repository"], f"v{project['version']}"
        (source / "README.md").write_text(with_absolute_links(readme, address, tag))
        (source / "MANIFEST.in").write_text("".join(f"include {name}\n" for name in names))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ran = subprocess.run(
            [sys.executable, "-c", BUILD, str(folder.resolve())],
            cwd=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if ran.returncode:
        sys.exit(f"the release could not be built:\n{ran.stdout}")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def faults(wheel: Path, sdist: Path) -> Iterator[str]:
    """Yield a line for each thing that is wrong with them."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in sorted(set(tracked_files()) - inside):
        yield f"{name}: not in the source distribution"
    for command in (
        ["twine", "check", "--strict", str(wheel), str(sdist)],
        ["check_wheel_contents", "--toplevel", "turnkeeper", "--ignore", "W002", str(wheel)],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ran.returncode:
            yield f"{command[0]}: {ran.stdout.strip()}"


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    wheel, sdist = build(folder)
    found = list(faults(wheel, sdist))
    for line in found:
        print(line)
    if not found:
        print(f"{wheel}\n{sdist}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
