"""A chat in the terminal in which you can type while the agent answers.

What it teaches: one `Conversation.follow()` shows everything that comes, whichever client asked for
it; `on_overlap` says what a line does to the answer that is being written; a tool needs a
confirmation; a turn goes on after the program was killed.

    python examples/chat.py                    a scripted model, without a network or a key
    OPENAI_API_KEY=… python examples/chat.py   or ANTHROPIC_API_KEY: a real one

A line is a chat message. It may begin with a command:

    /queue /steer /interrupt /rollback TEXT    what it does to the answer that is being written
    /pause  /resume                            between two steps of the agent
    /confirm  /reject [WHY]                    the calls that wait for it
    /undo                                      take the last turn out of what the model sees
    /quit                                      or Ctrl-D, or Ctrl-C; start it again to go on

The chat is kept in a file, `chat.db`, so that it may be killed at any moment and goes on as it was.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import get_args

import anyio
import structlog

from turnkeeper.actors import (
    Conversation,
    Conversations,
    Event,
    Model,
    ModelRequest,
    ModelResponse,
    OnOverlap,
    ScriptedModel,
    SQLiteJournal,
    TextDelta,
    ToolAgent,
    ToolCall,
)
from turnkeeper.actors.errors import TurnInProgress
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ConfirmationRequestedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    TurnEndedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from turnkeeper.runtime import TurnkeeperError

WIDTH = 78
OVERLAPS: tuple[OnOverlap, ...] = get_args(OnOverlap)
PROMPT = "You are the support desk of a small bookshop. Be brief and kind."

# --- the agent -----------------------------------------------------------------------------------


async def look_up(order: int) -> str:
    """Look up where an order is."""
    await anyio.sleep(0.5)
    return f"order {order}: left the warehouse on Monday, 2 books"


async def refund(order: int) -> str:
    """Pay an order back. The user is asked before."""
    await anyio.sleep(0.5)
    return f"order {order} is paid back"


def answer(request: ModelRequest) -> str | ModelResponse:
    """Answer as the scripted model: by the view alone, so that a restart changes nothing."""
    newest = request.view[-1]
    texts = [event.content for event in request.view if isinstance(event, UserMessageEvent)]
    order = next((int(n) for text in reversed(texts) for n in re.findall(r"\d+", text)), 0)
    if isinstance(newest, ObservationEvent):
        return f"Here is what I found: {newest.content}. Is there anything else?"
    if isinstance(newest, UserRejectEvent | AgentErrorEvent):
        return "Then I leave it as it is. Tell me if you change your mind."
    if order and "refund" in texts[-1].lower():
        return ModelResponse("Let me see to that.", [ToolCall("refund", {"order": order})])
    if order and any(word in texts[-1].lower() for word in ("order", "where", "when")):
        return ModelResponse("I look it up.", [ToolCall("look_up", {"order": order})])
    if "story" in texts[-1].lower():
        return (
            "Once upon a time there was a bookshop with a cat that slept on the atlas, and no one "
            "ever bought the atlas. One winter a traveller came in, snow on her coat, and asked "
            "for just that book. The cat opened one eye. They settled on the dictionary."
        )
    return (
        f"You said: {texts[-1]!r}. I am a scripted model: ask me where order 7 is, for a refund "
        "of it, or for a story, and type something else while I answer."
    )


class Paced:
    """A model that writes no faster than a person reads."""

    def __init__(self, model: Model, pause_s: float) -> None:
        self._model = model
        self._pause_s = pause_s

    async def respond(
        self, request: ModelRequest, write: Callable[[str], Awaitable[None]]
    ) -> ModelResponse:
        async def slowly(piece: str) -> None:
            await anyio.sleep(self._pause_s)
            await write(piece)

        return await self._model.respond(request, slowly)


@asynccontextmanager
async def open_model(pause_s: float) -> AsyncIterator[tuple[Model, str]]:
    """Yield the model for which there is a key, and its name; close its connections afterwards."""
    if os.environ.get("ANTHROPIC_API_KEY"):
        from turnkeeper.actors.models.anthropic import AnthropicModel  # noqa: PLC0415 - an extra

        name = os.environ.get("CHAT_MODEL", "claude-sonnet-4-5")
        async with AnthropicModel(name) as model:
            yield model, name
    elif os.environ.get("OPENAI_API_KEY"):
        from turnkeeper.actors.models.openai import OpenAIChatModel  # noqa: PLC0415 - an extra

        name = os.environ.get("CHAT_MODEL", "gpt-4.1-mini")
        async with OpenAIChatModel(name) as chat_model:
            yield chat_model, name
    else:
        yield Paced(ScriptedModel(answer), pause_s), "a scripted model"


# --- the screen ----------------------------------------------------------------------------------


class Screen:
    """Lines that stay, and below them what changes: the line being written, the line being typed.

    Without a terminal only what stays is printed.
    """

    def __init__(self, *, is_terminal: bool) -> None:
        self.typed = ""
        self.prompt = "> "
        self._is_terminal = is_terminal
        self._writing = ""
        """The unfinished last line of the answer that is being written."""
        self._is_shown = False

    def show(self, *lines: str, writing: str = "") -> None:
        """Print lines above what changes, and the unfinished one after them."""
        if not self._is_terminal:
            for line in lines:
                print(line, flush=True)
            return
        out = "\r\x1b[K"
        if self._is_shown and self._writing:
            out += "\x1b[1A\r\x1b[K"
        out += "".join(f"{line}\r\n" for line in lines)
        if writing:
            out += f"{writing}\r\n"
        room = WIDTH - len(self.prompt)
        out += self.prompt + self.typed[-room:]
        self._writing, self._is_shown = writing, True
        print(out, end="", flush=True)

    def redraw(self) -> None:
        self.show(writing=self._writing)


def wrapped(who: str, text: str) -> list[str]:
    """Break a text into lines; the first says who is speaking."""
    indent = " " * len(who)
    lines: list[str] = []
    for paragraph in text.split("\n"):
        first = indent if lines else who
        part = textwrap.wrap(paragraph, WIDTH, initial_indent=first, subsequent_indent=indent)
        lines += part or [first.rstrip()]
    return lines


class Printer:
    """Prints a conversation as it is followed; the answer that is being written grows in place."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._said = ""
        self._lines_shown = 0

    def delta(self, delta: TextDelta) -> None:
        if not delta.offset:
            self._finish(" (and again)" if self._said else "")
        self._said += delta.text
        *finished, writing = wrapped("agent: ", self._said)
        new, self._lines_shown = finished[self._lines_shown :], len(finished)
        self._screen.show(*new, writing=writing)

    def event(self, event: Event) -> None:
        match event:
            case AgentMessageEvent(content=text, interrupted=is_cut):
                self._say(text, " …" if is_cut else "")
            case ActionEvent(tool_name=name, arguments=arguments, text=text):
                if text:
                    self._say(text)
                given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
                self._note(f"calls {name}({given})")
            case UserMessageEvent(content=text, is_reminder=False):
                self._finish()
                self._screen.show(*wrapped("you:   ", text))
            case MessageQueuedEvent(content=text):
                self._note(f"waits{' again' if event.queued_again else ''}: {text}")
            case MessageWithdrawnEvent():
                self._note("withdrawn")
            case ObservationEvent(content=text):
                self._note(f"-> {text}")
            case AgentErrorEvent(content=text) | UserRejectEvent(content=text):
                self._note(f"-> {text}")
            case ConfirmationRequestedEvent():
                self._note("asks: /confirm or /reject [why]")
            case TurnEndedEvent(outcome=outcome, detail=why) if outcome != "completed":
                self._note(outcome.replace("_", " ") + (f": {why}" if outcome == "failed" else ""))
            case RetractionEvent():
                self._note("taken back; the model does not see it any more")
            case _:
                if event.kind in ("paused", "resumed"):
                    self._note(event.kind)
                self._screen.redraw()

    def _say(self, text: str, mark: str = "") -> None:
        """Show all of what was said; some of it may be on the screen already."""
        if not text.startswith(self._said):
            self._finish()
        self._said = text
        self._finish(mark)

    def _note(self, text: str) -> None:
        *finished, writing = wrapped("agent: ", self._said) if self._said else [""]
        new, self._lines_shown = finished[self._lines_shown :], len(finished)
        self._screen.show(*new, *wrapped("       · ", text), writing=writing)

    def _finish(self, mark: str = "") -> None:
        """Leave what is being said on the screen as it is."""
        if self._said:
            lines = wrapped("agent: ", self._said.rstrip() + mark)
            self._screen.show(*lines[self._lines_shown :])
        self._said, self._lines_shown = "", 0


# --- the keyboard --------------------------------------------------------------------------------


@contextmanager
def keys_one_by_one() -> Iterator[None]:
    """Have the terminal give each key as it is pressed, and not print it."""
    import termios  # noqa: PLC0415 - there is none on Windows, where lines are read as they come
    import tty  # noqa: PLC0415

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print()


async def typed_lines(screen: Screen, handle: Callable[[str], Awaitable[bool]]) -> None:
    """Edit a line at the bottom of the screen, and handle it when Enter is pressed."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    while True:
        await anyio.wait_readable(sys.stdin)
        pressed = os.read(sys.stdin.fileno(), 1024)
        if not pressed:
            return  # the terminal has gone
        for key in re.sub(r"\x1b(\[[0-9;]*)?.?", "", decode(pressed)):
            match key:
                case "\r" | "\n":
                    line, screen.typed = screen.typed, ""
                    screen.redraw()
                    if not await handle(line):
                        return
                case "\x7f" | "\b":
                    screen.typed = screen.typed[:-1]
                case "\x15":  # Ctrl-U
                    screen.typed = ""
                case "\x04":  # Ctrl-D
                    return
                case _ if key.isprintable():
                    screen.typed += key
                case _:
                    pass
        screen.redraw()


async def piped_lines(handle: Callable[[str], Awaitable[bool]]) -> None:
    """Handle the lines of a file or a pipe, as they come."""
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        if not await handle(line.rstrip("\n")):
            return


# --- the chat ------------------------------------------------------------------------------------


class Chat:
    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self._conversation = conversation
        self._screen = screen

    async def show(self, after: int) -> None:
        """Print everything that comes, from the seq `after` on."""
        printer = Printer(self._screen)
        async for item in self._conversation.follow(after=after):
            if isinstance(item, TextDelta):
                printer.delta(item)
                continue
            self._screen.prompt = _PROMPTS.get(item.event.kind, self._screen.prompt)
            printer.event(item.event)

    async def handle(self, line: str) -> bool:
        """Carry out a line; return False if it is the last."""
        words = line.strip().split(maxsplit=1)
        if not words:
            return True
        command, text = words[0], words[1] if len(words) > 1 else ""
        try:
            match command.removeprefix("/") if command.startswith("/") else "":
                case "":
                    await self._conversation.send(line.strip())
                case "quit":
                    return False
                case "pause":
                    await self._conversation.pause()
                case "resume":
                    await self._conversation.resume()
                case "confirm":
                    await self._conversation.confirm()
                case "reject":
                    await self._conversation.reject(text)
                case "undo":
                    await self._undo()
                case name if name in OVERLAPS and text:
                    overlap = OVERLAPS[OVERLAPS.index(name)]
                    await self._conversation.send(text, on_overlap=overlap)
                case _:
                    self._screen.show(f"  there is no {line.strip()}; see --help")
        except TurnkeeperError as error:
            self._screen.show(*wrapped("  ! ", str(error)))
        return True

    async def _undo(self) -> None:
        try:
            await self._conversation.undo()
        except TurnInProgress:
            self._screen.show("  it still answers; wait, or send with /rollback")

    async def until_quiet(self) -> None:
        """Wait until nothing runs, or the user is asked something."""
        async for _ in self._conversation.events():
            turns = (await self._conversation.at()).turns
            if not turns.has_open_turns or turns.waits_for is not None:
                return


_PROMPTS = {
    "paused": "paused> ",
    "resumed": "> ",
    "confirmation_requested": "confirm?> ",
    "confirmation_given": "> ",
    "turn_ended": "> ",
}


async def chat(arguments: argparse.Namespace) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and sys.platform != "win32"
    screen = Screen(is_terminal=is_terminal)
    async with (
        open_model(arguments.pause_s) as (model, name),
        Conversations(
            ToolAgent(model, [look_up, refund], confirm=["refund"]),
            journal=SQLiteJournal(arguments.db),
            system_prompt=PROMPT,
            on_overlap=arguments.on_overlap,
            unfinished="resume",
        ) as conversations,
    ):
        is_known = bool((await conversations.list(prefix="chat")).rows)
        here = Chat(conversations["chat"], screen)
        print("\n".join(wrapped("", f"Talking to {name}; the chat is kept in {arguments.db}.")))
        print(f"Type while it answers ({arguments.on_overlap}); /quit ends. Try: tell me a story")
        if is_known:
            print("--- so far ".ljust(WIDTH, "-"))
        async with anyio.create_task_group() as group:
            group.start_soon(here.show, 0)
            if is_terminal:
                with keys_one_by_one():
                    screen.redraw()
                    await typed_lines(screen, here.handle)
            else:
                await piped_lines(here.handle)
                if (await conversations.list(prefix="chat")).rows:
                    await here.until_quiet()
            group.cancel_scope.cancel()


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", default="chat.db", help="the file that keeps the chat")
    parser.add_argument("--on-overlap", choices=OVERLAPS, default="interrupt")
    parser.add_argument("--pause-s", type=float, default=0.08, help="between two words")
    structlog.configure(processors=[_drop])  # the screen says what failed
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is put back
    try:
        anyio.run(chat, parser.parse_args())
    except KeyboardInterrupt:
        print()


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


if __name__ == "__main__":
    main()
