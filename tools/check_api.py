"""Lists what this tree breaks of the public names of the last release.

Usage: python tools/check_api.py [TAG]. Without a tag it is the newest one; without any there is
nothing to compare with. Prints one line for each change that may break a caller, and then exits
with 1: a minor release may have such lines, with one in the changelog for each; a patch has none.
"""

import re
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory

import griffe

ROOT = Path(__file__).parent.parent
PACKAGES = {"": "top", "runtime": "runtime", "actors": "actors"}
COLOUR = re.compile(r"\x1b\[\d+m")


def newest_tag(root: Path) -> str | None:
    """Return the newest tag of a release that this commit comes after, if there is one.

    The release workflow runs on a commit that has a tag itself, which is not the one before it.
    """

    def git(*arguments: str) -> str:
        ran = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        return ran.stdout

    own = [f"--exclude={tag}" for tag in git("tag", "--points-at", "HEAD").split()]
    return git("describe", "--tags", "--abbrev=0", "--match", "v*", *own).strip() or None


def assemble(root: Path, into: Path) -> griffe.Object | griffe.Alias:
    """Load the packages of a tree under their one name."""
    for package, folder in PACKAGES.items():
        copytree(
            root / folder,
            into / "turnkeeper" / package,
            ignore=ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    return griffe.load("turnkeeper", search_paths=[into], resolve_aliases=True)


def tree_at(root: Path, tag: str, into: Path) -> Path:
    """Unpack the tree of a tag."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", tag, *PACKAGES.values()],
        cwd=root,
        capture_output=True,
        check=True,
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as packed:
        packed.extractall(into, filter="data")
    return into


def breakages(old: Path, new: Path, scratch: Path) -> list[str]:
    """Return a line for each change between two trees that may break a caller."""
    before = assemble(old, scratch / "before")
    after = assemble(new, scratch / "after")
    lines = [
        COLOUR.sub("", breakage.explain(griffe.ExplanationStyle.ONE_LINE))
        for breakage in griffe.find_breaking_changes(before, after)
    ]
    return sorted({line.replace(f"{scratch}/", "") for line in lines})


def main() -> int:
    tag = sys.argv[1] if len(sys.argv) > 1 else newest_tag(ROOT)
    if tag is None:
        print("there is no release to compare with")
        return 0
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        found = breakages(tree_at(ROOT, tag, place / "tag"), ROOT, place)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
