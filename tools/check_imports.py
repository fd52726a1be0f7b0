"""Checks who may import what. Usage: python tools/check_imports.py [ROOT].

Reads the sources only. Prints one line for each import that breaks a rule, and then exits with 1.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = {"runtime": "turnkeeper.runtime", "actors": "turnkeeper.actors"}
PROGRAMS = ("tests", "examples", "benchmarks", "tools")

# What actors may import from; of each, only the names in its `__all__`.
RUNTIME_FACES = ("turnkeeper.runtime", "turnkeeper.runtime.testing")

# A file, or a folder with all that is in it.
BACKEND = ("runtime/_backend.py", "runtime/testing.py", "runtime/testing")
PORTS = (*BACKEND, "runtime/ports.py")

# Decides and folds: no waiting, no world.
PURE = (
    "actors/_decide",
    "actors/_frozen",
    "actors/_owner",
    "actors/_parking",
    "actors/_properties",
    "actors/_provider_parts",
    "actors/_snapshots",
    "actors/_text",
    "actors/_ties",
    "actors/_turn_rules",
    "actors/_upcasters",
    "actors/_wire",
    "actors/admission",
    "actors/commands",
    "actors/condensers",
    "actors/events",
    "actors/llm",
    "actors/metrics",
    "actors/recorded",
    "actors/state",
    "actors/status",
    "actors/stuck",
    "actors/turns",
    "actors/view",
)

BACKENDS = {"asyncio", "trio"}
# Reads the time, makes an id or draws a number: a failing seed would not be replayable.
WORLD = {"random", "secrets", "time", "uuid"}
IMPURE = {"anyio", "os", "sniffio", "socket", "subprocess", "threading"} | BACKENDS | WORLD

# A view may be read from any thread, and keeps what was derived from it: a lock that never waits
# for more than that.
LOCKED = ("actors/view",)


# Draws from generators of its own making, each with a seed that its user was told.
SEEDED = ("actors/cli",)


class Import(NamedTuple):
    """One imported name. `name` is None for `import module`."""

    line: int
    module: str
    name: str | None
    is_relative: bool
    is_for_typing: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports(path: Path, package: str) -> Iterator[Import]:
    """All imports of a file, also those inside functions; relative ones made absolute."""
    tree = ast.parse(path.read_bytes(), str(path))
    typing_only = {
        id(inner)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for statement in block.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        is_for_typing = id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None, False, is_for_typing)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                module = ".".join([*parents, module]).strip(".")
            for alias in node.names:
                yield Import(node.lineno, module, alias.name, node.level > 0, is_for_typing)


def exported(path: Path) -> set[str]:
    """The names in a module's `__all__`, which must be a plain list of strings."""
    for node in ast.parse(path.read_bytes(), str(path)).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
            ):
                return set(ast.literal_eval(value))
            case _:
                pass
    return set()


def faces(root: Path) -> dict[str, set[str]]:
    """Each module of the runtime that actors may import from, with its public names."""
    found = {}
    for module in RUNTIME_FACES:
        stem = root.joinpath("runtime", *module.split(".")[2:])
        for path in (stem / "__init__.py", stem.with_suffix(".py")):
            if path.is_file():
                found[module] = exported(path)
    return found


def is_within(place: str, places: tuple[str, ...]) -> bool:
    return any(place in (p, f"{p}.py") or place.startswith(f"{p}/") for p in places)


def is_inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def broken_rule(place: str, found: Import, runtime: dict[str, set[str]]) -> str | None:
    """The first rule that an import breaks, in words, or None."""
    folder = place.partition("/")[0]
    if not found.is_relative and found.top in PACKAGES:
        return f"import turnkeeper.{found.top}: a plain `{found.top}` is a second copy"
    if folder not in PACKAGES:
        return None
    own = PACKAGES[folder]
    if found.is_relative and not is_inside(found.module, own):
        return f"a relative import must stay inside {own}"
    if not found.is_relative and is_inside(found.module, own):
        return f"inside {own} imports are relative"
    if folder == "runtime" and is_inside(found.module, "turnkeeper.actors"):
        return "the runtime knows nothing of conversations"
    if folder == "actors" and is_inside(found.module, "turnkeeper.runtime"):
        if found.name is None or found.name not in runtime.get(found.module, set()):
            return f"actors may import what {' or '.join(RUNTIME_FACES)} has in `__all__`"
        return None
    if found.is_for_typing:
        return None
    is_lock = found.top == "threading" and is_within(place, LOCKED)
    if is_within(place, PURE) and found.top in IMPURE and not is_lock:
        return "a pure module neither waits nor looks at the world"
    if found.top in BACKENDS and not is_within(place, BACKEND):
        return f"only {', '.join(BACKEND)} may know a backend"
    is_seeded = (found.module, found.name) == ("random", "Random") and is_within(place, SEEDED)
    if found.top in WORLD and not is_within(place, PORTS) and not is_seeded:
        return "time, ids and random numbers come through the ports (a mere type: TYPE_CHECKING)"
    return None


def violations(root: Path) -> Iterator[str]:
    runtime = faces(root)
    for folder in (*PACKAGES, *PROGRAMS):
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            parts = path.relative_to(root).parent.parts[1:]
            package = ".".join([PACKAGES.get(folder, folder), *parts])
            for found in imports(path, package):
                rule = broken_rule(place, found, runtime)
                if rule is not None:
                    name = f"{found.module}.{found.name}" if found.name else found.module
                    yield f"{place}:{found.line}: imports {name}: {rule}"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    lines = list(violations(root))
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
