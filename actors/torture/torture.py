"""The torture: users who interrupt their agents, cut connections, retry and reconnect, and kills.

A seed decides what each user does and in which order; the machine decides when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import TextIO

import anyio

from turnkeeper.runtime import Ports

from . import ag_ui, ai_sdk, own
from .exchanges import NO_CUT, Broken, Cut, CutOff, Site
from .history import Began, Disturbed, Entry, OnOverlap, Protocol
from .rooms import History, Message, Room
from .server import Server, ServerLost, answers

__all__ = ["Plan", "Torture"]

GIVE_UP_S = 90.0
WAIT_S = 20
ROOM_MESSAGES_MAX = 30
"""An answer names all messages before it, so users change to a new conversation after this many."""
_USERS_MAX = 3
_REFUSED_MAX = 50
_CUTS_MAX = 4
_POLL_S = 0.1
_POLLS = 20
_AWAY_S = 0.2
"""How long a reader waits for a server that does not answer."""
_KNOWN_BETWEEN_KILLS = 10
_POLICIES: Sequence[OnOverlap | None] = (
    *(None, "queue", "queue", "interrupt", "steer", "steer", "rollback", "reject"),
)
_WORDS = (
    "good morning",
    "where is order 7?",
    "please look",
    "no, wait",
    "naïve café",
    "日本語も",
    "שלום",
    "👩‍👩‍👧 family",
    "line one\nline two",
    '{"a": [1, "\\u0000"]}',
    "data: [DONE]",
    "𝄞 clef",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run: its length, its users, its protocols and its kills."""

    seed: int
    users: int = 20
    seconds: float | None = None
    messages: int | None = None
    """How many messages each user sends at most; without this or a time limit, 20."""
    protocols: Sequence[Protocol] = ("own",)
    kills: int = 0
    tokens: Sequence[str | None] = (None,)
    has_log: bool = True


def chance(random: Random, share: float) -> bool:
    """Return True in this share of cases."""
    return random.random() < share


class Torture:
    """One run; its `history` has all that happened."""

    def __init__(
        self,
        plan: Plan,
        site: Site,
        *,
        server: Server | None = None,
        file: TextIO | None = None,
        ports: Ports | None = None,
        give_up_s: float | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.history = History(file, changed=changed)
        self.unread: list[str] = []
        """The conversations that could not be read at the end."""
        self.give_up_s = GIVE_UP_S if give_up_s is None else give_up_s
        """How long a message is retried, and how long turns may take to end after the run."""
        self._site = site
        self._server = server
        self._ports = Ports() if ports is None else ports
        self._name = self._ports.ids.new()[19:]
        self._began_at: float | None = None
        """When its users began; None until the servers are up."""
        self._written = 0
        self._tables = _tables_of(plan, self)
        self._lost: ServerLost | None = None

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1."""
        plan = self.plan
        done = 0.0
        if plan.seconds is not None:
            done = self._passed_s / plan.seconds
        if plan.messages is not None:
            done = max(done, self._written / (plan.messages * plan.users))
        return min(1.0, done)

    @property
    def _passed_s(self) -> float:
        return 0.0 if self._began_at is None else self._ports.monotonic() - self._began_at

    async def run(self) -> None:
        """Torture the server, then read its logs. Raises `ServerLost`."""
        plan = self.plan
        self.history.add(
            Began(
                seed=plan.seed,
                options={
                    "url": self._site.url,
                    "users": plan.users,
                    "seconds": plan.seconds,
                    "messages": plan.messages,
                    "protocols": " ".join(plan.protocols),
                    "kills": plan.kills,
                },
            )
        )
        server = self._server
        async with anyio.create_task_group() as between:
            try:
                if server is not None:
                    await server.listen(between)
                    await server.start()
                elif not await answers(self._site):
                    raise ServerLost(f"{self._site.url} cannot be connected to")
                await self._run(server)
            except ServerLost as lost:
                self._lost = lost  # not in a group of errors
            finally:
                if server is not None:
                    await server.leave()
                between.cancel_scope.cancel()
        if self._lost is not None:
            raise self._lost

    async def _run(self, server: Server | None) -> None:
        self._began_at = self._ports.monotonic()
        async with anyio.create_task_group() as group:
            if server is not None:
                group.start_soon(self._disturb, server, group.cancel_scope)
            for table in self._tables:
                for user in table.users:
                    group.start_soon(user.run)
        if self._lost is None:
            async with anyio.create_task_group() as group:
                for table in self._tables:
                    for room in table.rooms:
                        group.start_soon(self._settle, room)

    def may_go_on(self, user: User) -> bool:
        """True while a user has messages and time left."""
        plan, counts = self.plan, self.history.counts
        if counts["refused"] > _REFUSED_MAX and not counts["acknowledged"]:
            return False  # another protocol is spoken there, or we are not let in
        most = plan.messages
        return (most is None or user.written < most) and (
            plan.seconds is None or self._passed_s < plan.seconds
        )

    def new_room(self, number: int, protocol: Protocol) -> Room:
        tokens = self.plan.tokens
        # Principals begin conversations of the same names: none may hear of the other's.
        name = f"torture-{self._name}-{number // len(tokens)}"
        return Room(
            number,
            name,
            protocol,
            self._site,
            self.history,
            tokens[number % len(tokens)],
            self.plan.has_log,
        )

    def note_written(self) -> None:
        self._written += 1

    async def pause(self, seconds: float) -> None:
        await self._ports.sleep(seconds)

    def now(self) -> float:
        return self._ports.monotonic()

    # --- the server's death ---------------------------------------------------------------------

    async def _disturb(self, server: Server, scope: anyio.CancelScope) -> None:
        """Kill the server, and start it again; end the run if it does not come back."""
        try:
            await self._kill_again_and_again(server)
        except ServerLost as lost:
            self._lost = lost
            scope.cancel()

    async def _kill_again_and_again(self, server: Server) -> None:
        """Kill the server at moments that the seed decides."""
        random = Random(f"{self.plan.seed} server")
        for at in sorted(random.uniform(0.1, 0.95) for _ in range(self.plan.kills)):
            # Not before the server has done something: until then it has nothing to lose.
            known = self.history.counts["acknowledged"] + _KNOWN_BETWEEN_KILLS
            while self.progress < at or (
                self.history.counts["acknowledged"] < known and self.progress < 1
            ):
                await self._ports.sleep(0.02)
            if not server.is_ours:
                return
            await server.disturb(random, lambda how: self.history.add(Disturbed(how=how)))

    # --- the end --------------------------------------------------------------------------------

    async def _settle(self, room: Room) -> None:
        """Read a conversation once its turns have ended."""
        if not room.messages:
            return
        if not room.has_log:
            last = room.write(0, "what have you seen?", is_last=True)
            await deliver(last, _Sober(), self)
            return
        entries: list[Entry] = []
        with anyio.move_on_after(self.give_up_s) as scope:
            try:
                # An acknowledged message that is missing once all is quiet will not come later.
                polls = _POLLS
                while polls and not await self._is_read(room, entries):
                    polls -= _is_quiet(entries)
                    await self._ports.sleep(_POLL_S)
            finally:
                if entries:
                    own.note_log(room, entries)
            while not await self._read_transcript(room):
                await self._ports.sleep(_POLL_S)
        if scope.cancelled_caught and not entries:
            self.unread.append(room.name)

    async def _is_read(self, room: Room, entries: list[Entry]) -> bool:
        """Read more of the log; return True once it has all acknowledged messages and is quiet."""
        try:
            await own.read_log(room, entries)
        except Broken:
            # Without a message that was acknowledged, there may be no conversation.
            return not room.acknowledged
        known = {entry.message for entry in entries}
        return _is_quiet(entries) and all(message.key in known for message in room.acknowledged)

    async def _read_transcript(self, room: Room) -> bool:
        try:
            await own.read_transcript(room)
        except Broken:
            return not room.acknowledged
        return True


def _is_quiet(log: Sequence[Entry]) -> bool:
    """True if the log shows no running turn and no waiting message."""
    waiting: set[str] = set()
    running: set[str | None] = set()
    for entry in log:
        match entry.kind:
            case "message_queued":
                waiting.add(entry.message or "")
            case "user_message" | "message_withdrawn":
                waiting.discard(entry.message or "")
            case "turn_started":
                running.add(entry.turn)
            case "turn_ended":
                running.discard(entry.turn)
            case _:
                pass
    return bool(log) and not waiting and not running


class _Table:
    """A group of users who share one conversation after another."""

    def __init__(self, torture: Torture, number: int, protocol: Protocol) -> None:
        self._torture = torture
        self._number = number
        self._protocol = protocol
        self.users: list[User] = []
        self.rooms: list[Room] = [self._next()]

    def _next(self, round_number: int = 0) -> Room:
        return self._torture.new_room(self._number + 1_000 * round_number, self._protocol)

    @property
    def room(self) -> Room:
        """The current conversation; a new one if the last is full."""
        if len(self.rooms[-1].messages) >= ROOM_MESSAGES_MAX:
            self.rooms[-1].left.set()
            self.rooms.append(self._next(len(self.rooms)))
        return self.rooms[-1]


def _tables_of(plan: Plan, torture: Torture) -> list[_Table]:
    """Return the tables of all users."""
    random = Random(f"{plan.seed} tables")
    protocols = cycle(plan.protocols)
    tables: list[_Table] = []
    left = plan.users
    while left:
        table = _Table(torture, len(tables) + 1, next(protocols))
        for _ in range(min(left, random.randint(1, _USERS_MAX))):
            table.users.append(User(torture, table, plan.users - left + 1))
            left -= 1
        tables.append(table)
    return tables


class _Habits:
    """How a user treats connections."""

    def cut(self, attempt: int) -> Cut:
        """Return where the next exchange is cut."""
        raise NotImplementedError

    def resumes(self) -> bool:
        """True to resume a stream instead of sending the message again."""
        raise NotImplementedError

    def wait_s(self) -> int | None:
        """Return how long to wait for the turn's end while sending, if at all."""
        raise NotImplementedError


class _Sober(_Habits):
    """Habits that never cut a connection."""

    def cut(self, attempt: int) -> Cut:  # noqa: ARG002 - as the other one
        return NO_CUT

    def resumes(self) -> bool:
        return False

    def wait_s(self) -> int | None:
        return None


class _Rough(_Habits):
    """Habits that cut at any byte for some attempts, and then stop, so that the message arrives."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def cut(self, attempt: int) -> Cut:
        if attempt > _CUTS_MAX or chance(self._random, 0.5):
            return NO_CUT
        is_reset = chance(self._random, 0.5)
        if chance(self._random, 0.4):
            return Cut(sent=self._random.randrange(600), is_reset=is_reset)
        return Cut(received=self._random.randrange(1_500), is_reset=is_reset)

    def resumes(self) -> bool:
        return chance(self._random, 0.4)

    def wait_s(self) -> int | None:
        return WAIT_S if chance(self._random, 0.2) else None


async def deliver(message: Message, habits: _Habits, torture: Torture) -> None:
    """Send a message until it is known to have arrived, or is refused for good."""
    room = message.room
    run = ag_ui.Run(message)
    until = torture.now() + torture.give_up_s
    failed = 0
    while not message.is_settled and torture.now() < until:
        before = message.attempts
        cut = habits.cut(before)
        match room.protocol:
            case "own":
                await own.send(message, cut=cut, wait_s=habits.wait_s())
            case "ai-sdk" if message.turn_id is not None and habits.resumes():
                await ai_sdk.resume(message, cut=cut)
            case "ai-sdk":
                await ai_sdk.send(message, cut=cut)
            case "ag-ui" if run.has_cursor and room.has_log and habits.resumes():
                await run.go_on(cut=cut)
            case "ag-ui":
                await run.send(cut=cut)
        if not message.is_settled:
            failed += 1
            await torture.pause(min(0.02 * 2**failed, 1.0))


class User:
    """One user: writes, retries, reads along, comes back."""

    def __init__(self, torture: Torture, table: _Table, number: int) -> None:
        self._torture = torture
        self._table = table
        self._number = number
        self._random = Random(f"{torture.plan.seed} user {number}")
        self._reading = Random(f"{torture.plan.seed} reader {number}")
        self._habits = _Rough(self._random)
        self.written = 0

    async def run(self) -> None:
        """Act until the run is over."""
        async with anyio.create_task_group() as group:
            if self._torture.plan.has_log:
                group.start_soon(self._read_along)
            while self._torture.may_go_on(self):
                await self._act()
            group.cancel_scope.cancel()

    async def _act(self) -> None:
        random = self._random
        room = self._table.room
        # Several at once, whose order the server chooses.
        count = random.choice((1, 1, 1, 2, 3))
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(deliver, self._write(room), self._habits, self._torture)
        if room.protocol == "own":
            await self._follow_up(room)
        await self._torture.pause(random.choice((0, 0, 0.01, 0.05)))

    def _write(self, room: Room) -> Message:
        random = self._random
        self.written += 1
        self._torture.note_written()
        text = random.choice(_WORDS)
        on_overlap = random.choice(_POLICIES) if room.has_log else None
        replaces = None
        if room.protocol == "own" and room.acknowledged and chance(random, 0.05):
            replaces = random.choice(room.acknowledged).key
        return room.write(self._number, text, on_overlap=on_overlap, replaces=replaces)

    async def _follow_up(self, room: Room) -> None:
        """Do one of the things that users do after a message."""
        random = self._random
        mine = [message for message in room.acknowledged if message.user == self._number]
        match random.randrange(12):
            case 0 | 1 | 2 if mine:
                await own.ask_end(mine[-1], wait_s=WAIT_S, cut=self._habits.cut(0))
            case 3 | 4 if mine:
                await own.send(random.choice(mine), cut=self._habits.cut(0))
            case 5 if room.acknowledged:
                turn_id = random.choice((None, room.acknowledged[-1].turn_id))
                await own.interrupt(room, turn_id)
            case 6 if chance(random, 0.3):
                await own.undo(room)
            case 7 | 8:
                with suppress(Broken, CutOff):
                    await own.read_page(room, 0, cut=self._habits.cut(0))
            case _:
                pass

    async def _read_along(self) -> None:
        random = self._reading
        room: Room | None = None
        reader: own.Reader | None = None
        while True:
            if room is not self._table.room or reader is None:
                room = self._table.room
                reader = own.Reader(room)
            match random.randrange(8):
                case 0:
                    reader.forget()
                case 1:
                    reader.forget_event()
                case _:
                    pass
            is_reset = chance(random, 0.5)
            cut = Cut(received=int(random.expovariate(1 / 6_000)), is_reset=is_reset)
            how = own.How(
                cut=cut if chance(random, 0.9) else NO_CUT,
                live=chance(random, 0.85),
                pieces=chance(random, 0.6),
                by_header=chance(random, 0.5),
            )
            async with anyio.create_task_group() as group:
                group.start_soon(_leave_with, room, group.cancel_scope)
                if not await reader.stream(how):
                    await self._torture.pause(_AWAY_S)
                group.cancel_scope.cancel()
            await self._torture.pause(random.choice((0, 0.01, 0.1)))


async def _leave_with(room: Room, scope: anyio.CancelScope) -> None:
    """Cancel the scope once the users of a conversation have left it for another."""
    await room.left.wait()
    scope.cancel()
