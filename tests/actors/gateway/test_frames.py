"""Server-sent events are encoded once for all streams of one conversation, and alike for each."""

from __future__ import annotations

import anyio
import pytest

from turnkeeper.actors import Conversation, LoggedEvent, TextDelta
from turnkeeper.actors.events import ForkedFromEvent, UserMessageEvent
from turnkeeper.actors.gateway.frames import KEPT_BYTES_MAX, KEPT_MAX, Frames
from turnkeeper.actors.gateway.names import Cursor
from turnkeeper.actors.gateway.service import ConversationCaller
from turnkeeper.actors.gateway.wire import logged_json, piece_json, sse

from .worlds import Sse, gateway_world, reading


def no_one(_: str) -> None:
    return None


def said(seq: int, content: str = "hello") -> LoggedEvent:
    return LoggedEvent(seq, UserMessageEvent(content=content))


def test_a_frame_is_encoded_once_and_reads_as_if_it_were_encoded_each_time() -> None:
    frames, logged, piece = Frames(), said(3), TextDelta(1, "t", 0, 1, 0, "wor\udc00d")

    found = [frames.of_event(logged, no_one) for _ in range(3)]
    pieces = [frames.of_piece(piece) for _ in range(3)]

    cursor = Cursor(3, logged.event.id)
    assert found == [sse(logged_json(logged, no_one), cursor=cursor)] * 3
    assert pieces == [sse(piece_json(piece), event="piece")] * 3
    assert frames.encoded == 2


def test_an_event_that_names_another_conversation_is_encoded_for_each_reader_alone() -> None:
    frames = Frames()
    forked = LoggedEvent(1, ForkedFromEvent(conversation_id="p/bob/c", seq=4))

    known, unknown = frames.of_event(forked, lambda _: "c"), frames.of_event(forked, no_one)

    assert b'"conversation_id":"c"' in known
    assert b"bob" not in known + unknown


@pytest.mark.parametrize(("content", "kept"), [("x", KEPT_MAX), ("x" * (KEPT_BYTES_MAX // 8), 7)])
def test_only_so_many_frames_and_bytes_are_kept(content: str, kept: int) -> None:
    frames = Frames()
    logged = [said(seq, content) for seq in range(1, KEPT_MAX + 10)]

    for each in logged:
        frames.of_event(each, no_one)
    began = frames.encoded
    for each in logged[-kept:]:
        frames.of_event(each, no_one)
    assert frames.encoded == began, "the newest are kept"
    frames.of_event(logged[-kept - 1], no_one)
    assert frames.encoded == began + 1, "an older one is not"


@pytest.mark.anyio
@pytest.mark.costly
async def test_streams_of_one_conversation_share_the_frames_of_its_events() -> None:
    async with gateway_world() as world:
        heard: list[list[Sse]] = []

        async def read(after: str) -> None:
            path = f"/v1/conversations/alice/events?after={after}"
            async with reading(world.address, path) as events:
                heard.append(mine := [])
                async for event in events:
                    mine.append(event)
                    if '"turn_ended"' in event.data:
                        return

        await world.answered("alice", "the first")
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read, "4")
            live = world.conversations._setup.subscriptions._live
            while len(live("alice")) < 3 or any(
                reader.is_behind or not reader.is_waiting for reader in live("alice")
            ):
                await anyio.lowlevel.checkpoint()  # until all wait for what comes
            began = world.app._service.frames.encoded
            await world.answered("alice", "hello")

        assert heard[0] == heard[1] == heard[2]
        assert world.app._service.frames.encoded - began == len(heard[0])


async def test_a_stream_makes_no_handle_for_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two were made and checked for each frame with pieces: a sixth of what a frame took."""
    made = 0
    expecting = ConversationCaller.expecting

    def counted(caller: ConversationCaller) -> Conversation:
        nonlocal made
        made += 1
        return expecting(caller)

    async with gateway_world() as world:
        await world.answered("short", "hello")
        for _ in range(3):
            await world.answered("long", "hello")
        monkeypatch.setattr(ConversationCaller, "expecting", counted)

        taken: list[tuple[int, int]] = []
        for name in ("short", "long"):
            made = 0
            path = f"/v1/conversations/{name}/events"
            reply = await world.http.get(path, params={"pieces": "true", "live": "false"})
            taken.append((reply.text.count("data:"), made))

    (short, of_short), (long, of_long) = taken
    assert long > short
    assert of_long == of_short
