"""The faces: few names, loaded when they are first used, and a way to the others."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import turnkeeper
import turnkeeper.actors
import turnkeeper.runtime
import turnkeeper.runtime.testing
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.runtime.testing import Node

FACES = (turnkeeper, turnkeeper.actors)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def names_for_type_checkers(path: str) -> dict[str, str]:
    """Return each name under `TYPE_CHECKING`, with the module that it comes from."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    (block,) = (
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    return {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_face_says_the_same_to_type_checkers_and_to_programs(face: ModuleType) -> None:
    path = face.__file__
    assert path is not None
    assert names_for_type_checkers(path) == face._PLACE_OF
    assert sorted(face.__all__) == sorted({*face._PLACE_OF, *({"__version__"} & set(face.__all__))})
    assert dir(face) == sorted(face.__all__)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_each_name_of_a_face_is_the_one_of_its_module(face: ModuleType) -> None:
    for name, module in face._PLACE_OF.items():
        assert getattr(face, name) is getattr(import_module(f"{face.__name__}.{module}"), name)


def test_the_root_face_is_small_and_a_part_of_the_others() -> None:
    names = set(turnkeeper.__all__) - {"__version__"}
    assert len(names) <= 32
    assert len(turnkeeper.actors.__all__) <= 70
    assert names <= {*turnkeeper.actors.__all__, *turnkeeper.runtime.__all__}


def test_importing_the_root_loads_no_pydantic() -> None:
    loaded = loaded_by("import turnkeeper, turnkeeper.actors")
    assert not {"pydantic", "anyio", "structlog", "turnkeeper.runtime"} & loaded


def test_the_names_of_a_first_program_load_no_event_and_little_else() -> None:
    """Counted, for time differs by machine; `make bench` compares it with `import pydantic`."""
    first = "from turnkeeper import Conversations, SQLiteJournal, agent"
    loaded = loaded_by(first)
    assert not {"pydantic", "structlog", "importlib.metadata", "trio"} & loaded
    assert not {"turnkeeper.actors.events", "turnkeeper.actors.owner.actor"} & loaded
    assert len([name for name in loaded if name.startswith("turnkeeper.")]) <= 77

    # Each costs half a millisecond: the class is made twice, and its methods are compiled.
    code = (
        "import dataclasses, sys\n"
        f"made, make = [], dataclasses.dataclass\n"
        "def counted(*args, **options):\n"
        "    made.append(args)\n"
        "    return make(*args, **options)\n"
        f"dataclasses.dataclass = counted\n{first}\nprint(len(made))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) <= 24


def test_making_conversations_loads_and_builds_no_model_of_a_kind_of_event() -> None:
    """They are built as the conversations are entered."""
    code = (
        "from turnkeeper import Conversations, MemoryJournal, agent\n"
        "@agent\n"
        "async def mute(turn): ...\n"
        "Conversations(mute, journal=MemoryJournal())\n"
        "from turnkeeper.actors.core.snapshots import STORED_FOLDS\n"
        "from turnkeeper.actors.events import EVENT_CLASSES\n"
        "models = EVENT_CLASSES.values()\n"
        "print(*(model.__name__ for model in models if model.__pydantic_complete__))\n"
        "assert not STORED_FOLDS.pydantic_complete"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_importing_the_runtime_loads_nothing_of_the_actors() -> None:
    loaded = loaded_by("import turnkeeper.runtime")
    assert [name for name in loaded if name.startswith("turnkeeper.actors")] == []


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("TurnInProgress", "errors"),
        ("UserMessageEvent", "events"),
        ("Claim", "journal"),
        ("ModelUnavailable", "models.base"),
        ("to_llm_messages", "models.messages"),
        ("Blocking", "blocking"),
    ],
)
def test_a_name_of_another_module_is_refused_with_that_module(name: str, module: str) -> None:
    with pytest.raises(ImportError, match=rf"{name} is in turnkeeper\.actors\.{module}$"):
        getattr(turnkeeper.actors, name)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Condenser", "actors"),
        ("View", "actors"),
        ("InvalidInput", r"actors\.errors"),
        ("UserMessageEvent", r"actors\.events"),
        ("Blocking", r"actors\.blocking"),  # and not the port of this name in the runtime
        ("Stopped", "runtime"),
        ("Ports", "runtime"),  # and not a module that imports it
    ],
)
def test_the_root_says_which_module_has_a_name_that_it_has_not(name: str, module: str) -> None:
    with pytest.raises(ImportError, match=rf"^{name} is in turnkeeper\.{module}$"):
        getattr(turnkeeper, name)


def test_the_packages_of_the_root_are_imported_from_it_and_load_no_more() -> None:
    assert "pydantic" not in loaded_by("from turnkeeper import actors, runtime")


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_name_that_is_nowhere_is_no_attribute(face: ModuleType) -> None:
    with pytest.raises(AttributeError, match="'Nonsense'"):
        face.Nonsense  # noqa: B018 - raises


def test_python_m_turnkeeper_is_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "turnkeeper", "--help"], capture_output=True, text=True, check=True
    )
    assert "turnkeeper [OPTIONS] COMMAND" in ran.stdout


STATE = re.compile(r"(is|has|was)_\w+|[a-z]+(ed|ing)")
"""The names that read as a state, which a property has."""


def test_no_method_reads_as_a_property() -> None:
    """`if turn.ended:` was always true: it was a method, beside `is_duplicate` and `overlapped`."""
    faces = (*FACES, turnkeeper.runtime, turnkeeper.runtime.testing)
    found = {getattr(face, name) for face in faces for name in face.__all__}
    classes = {each for each in found if inspect.isclass(each)} | {EventReader, Node}
    methods = {
        f"{each.__name__}.{name}"
        for each in classes
        for name, method in inspect.getmembers(each, inspect.isfunction)
        if STATE.fullmatch(name) and len(inspect.signature(method).parameters) == 1
    }
    assert len(classes) > 100
    # A type checker refuses `if chat.running:`; both are questions to the log, as `exists` is.
    assert methods == {"Conversation.queued", "Conversation.running"}
