"""The story of a run: which message, which handler and which order of steps led to a failure.

1. Owns the lines of one run: steps of tasks, messages, handlers, waits, answers, spawns, restarts,
   timers, and the decisions of the tape that were not boring.
2. A run that is told takes the same steps as one that is not. Telling wraps a few functions of the
   runtime for the time of the run, and nothing else; so a run that is not told pays nothing.
3. Messages appear in it, shortened. It is for test data.
4. Everything here runs inside the simulated loop. Nothing waits.
5. Nothing survives the run but its text.
"""

from __future__ import annotations

import asyncio
import linecache
import re
import sysconfig
import textwrap
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from .. import _cell
from .._actor import Actor, ActorContext
from .._asking import current_actor
from .._cell import Cell
from .._event_stream import EventStream
from .._messages import Delivery
from .._ref import Ref
from .._reports import DeadLetter, Failure, Restart, Stopped, Stuck
from .._timers import Timer
from ._simulation import Node, current_node
from ._tape import Tape

if TYPE_CHECKING:
    from .._effects import Effect
    from .._incarnation import Incarnation
    from ._simulation import Broken, Simulation

__all__ = ["Place", "Story", "ToldTape", "place_of"]

WIDTH = 79
_LINES_MAX = 5_000
_SHOWN_MAX = 120
_LAST_SHOWN = 60
_AROUND = 2
_REPR_MAX = 56
_TEXT_MAX = 240
_BETWEEN_STEPS = "simulator"
"""The name for events between two steps, such as a strike."""
_WRAPPED = re.compile(r"<(?:function|bound method) ([^ ]+)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WHO_MAX = 18

speaker: ContextVar[str | None] = ContextVar("turnkeeper_speaker", default=None)
"""The effect that this code runs in; other code is named after its actor or its task."""


# --- where a coroutine waits ---------------------------------------------------------------------


class Place(NamedTuple):
    """A line of code at which a task waits."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).partition("  #")[0].strip()
        return f"{source or self.function}  [{Path(self.file).name}:{self.line}]"


_RUNTIME = str(Path(_cell.__file__).parent)
_ACTORS = str(Path(_RUNTIME).parent / "actors")
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(anyio.__file__).parent),
    str(Path(asyncio.__file__).parent),
    _ACTORS,
)


def place_of(awaited: object) -> Place | None:
    """Return the innermost line of the user's own code at which a coroutine waits.

    Libraries count only if there is no code of the user's; the runtime and the standard library
    never do.
    """
    own = library = None
    while awaited is not None:
        frame, inner = _frame_of(awaited)
        if frame is not None:
            file = frame.f_code.co_filename
            place = Place(file, frame.f_lineno, frame.f_code.co_name)
            if file.startswith((_RUNTIME, "<")):
                pass
            elif not file.startswith(_LIBRARIES):
                own = place
            elif file.startswith(_ACTORS):
                library = place
        awaited = inner
    return own or library


def _frame_of(awaited: object) -> tuple[Any, object]:  # Any: a frame, or nothing
    for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaited, f"{prefix}_frame"):
            return getattr(awaited, f"{prefix}_frame"), getattr(awaited, inner)
    return None, None


# --- the lines -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """One thing that happened."""

    step: int
    at_s: float
    node: str
    who: str
    text: str
    is_chosen: bool


def _short(value: object) -> str:
    """Return a short text for a message, an answer or an error."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:  # noqa: BLE001 - the repr of a user's class; the story goes on without
        text = f"<{type(value).__name__}>"
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= _REPR_MAX else f"{text[: _REPR_MAX - 1]}…"


class Story:
    """The lines of one run, in their order."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._lines: deque[Line] = deque(maxlen=_LINES_MAX)
        self._dropped = 0
        self._waiting: Sequence[str] = ()
        self._sent: dict[tuple[int, str, Node | None], deque[tuple[object, str]]] = {}
        """The senders of messages that are under way, oldest first; by message, actor and node."""
        self._handlers: dict[Coroutine[Any, Any, object], tuple[str, Node | None]] = {}
        """The handlers and effects that have begun and not ended: their names, their nodes."""
        self._labels: dict[object, str] = {}
        self._namesakes: Counter[str] = Counter()
        # The step that is going on.
        self._task: object = None
        self._coroutine: object = None
        self._who = "world"
        self._at_s = 0.0
        self._is_chosen = False
        self._has_said = False
        self._is_over = False
        self._places: dict[object, Place | None] = {}

    # --- told by the scheduler -------------------------------------------------------------------

    def step_begins(self, task: object, name: str, coroutine: object, passed: int) -> None:
        """Begin a step of a task; `passed` others had waited longer."""
        self.step_ends()
        self._task, self._coroutine = task, coroutine
        self._who = self._label(task, name)
        self._at_s = self._simulation.now()
        self._is_chosen = passed > 0
        self._has_said = False
        if passed:
            text = f"goes first, though {passed} had waited longer"
            self.say(f"{text}: {place_of(coroutine)}" if place_of(coroutine) else text)

    def step_ends(self) -> None:
        """End the step that is going on: its task waits, or has ended."""
        task, self._task = self._task, None
        if task is None:
            return
        place = place_of(self._coroutine)
        before = self._places.get(task)
        self._places[task] = place
        if place is None and before is not None:
            self.say("ends", who=self._who, at_s=self._at_s)
        elif place is not None and (place != before or self._has_said):
            last = self.last
            if last is None or not last.text.startswith("asks "):
                self.say(f"waits: {place}", who=self._who, at_s=self._at_s)
        self._is_chosen = False

    def drawn(self, label: str, value: int, options: int) -> None:
        """Tell of a decision that was not the boring choice."""
        self._is_chosen = True
        shown = "yes" if options == 2 else f"{value} of 0 to {options - 1}"  # noqa: PLR2004
        self.say(f"the tape decides: {label}: {shown}")

    def broken(self, broken: Broken, tasks: Sequence[tuple[object, str, object]]) -> None:
        """Tell of the first invariant that does not hold, and add nothing more."""
        detail = broken.detail.partition("\n")[0]
        self.say(f"BROKEN: {broken.invariant}: {detail}", who=self._who)
        self._is_over = True
        if broken.invariant in ("deadlock", "budget"):
            self._waiting = [
                *(
                    f"{self._label(task, name)}: {place}"
                    for task, name, coroutine in tasks
                    if (place := place_of(coroutine)) is not None
                ),
                *(
                    f"{who}: {place}"
                    for coroutine, (who, node) in self._handlers.items()
                    if (place := place_of(coroutine)) is not None
                    and (node is None or node.is_alive)
                ),
            ]

    def _label(self, task: object, name: str) -> str:
        """Return the name of a task; a second one of the same name gets a number."""
        label = self._labels.get(task)
        if label is None:
            short = _short_name(name)
            self._namesakes[short] += 1
            number = self._namesakes[short]
            label = self._labels[task] = short if number == 1 else f"{short}#{number}"
        return label

    # --- told by the wrappers --------------------------------------------------------------------

    @property
    def who(self) -> str:
        """The name of the code that runs now."""
        effect = speaker.get()
        if effect is not None:
            return effect
        running = current_actor.get(None)
        if running is not None:
            return running.name
        return _BETWEEN_STEPS if self._task is None else self._who

    @property
    def last(self) -> Line | None:
        """The newest line."""
        return self._lines[-1] if self._lines else None

    def say(self, text: str, *, who: str | None = None, at_s: float | None = None) -> None:
        """Add a line."""
        simulation = self._simulation
        if self._is_over or simulation.is_over:
            return
        node = current_node.get()
        if len(self._lines) == _LINES_MAX:
            self._dropped += 1
        self._lines.append(
            Line(
                simulation.steps,
                simulation.now() if at_s is None else at_s,
                "" if node is None else str(node),
                self.who if who is None else who,
                textwrap.shorten(text, _TEXT_MAX, placeholder=" …"),
                self._is_chosen,
            )
        )
        self._has_said = True

    def sent(self, message: object, actor: str, how: str) -> None:
        """Note how a message was sent that is under way to an actor."""
        key = id(message), actor, current_node.get()
        # The message is kept, too, so that no other one gets its id.
        self._sent.setdefault(key, deque()).append((message, how))

    def begins(self, message: object, actor: str) -> str:
        """Say that a handler begins; return the text for the message."""
        key = id(message), actor, current_node.get()
        senders = self._sent.get(key)
        sender = senders.popleft()[1] if senders else "from the runtime"
        if not senders:
            self._sent.pop(key, None)
        shown = _short(message)
        self.say(f"begins {shown}, {sender}", who=actor)
        return shown

    @contextmanager
    def handling(self, coroutine: Coroutine[Any, Any, object], who: str) -> Iterator[None]:
        """Keep in mind that this coroutine has not ended."""
        self._handlers[coroutine] = who, current_node.get()
        try:
            yield
        finally:
            del self._handlers[coroutine]

    def told(self) -> AbstractContextManager[None]:
        """Wrap the functions that tell of actors, for the time of a run."""
        return _told(self)

    # --- the text --------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the story, 80 columns wide."""
        lines = list(self._lines)
        nodes = {line.node for line in lines if line.node}
        shown = _shown(lines)
        who = [_named(line, with_node=len(nodes) > 1) for line in lines]
        width = min(_WHO_MAX, max((len(name) for name in who), default=0))
        if any(line.is_chosen for line in lines):
            text = ["the story (a * marks what the tape decided; the rest is the plainest order):"]
        else:
            text = ["the story (the tape decided nothing: it fails in the plainest order):"]
        if self._dropped:
            text.append(f"       … {self._dropped} earlier lines")
        at_s = -1.0
        skipped = 0
        for index, line in enumerate(lines):
            if index not in shown:
                skipped += 1
                continue
            if skipped:
                text.append(f"       … {skipped} lines in the plainest order")
                skipped = 0
            if line.at_s != at_s:
                at_s = line.at_s
                text.append(f"-- {at_s:g} s --")
            text += _laid_out(line, who[index], width)
        if self._waiting:
            text.append("where each task and handler waits:")
            for each in self._waiting:
                text += textwrap.wrap(each, WIDTH, initial_indent="  ", subsequent_indent="      ")
        return "\n".join(text)


def _shown(lines: Sequence[Line]) -> set[int]:
    """Choose the lines to show of a long story: the last, and those around each decision."""
    if len(lines) <= _SHOWN_MAX:
        return set(range(len(lines)))
    shown = set(range(len(lines) - _LAST_SHOWN, len(lines)))
    for index in reversed(range(len(lines))):
        if len(shown) >= _SHOWN_MAX:
            break
        if lines[index].is_chosen:
            shown.update(range(max(0, index - _AROUND), index + _AROUND + 1))
    return shown


def _named(line: Line, *, with_node: bool) -> str:
    return f"{line.node}/{line.who}" if with_node and line.node not in ("", line.who) else line.who


def _laid_out(line: Line, who: str, width: int) -> list[str]:
    mark = "*" if line.is_chosen else " "
    head = f"{line.step:>5} {mark} {who:<{width}}  "
    if len(who) > width:  # a long name has a line of its own
        wrapped = textwrap.wrap(line.text, WIDTH - width - 10)
        return [head.rstrip(), *(" " * (width + 10) + each for each in wrapped)]
    return textwrap.wrap(
        line.text, WIDTH, initial_indent=head, subsequent_indent=" " * (len(head) + 2)
    ) or [head.rstrip()]


def _short_name(name: str) -> str:
    """Return the last part of a qualified name: the function that a task runs."""
    if name.startswith("node "):
        return name.removeprefix("node ")
    if name.endswith("Simulation.run"):
        return "world"
    if name.endswith("Worker.main"):
        return "worker"
    if (found := _WRAPPED.search(name)) is not None:  # a partial, for one, is named by its repr
        name = found[1]
    parts = [part for part in name.split(".") if part != "<locals>"]
    return parts[-1] if parts else name


class ToldTape(Tape):
    """A tape that tells its story what it decides."""

    story: Story | None = None

    def draw(self, label: str, options: int, chosen: int | None = None) -> int:
        value = super().draw(label, options, chosen)
        if value and self.story is not None and label != "task":
            self.story.drawn(label, value, options)
        return value


# --- the wrappers --------------------------------------------------------------------------------


@contextmanager
def _told(story: Story) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, wrapper in (
            (_cell, "_make", _told_make),
            (Ref, "ask", _told_ask),
            (Ref, "tell", _told_tell),
            (Ref, "tell_nowait", _told_tell_nowait),
            (ActorContext, "start_effect", _told_start_effect),
            (Timer, "_fire", _told_fire),
            (EventStream, "publish", _told_publish),
            (Delivery, "reply", _told_reply),
            (Delivery, "fail", _told_fail),
        ):
            original = getattr(where, name)
            setattr(where, name, wrapper(story, original))
            stack.callback(setattr, where, name, original)
        yield


# Any, below: a wrapper passes on whatever the wrapped function takes and returns.
Wrapped = Callable[..., Any]


def _told_make(story: Story, original: Wrapped) -> Wrapped:
    def make(cell: Cell, life: Incarnation) -> Actor[Any]:
        actor: Actor[Any] = original(cell, life)
        story.say("is made anew" if cell.restarts else "is spawned", who=cell.name)
        for name, wrapper in (("receive", _told_receive), ("receive_batch", _told_batch)):
            object.__setattr__(actor, name, wrapper(story, cell, getattr(actor, name)))
        return actor

    return make


def _told_receive(story: Story, cell: Cell, original: Wrapped) -> Wrapped:
    def receive(message: object) -> object:
        shown = story.begins(message, cell.name)
        try:
            result = original(message)
        except BaseException as error:
            story.say(f"raises {_short(error)} at {shown}", who=cell.name)
            raise
        if type(result) is CoroutineType:
            return _watched(story, cell, result, shown)
        _say_end(story, cell, result, shown)
        return result

    return receive


def _told_batch(story: Story, cell: Cell, original: Wrapped) -> Wrapped:
    def receive_batch(deliveries: Sequence[Delivery[Any]]) -> Coroutine[Any, Any, object]:
        for delivery in deliveries:
            story.begins(delivery.message, cell.name)
        shown = f"{len(deliveries)} messages"
        return _watched(story, cell, original(deliveries), shown)

    return receive_batch


def _say_end(story: Story, cell: Cell, result: object, shown: str) -> None:
    if cell.current is not None:
        story.say(f"answers {shown} with {_short(result)}", who=cell.name)
    else:
        story.say(f"has handled {shown}", who=cell.name)


async def _watched(
    story: Story, cell: Cell, coroutine: Coroutine[Any, Any, object], shown: str
) -> object:
    try:
        with story.handling(coroutine, cell.name):
            result = await _Steps(story, cell.name, coroutine)
    except BaseException as error:
        story.say(f"{_raised(error)} at {shown}", who=cell.name)
        raise
    _say_end(story, cell, result, shown)
    return result


def _raised(error: BaseException) -> str:
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "is cancelled"
    return f"raises {_short(error)}"


class _Steps:
    """Awaits a coroutine, and says where it waits."""

    def __init__(self, story: Story, who: str, coroutine: Coroutine[Any, Any, object]) -> None:
        self._story = story
        self._who = who
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, object]:
        coroutine = self._coroutine
        resume: Callable[[], Any] = partial(coroutine.send, None)
        try:
            while True:
                yielded = resume()
                self._say_wait()
                try:
                    sent = yield yielded
                except GeneratorExit:
                    coroutine.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                    resume = partial(coroutine.throw, error)
                else:
                    resume = partial(coroutine.send, sent)
        except StopIteration as stop:
            return stop.value

    def _say_wait(self) -> None:
        story = self._story
        last = story.last
        if last is not None and last.who == self._who and last.text.startswith("asks "):
            return
        place = place_of(self._coroutine)
        story.say("waits" if place is None else f"waits: {place}", who=self._who)


def _told_ask(story: Story, original: Wrapped) -> Wrapped:
    async def ask(self: Ref[Any], message: object, **options: Any) -> object:  # noqa: ANN401
        who = story.who
        story.sent(message, self.name, f"asked by {who}")
        story.say(f"asks {self.name}: {_short(message)}", who=who)
        try:
            answer = await original(self, message, **options)
        except BaseException as error:
            failed = _raised(error).replace("raises", "gets")
            story.say(f"{failed}, having asked {self.name}", who=who)
            raise
        story.say(f"gets {_short(answer)} from {self.name}", who=who)
        return answer

    return ask


def _told_tell(story: Story, original: Wrapped) -> Wrapped:
    async def tell(self: Ref[Any], message: object, **options: Any) -> None:  # noqa: ANN401
        story.sent(message, self.name, f"told by {story.who}")
        story.say(f"tells {self.name}: {_short(message)}")
        await original(self, message, **options)

    return tell


def _told_tell_nowait(story: Story, original: Wrapped) -> Wrapped:
    def tell_nowait(self: Ref[Any], message: object, **options: Any) -> None:  # noqa: ANN401
        story.sent(message, self.name, f"told by {story.who}")
        story.say(f"tells {self.name}: {_short(message)}")
        original(self, message, **options)

    return tell_nowait


def _told_start_effect(story: Story, original: Wrapped) -> Wrapped:
    def start_effect(
        self: ActorContext, run: Callable[[], Awaitable[None]], *, name: str
    ) -> Effect:
        who = f"{self.name}:{name}"

        async def told_run() -> None:
            speaker.set(who)
            story.say("the effect begins")
            coroutine = _as_coroutine(run)
            try:
                with story.handling(coroutine, who):
                    await _Steps(story, who, coroutine)
            except BaseException as error:
                story.say(_raised(error))
                raise
            story.say("the effect ends")

        story.say(f"starts the effect {name}")
        effect: Effect = original(self, told_run, name=name)
        return effect

    return start_effect


async def _as_coroutine(run: Callable[[], Awaitable[None]]) -> None:
    await run()


def _told_fire(story: Story, original: Wrapped) -> Wrapped:
    def fire(self: Timer) -> None:
        owner, message = self._owner, self._message
        story.say(f"a timer fires: {_short(message)}", who=owner.name)
        story.sent(message, owner.name, "from a timer")
        original(self)

    return fire


def _told_publish(story: Story, original: Wrapped) -> Wrapped:
    def publish(self: EventStream, event: object) -> None:
        match event:
            case Failure():
                story.say(f"fails: {_short(event.error)}: {event.decision}", who=event.actor)
            case Restart():
                story.say(f"has started again: restart {event.restarts}", who=event.actor)
            case Stopped():
                story.say("has stopped", who=event.actor)
            case Stuck():
                story.say(f"is stuck {event.doing}", who=event.actor)
            case DeadLetter():
                story.say(f"never gets {_short(event.message)}: {event.reason}", who=event.actor)
            case _:
                pass
        original(self, event)

    return publish


def _told_reply(story: Story, original: Wrapped) -> Wrapped:
    def reply(self: Delivery[Any], value: object) -> None:
        if self._ask is not None and not self._ask.is_done:
            story.say(f"answers {_short(self.message)} with {_short(value)}")
        original(self, value)

    return reply


def _told_fail(story: Story, original: Wrapped) -> Wrapped:
    def fail(self: Delivery[Any], error: BaseException) -> None:
        if self._ask is not None and not self._ask.is_done:
            story.say(f"refuses {_short(self.message)}: {_short(error)}")
        original(self, error)

    return fail
