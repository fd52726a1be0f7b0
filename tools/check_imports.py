"""Checks who may import what. Usage: python tools/check_imports.py [ROOT].

Reads the sources only. Prints one line for each import that breaks a rule, and then exits with 1.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Folders, with the names that they install as. `top` is the root face and holds no code.
PACKAGES = {"runtime": "turnkeeper.runtime", "actors": "turnkeeper.actors", "top": "turnkeeper"}
PROGRAMS = ("tests", "examples", "benchmarks", "tools")

# What actors may import from; of each, only the names in its `__all__`.
RUNTIME_FACES = (
    "turnkeeper.runtime",
    "turnkeeper.runtime.lowlevel",
    "turnkeeper.runtime.otel",
    "turnkeeper.runtime.testing",
)

# A file, or a folder with all that is in it.
BACKEND = ("runtime/_backend.py", "runtime/testing.py", "runtime/testing")
OF_TRIO = (*BACKEND, "actors/cli/_trio_server.py")
OF_ASYNCIO = (*BACKEND, "actors/cli/_asyncio_server.py")
PORTS = (*BACKEND, "runtime/ports.py")

# The layers of the actors, from the ground up: each imports only what stands before it. A place is
# a module or a package with all that is in it; a longer name goes before a shorter one.
LAYERS = (
    "actors/errors",
    "actors/values",
    "actors/log_lines",
    "actors/tool_calls",
    "actors/events",
    "actors/journal",
    "actors/core",
    "actors/journals/shared",
    "actors/journals/memory",
    "actors/journals/sqlite",
    "actors/journals/postgres",
    "actors/journals/listings",
    "actors/journals/transfer",
    "actors/journals/files",
    "actors/journals/contract",
    "actors/models",
    "actors/agents",
    "actors/owner",
    "actors/conversations",
    "actors/blocking",
    "actors/integrations",
    "actors/gateway",
    "actors/recordings",
    "actors/__init__",
    "actors/simulation",
    "actors/torture",
    "actors/cli",
)

# Programs that see a server over the wire alone, so that they can be pointed at any: they import
# nothing of the actors but themselves.
OUTSIDE = ("actors/torture",)

# Decides and folds: no waiting, no world. Imports only other pure places, and of the runtime only
# the names of PURE_RUNTIME.
PURE = (
    "actors/core",
    "actors/errors",
    "actors/events",
    "actors/gateway/ag_ui",
    "actors/gateway/ag_ui_messages",
    "actors/gateway/ai_sdk",
    "actors/gateway/names",
    "actors/gateway/outline",
    "actors/gateway/problems",
    "actors/gateway/shapes",
    "actors/gateway/wire",
    "actors/journal",
    "actors/models/_parsing",
    "actors/models/base",
    "actors/models/messages",
    "actors/models/schemas",
    "actors/recordings/exporting",
    "actors/recordings/transcripts",
    "actors/tool_calls",
    "actors/torture/checker",
    "actors/torture/history",
    "actors/values",
)
PURE_RUNTIME = {
    "InvariantViolation",
    "Message",
    "OutcomeUnknown",
    "OwnershipLost",
    "Ports",  # the defaults of an event's id and time, and of a state that stands alone
    "Refused",
    "TurnkeeperError",
    "Unavailable",
    "format_id",
}

BACKENDS = {"asyncio", "trio"}
# Reads the time, makes an id or draws a number: a failing seed would not be replayable.
WORLD = {"random", "secrets", "time", "uuid"}
IMPURE = {"anyio", "os", "sniffio", "socket", "subprocess", "threading"} | BACKENDS | WORLD

# A view may be read from any thread, and keeps what was derived from it: a lock that never waits
# for more than that.
LOCKED = ("actors/core/view",)

# Draws from generators of its own making, each with a seed that its user was told.
SEEDED = ("actors/cli", "actors/torture")


# How many files may import each other in a circle. Imports inside functions, and those for typing
# only, count: they hide a circle and do not undo it.
GROUP_MAX = {"actors": 1, "runtime": 3}


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
    """Return the names in a module's `__all__`, which must be a plain list of strings."""
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


def place_of(root: Path, found: Import) -> str | None:
    """Return the file that an import inside the two packages loads, without its suffix."""
    for folder, package in PACKAGES.items():
        if is_inside(found.module, package):
            parts = [folder, *found.module.removeprefix(package).strip(".").split(".")]
            stem = root.joinpath(*(part for part in parts if part))
            for path in (stem / (found.name or ""), stem):
                if path.with_suffix(".py").is_file():
                    return path.relative_to(root).as_posix()
                if (path / "__init__.py").is_file():
                    return (path / "__init__").relative_to(root).as_posix()
    return None


def layer_of(place: str) -> int | None:
    """Return the position in `LAYERS` of a file, without its suffix; None outside them all."""
    for number, layer in enumerate(LAYERS):
        if is_within(place, (layer,)):
            return number
    return None


def broken_layer(place: str, target: str) -> str | None:
    """Return the rule between files of the actors that an import breaks, or None."""
    package, _, name = target.rpartition("/")
    is_own = place.rpartition("/")[0] == package or place.startswith(f"{package}/")
    if name.startswith("_") and name != "__init__" and not is_own:
        return "an underscored module belongs to its package"
    if _is_docstring(target):
        return None
    if is_within(place, OUTSIDE) and not is_within(target, OUTSIDE):
        return "a program of the outside imports nothing of the server's side"
    if is_within(place, PURE) and not is_within(target, PURE):
        return "a pure module imports only pure ones"
    own, other = layer_of(place), layer_of(target)
    if own is None:
        return "name this file's package in LAYERS"
    if other is not None and other > own:
        return f"{LAYERS[own]} stands below {LAYERS[other]}"
    return None


def _is_docstring(target: str) -> bool:
    """True for the `__init__` of a package inside the actors: it holds a sentence and no code."""
    return target.endswith("/__init__") and target != "actors/__init__"


def circles(arrows: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield each largest group of files that import each other, sorted (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in order:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                yield sorted(group)

    for node in sorted(arrows):
        if node not in order:
            yield from visit(node)


def is_within(place: str, places: tuple[str, ...]) -> bool:
    return any(place in (p, f"{p}.py") or place.startswith(f"{p}/") for p in places)


def is_inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def broken_rule(place: str, found: Import, runtime: dict[str, set[str]]) -> str | None:
    """Return the first rule that an import breaks, in words, or None."""
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
    if folder != "top" and found.module == "turnkeeper":
        return "the root face is for applications"
    if folder == "runtime" and is_inside(found.module, "turnkeeper.actors"):
        return "the runtime knows nothing of conversations"
    if folder == "actors" and is_inside(found.module, "turnkeeper.runtime"):
        if found.name is None or found.name not in runtime.get(found.module, set()):
            return f"actors may import what {' or '.join(RUNTIME_FACES)} has in `__all__`"
        if is_within(place, PURE) and found.name not in PURE_RUNTIME:
            return "a pure module takes from the runtime only what PURE_RUNTIME names"
        return None
    if found.is_for_typing:
        return None
    is_lock = found.top == "threading" and is_within(place, LOCKED)
    if is_within(place, PURE) and found.top in IMPURE and not is_lock:
        return "a pure module neither waits nor looks at the world"
    may_know = OF_TRIO if found.top == "trio" else OF_ASYNCIO
    if found.top in BACKENDS and not is_within(place, may_know):
        return f"only {', '.join(may_know)} may know a backend"
    is_seeded = (found.module, found.name) == ("random", "Random") and is_within(place, SEEDED)
    if found.top in WORLD and not is_within(place, PORTS) and not is_seeded:
        return "time, ids and random numbers come through the ports (a mere type: TYPE_CHECKING)"
    return None


def violations(root: Path) -> Iterator[str]:
    runtime = faces(root)
    arrows: dict[str, set[str]] = {}
    for folder in (*PACKAGES, *PROGRAMS):
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            parts = path.relative_to(root).parent.parts[1:]
            package = ".".join([PACKAGES.get(folder, folder), *parts])
            for found in imports(path, package):
                rule = broken_rule(place, found, runtime)
                target = place_of(root, found) if folder in PACKAGES else None
                if rule is None and target is not None and target.startswith(f"{folder}/"):
                    stem = place.removesuffix(".py")
                    if folder == "actors":
                        rule = broken_layer(stem, target)
                    if not _is_docstring(target) and target != stem:
                        arrows.setdefault(stem, set()).add(target)
                if rule is not None:
                    name = f"{found.module}.{found.name}" if found.name else found.module
                    yield f"{place}:{found.line}: imports {name}: {rule}"
    for group in circles(arrows):
        if len(group) > GROUP_MAX[group[0].partition("/")[0]]:
            yield f"these import each other: {', '.join(group)}"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    lines = list(violations(root))
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
