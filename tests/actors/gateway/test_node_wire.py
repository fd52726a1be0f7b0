"""What nodes say to each other comes out as it went in: commands, replies, errors, pieces."""

from __future__ import annotations

import contextlib
import gc
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from weakref import finalize

import pytest

from turnkeeper.actors.core import commands
from turnkeeper.actors.core.admission import AdmissionRefused, Appended, Duplicate, Violation
from turnkeeper.actors.core.commands import (
    Answer,
    Append,
    AppendAll,
    Behalf,
    CancelTurn,
    Change,
    Delete,
    Expected,
    FromOutside,
    GetView,
    Interrupt,
    Pause,
    Resume,
    Retract,
    Send,
    Sent,
    Undo,
)
from turnkeeper.actors.errors import (
    CorruptLog,
    Draining,
    EventIdConflict,
    Fenced,
    Forbidden,
    InvalidInput,
    JournalOutcomeUnknown,
    MessageIdConflict,
    NotConfirmable,
    NotReplaceable,
    OwnedElsewhere,
    TurnInProgress,
)
from turnkeeper.actors.events import (
    FileContent,
    ImageContent,
    SystemPromptEvent,
    TextDelta,
    UserMessageEvent,
)
from turnkeeper.actors.gateway.node_keys import (
    NONCES_MAX,
    BadSignature,
    NodeKeys,
    PerhapsSeen,
    Seen,
    Signed,
)
from turnkeeper.actors.gateway.node_wire import (
    decode_ask,
    decode_line,
    decode_reply,
    encode_ask,
    encode_error,
    encode_line,
    encode_reply,
)
from turnkeeper.actors.gateway.problems import problem_of
from turnkeeper.actors.journal import Deletion
from turnkeeper.actors.owner.nodes import Passed
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.runtime import MailboxFull, OutcomeUnknown, Refused, TurnkeeperError

EXPECTED = Expected("alice", exists=True, seq=3, event_id="e3", at_us=5)
SYSTEM = SystemPromptEvent(content="Be kind.")
USER = UserMessageEvent(content="hello \N{GRINNING FACE}", author="alice")

COMMANDS: list[FromOutside[Any]] = [  # each has a reply of its own
    Send(
        "m1",
        "hello \u2028 \N{GRINNING FACE}",
        (ImageContent(url="https://a/b.png"),),
        "steer",
        "m0",
        author="alice",
        metadata=FrozenObject({"a": [1, {"b": None}], "big": 2**70}),
        files=(FileContent.with_bytes("a.txt", "text/plain", b"\x00\xff"),),
        event_id="e1",
        expected=EXPECTED,
    ),
    Append(SYSTEM, park=True, expected=Expected("bob")),
    AppendAll((SYSTEM, USER)),
    Retract(("e1", "e2"), expected=EXPECTED),
    Retract(turn_id="t1"),
    Change("Shoes", FrozenObject({"a": "b", "c": None}), "alice", "c1"),
    CancelTurn("m1", "t1", expected=EXPECTED),
    Interrupt("t1", expected=Expected("alice", behalf=Behalf("alice", ("read", "write"), "chat"))),
    Interrupt(expected=Expected(behalf=Behalf("root", ("admin",)))),
    Undo(),
    Undo("t1"),
    Pause(),
    Resume(),
    Answer({"c1": True, "c2": "no"}, "e1"),
    Answer(True),
    Answer("a reason"),
    Delete(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: type(each).__name__)
def test_a_command_comes_out_as_it_went_in(command: FromOutside[object]) -> None:
    assert decode_ask(encode_ask("alice:chat", command)) == ("alice:chat", command)


def test_a_field_that_is_left_at_none_goes_unsaid() -> None:
    """An older process refuses a command with a field that it does not know."""
    said = json.loads(encode_ask("alice", Undo(expected=Expected("alice", seq=3))))
    assert said["expected"] == {"owner": "alice", "exists": False, "seq": 3}
    assert json.loads(encode_ask("alice", Undo())) == {
        "conversation_id": "alice",
        "command": "Undo",
    }


def test_every_command_of_a_caller_can_be_said() -> None:
    said = {type(command) for command in COMMANDS}
    assert said == {each for each in get_args(commands.Command) if issubclass(each, FromOutside)}
    assert not issubclass(GetView, tuple(said))  # the view is read from the journal


def test_the_owner_checks_a_command_as_if_its_caller_were_there() -> None:
    said = json.loads(encode_ask("alice", Send("m1", "hello")))
    for field, wrong in (
        ("content", 5),
        ("content", "\ud800"),
        ("message_id", "x" * 300),
        ("on_overlap", "shout"),
        ("expected", {"owner": "x" * 300}),
    ):
        with pytest.raises(InvalidInput):
            decode_ask(json.dumps({**said, field: wrong}).encode())


@pytest.mark.parametrize(
    "reply",
    [
        Sent("m1", 4, "t1", True, "rollback", "confirmation"),
        Appended(3),
        Duplicate(4),
        Deletion(3, ["fork"], is_erased=False),
        (USER, USER),
        (),
        True,
        False,
        None,
    ],
)
def test_a_reply_comes_out_as_it_went_in(reply: object) -> None:
    assert decode_reply(encode_reply(reply)) == reply


def test_a_sent_message_names_its_event_also_to_another_process() -> None:
    """Without it, the handle's `cancel` could meet the turn of a log that was begun anew."""
    said = encode_reply(Sent("m1", 4, "t1", event_id="e1"))

    received = decode_reply(said)

    assert isinstance(received, Sent)
    assert received.event_id == "e1"
    # An older process makes a `Sent` of `value`, and knows none of its own that has more.
    assert "event_id" not in json.loads(said)["value"]
    older = {key: value for key, value in json.loads(said).items() if key != "event_id"}
    assert decode_reply(json.dumps(older).encode()) == received


@pytest.mark.parametrize(
    "error",
    [
        TurnInProgress("alice", "t1"),
        MessageIdConflict("alice", "m1", 4),
        EventIdConflict("alice", {"e1": 4}),
        Forbidden("alice", "bob"),
        NotConfirmable("alice", ["c1", "c2"]),
        NotReplaceable("alice", "m1", "condensed"),
        CorruptLog("alice", 3, "torn", others=["bob"]),
        Draining("alice"),
        OwnedElsewhere("conversation alice", "http://10.0.0.1:1/x"),
        Fenced("alice", epoch=1, expected_seq=2, found_epoch=3, head=4),
        JournalOutcomeUnknown("the connection broke"),
        MailboxFull("alice", 5),
        AdmissionRefused("alice", Violation("interleaved_message", USER, "a call is open")),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_is_raised_as_it_was_with_its_facts_and_its_problem(
    error: TurnkeeperError,
) -> None:
    with pytest.raises(type(error)) as raised:
        decode_reply(encode_error(error))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    assert vars(raised.value) == vars(error)
    assert problem_of(raised.value) == problem_of(error)


WRONG: tuple[object, ...] = (None, True, 5, -1.5, "x", [], [5], {}, {"x": 5}, ["x"], [{}])


def _bent(value: object) -> Iterator[object]:
    """Yield the value with one part of it replaced, and with one key left out or added."""
    yield from WRONG
    if isinstance(value, dict):
        for key, part in value.items():
            yield {one: each for one, each in value.items() if one != key}
            yield from ({**value, key: bent} for bent in _bent(part))
        for name in ("__class__", "__dict__", "args", "__cause__"):
            yield {**value, name: 5}
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], bent, *value[at + 1 :]] for bent in _bent(part))


@pytest.mark.parametrize(
    "said",
    [
        encode_reply(Sent("m1", 1, "t1", is_duplicate=False)),
        encode_reply((USER,)),
        encode_reply(True),
        encode_error(CorruptLog("alice", 3, "torn")),
        encode_error(AdmissionRefused("alice", Violation("interleaved_message", USER, "open"))),
    ],
)
def test_an_answer_that_is_none_of_ours_is_no_answer_and_no_fault_here(said: bytes) -> None:
    """Answers are not signed: whatever comes, it is a reply, an error of ours, or unreadable."""
    for bent in _bent(json.loads(said)):
        with contextlib.suppress(ValueError, TurnkeeperError):
            decode_reply(json.dumps(bent).encode())


def test_an_error_that_is_not_known_here_is_one_of_its_kind() -> None:
    class Newer(Refused):
        pass

    with pytest.raises(Refused, match="something new"):
        decode_reply(encode_error(Newer("something new")))
    with pytest.raises(OutcomeUnknown):
        decode_reply(b'{"error": ["Stranger", "int"], "text": "", "facts": {}}')


def test_an_error_names_classes_of_the_library_alone() -> None:
    with pytest.raises(OutcomeUnknown):
        decode_reply(b'{"error": ["SystemExit", "KeyboardInterrupt"], "text": "", "facts": {}}')


@pytest.mark.parametrize(
    "line", [TextDelta(1, "t1", 2, 3, 4, "hi \ud83d"), Passed(3), Passed(3, "t1"), None]
)
def test_a_line_comes_out_as_it_went_in(line: Passed | TextDelta | None) -> None:
    encoded = encode_line(line)
    assert encoded.count(b"\n") == 1
    assert decode_line(encoded.removesuffix(b"\n")) == line


def test_a_key_is_long_and_a_key_file_has_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "node.keys"
    path.write_text("# ours\n\n" + "a" * 32 + "\n" + "b" * 32 + "\n")
    keys = NodeKeys.from_file(path)
    assert keys.verifies("x", NodeKeys(["b" * 32]).sign("x"))
    assert keys.sign("x") == NodeKeys(["a" * 32]).sign("x")
    assert not keys.verifies("x", NodeKeys(["c" * 32]).sign("x"))
    assert "aaaa" not in repr(keys)
    for wrong in ([], ["short"], ["a" * 32, ""]):
        with pytest.raises(InvalidInput):
            NodeKeys(wrong)


def test_an_error_of_another_node_goes_without_the_garbage_collector() -> None:
    gone: list[str] = []
    gc.disable()
    try:
        try:
            decode_reply(encode_error(NotConfirmable("c")))
        except NotConfirmable as error:
            finalize(error, gone.append, "error")
        assert gone == ["error"]
    finally:
        gc.enable()


def test_a_nonce_is_remembered_for_as_long_as_it_would_be_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    keys = NodeKeys(["k" * 32])
    seen = Seen(keys, lambda: now, lambda: now)
    # To find the first key of a dict, Python passes over all that were deleted before it.
    assert isinstance(seen._nonces, OrderedDict)

    def signed(nonce: int, at: float) -> str:
        return Signed("/x", "0" * 64, 1, int(at), f"{nonce:032x}").header(keys)

    early = signed(1, now + 29)  # of a clock that is ahead
    seen.check("/x", early)
    for later in (1_000.0, 1_029.0, 1_058.0):
        now = later
        with pytest.raises(PerhapsSeen):
            seen.check("/x", early)
    now = 1_076.0
    seen.check("/x", signed(2, now))
    assert len(seen._nonces) == 1, "the first one is forgotten"

    monkeypatch.setattr("turnkeeper.actors.gateway.node_keys.NONCES_MAX", 1)
    with pytest.raises(PerhapsSeen):  # rather than forget one that is still good
        seen.check("/x", signed(3, now))
    assert NONCES_MAX > 100_000


def test_a_wall_clock_that_is_set_forward_and_back_makes_no_nonce_good_again() -> None:
    """Found by the simulator of nodes, seed 1710088."""
    wall = 1_000.0
    keys = NodeKeys(["k" * 32])
    seen = Seen(keys, lambda: wall, lambda: 5.0)

    def signed(nonce: int) -> str:
        return Signed("/x", "0" * 64, 1, int(wall), f"{nonce:032x}").header(keys)

    first = signed(1)
    seen.check("/x", first)
    wall += 3_600.0
    seen.check("/x", signed(2))
    wall -= 3_600.0
    with pytest.raises(PerhapsSeen):
        seen.check("/x", first)

    refused = signed(3)
    wall += 3_600.0
    with pytest.raises(BadSignature):  # its sender is told that nothing happened
        seen.check("/x", refused)
    wall -= 3_600.0
    with pytest.raises(PerhapsSeen):
        seen.check("/x", refused)
