"""The front door: opens the journal, runs the actors, hands out handles.

`async with Conversations(agent, journal=...)` owns a region of conversation actors and the
subscriptions to them. It promises:

1. A chat message is durable when `send` returns, and in the log once, however often it is sent
   under one `message_id`, even across restarts.
2. Chat messages of one conversation are answered one turn at a time; `on_overlap` decides what
   happens to a message that comes while a turn runs.
3. Turns that a crash cut off are ended, their open calls are answered, and queued chat messages
   get their turns: on entering, and within about `recover_every_s` if another process has crashed.
4. `events` yields every event of the log from a seq on, in order, without a gap or a repeat.

It does not promise to know whether a tool ran if its process stopped while the call was open: the
result says that it may have run.

Everything here belongs to one event loop, and any of its tasks may call it. A call that is
cancelled has happened as a whole or not at all, except `expire` and `erase`: they delete one
conversation after another, and what they have deleted stays deleted.

Importing this module loads neither the owner nor the event classes; making the first
`Conversations` does. So a program pays for them before its event loop serves anyone, and only if it
opens conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, Self

import anyio

from turnkeeper.runtime import (
    Directive,
    OwnershipLost,
    Ports,
    Ref,
    Refused,
    Region,
    Runtime,
    Supervision,
    TurnkeeperError,
)

from ..agents.agent import Agent
from ..core.limits import ANSWER_LENGTH_MAX, Limits
from ..errors import (
    ConversationNotFound,
    ConversationsClosed,
    CorruptLog,
    InvalidInput,
)
from ..journal import ConversationInfo, Deletion, Journal, ListOrder
from ..values.text import check_conversation_id, check_id, check_number

if TYPE_CHECKING:
    from ..agents.watcher import Watcher
    from ..core.commands import Behalf, Command, Expected, OnOverlap, Query
    from ..core.condensation import Condenser
    from ..core.listing import ConversationPage
    from ..core.search import SearchResults
    from ..core.working_state import PromptPolicy, Unfinished, WhileDraining
    from ..owner.actor import ConversationActor, Setup, Verify
    from ..owner.draining import Drained
    from ..owner.nodes import OtherNodes, ThisNode
    from ..owner.recovery import Look
    from .conversation import Conversation

__all__ = ["ConversationConfig", "Conversations", "Erasure"]

REFUSE_S = 1.0
"""Seconds for which a conversation refuses messages after its owner has failed too often. Few,
because in an outage of the journal every owner fails, and its conversation stays refused for this
much longer than the outage."""

SUPERVISION = Supervision(
    rules=(
        # Fenced, or owned elsewhere: only the next message starts another owner.
        (OwnershipLost, Directive.STOP),
        # A log that cannot be opened as it is would fail the next owner in the same way.
        (Refused, Directive.STOP),
    )
)
"""After any other error, the owner is started again, from the journal."""

_NOT_OPEN = (
    "conversations are not open; use `async with Conversations(...)`, or `with Blocking(...)` in "
    "code without an event loop"
)


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """The settings of one conversation; None means as for all of them."""

    agent: Agent | None = None
    system_prompt: str | None = None
    """Takes effect when the next turn starts; with the policy `pinned`, when the conversation
    begins."""
    on_overlap: OnOverlap | None = None


@dataclass(frozen=True, slots=True)
class Erasure:
    """The outcome of erasing all conversations of a user."""

    receipts: Mapping[str, Deletion]
    """The deleted conversations, by id."""
    left: Mapping[str, TurnkeeperError]
    """The errors of the conversations that could not be deleted, by id; call `erase` again."""


class _Life(Enum):
    """How far `Conversations` have come; none of these is gone back to."""

    NEW = auto()
    OPENING = auto()
    """Entered. If opening fails before there are owners, this is also the last."""
    OPEN = auto()
    CLOSING = auto()
    """No owner starts any more; also the last, once they are closed."""


class Conversations:
    """All conversations of one journal, in one event loop. Enter it before use.

        async with Conversations(support, journal=SQLiteJournal("chats.db")) as conversations:
            turn = await conversations["alice"].send("Where is my order?")
            print(await turn.reply())

    `start` and `aclose` open and close it without a block, even from different tasks. While it is
    open, any number of tasks of that event loop may use it at once.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        journal: Journal,
        runtime: Runtime | None = None,
        system_prompt: str | None = None,
        prompt_policy: PromptPolicy = "current",
        on_overlap: OnOverlap = "queue",
        queued_messages_max: int = 256,
        answer_length_max: int = ANSWER_LENGTH_MAX,
        condenser: Condenser | None = None,
        idle_s: float | None = 300.0,
        active_max: int | None = None,
        recover: Literal["on_enter", "on_message"] = "on_enter",
        recover_every_s: float = 15.0,
        recover_max: int = 256,
        unfinished: Unfinished = "end",
        configure: Callable[[str], ConversationConfig] | None = None,
        verify: Verify = "off",
        park_s: float = 30.0,
        condense_s: float = 600.0,
        limits: Limits = Limits(),
        name: str = "conversations",
        ports: Ports | None = None,
    ) -> None:
        """Check the settings; nothing is opened before entering. Raises `InvalidInput`.

        What the agent sees and says:
        `system_prompt`: the prompt with which a new conversation begins. `prompt_policy`: if a
        conversation began with another prompt, "current" shows the model this one instead from the
        next turn on; "pinned" keeps the conversation's own. `on_overlap`: the effect of a chat
        message on the turn that runs, unless `send` names another. `queued_messages_max`: how many
        chat messages may wait; then `QueueFull`. `answer_length_max`: the most characters of one
        answer; the turn of a longer one fails with `AnswerTooLong`. `condenser`: proposes which
        part of a long view to forget. `configure`: a function that is called with a conversation's
        id each time the conversation is opened, and returns its settings.

        After a crash:
        `recover`: "on_enter" opens the conversations that crashed processes left unfinished, on
        entering and from then on; "on_message" leaves each as it is until its next message, and a
        process that awaits a turn of it waits until then, too.
        `recover_every_s`: the seconds between two searches for such conversations, give or take a
        quarter, and up to four times as many after one that took more than a twentieth of that; the
        default is the same as that of `PostgresJournal(lease_s=…)`. `recover_max`: how many are
        opened at once.

        `unfinished`: "end" ends a turn that was cut off, as interrupted; "resume" continues it if
        the agent is resumable, as a `ToolAgent` is and a function under `@agent` is not, and runs a
        tool again only if it is declared idempotent.

        Resources:
        `runtime`: the runtime to run in; by default a new one, which ends with these
        conversations. `name`: the name of their region; give each a name if several `Conversations`
        share a runtime. `idle_s`: seconds after which an idle conversation is passivated (None:
        never). `active_max`: how many may be active before the one that has been idle longest is
        passivated. `limits`: the bounds on messages, tool arguments and labels, and on memory.
        `park_s`: how many seconds a result that came before its call may be parked. `condense_s`:
        how many seconds the condenser may take for a proposal; then the owner goes on without it.
        `verify`: how often, after a commit, the view is built again from the log and compared,
        which costs a read of the log. `ports`: the clocks, ids and random numbers that they use; by
        default those of `runtime`.
        """
        # Imported here, and not above: loading the events and the owner takes most of the time.
        from ..core.working_state import ConversationSettings
        from ..owner.actor import ConversationActor, Setup
        from ..owner.subscriptions import Subscriptions
        from .checks import (
            check_parts,
            check_recovery,
            check_resources,
            check_settings,
            check_waits,
            is_resumable,
        )
        from .conversation import Conversation

        settings = ConversationSettings(
            on_overlap=on_overlap,
            queued_messages_max=queued_messages_max,
            system_prompt=system_prompt,
            prompt_policy=prompt_policy,
            unfinished=unfinished,
            is_resumable=is_resumable(agent),
            answer_length_max=answer_length_max,
        )
        check_settings(settings, limits)
        check_parts(agent, journal, condenser, configure, runtime)
        check_recovery(recover, recover_every_s, recover_max)
        check_resources(name, idle_s, active_max, verify)
        check_waits(park_s, condense_s)
        self._configure = configure
        self._journal = journal
        self._given_runtime = runtime
        self._ports = ports if ports is not None else runtime.ports if runtime else Ports()
        self._recover = recover
        self._recover_every_s = recover_every_s
        self._recover_max = recover_max
        self._name = name
        self._idle_s = idle_s
        self._active_max = active_max
        self._setup = Setup(
            agent=agent,
            journal=journal,
            subscriptions=Subscriptions(journal, limits),
            condenser=condenser,
            settings=settings,
            verify=verify,
            park_s=park_s,
            condense_s=condense_s,
            limits=limits,
            ports=self._ports,
        )
        # Kept, and not imported again: an import statement costs as much as a dozen calls.
        self._handle_class = Conversation
        self._owner_class = ConversationActor
        self._looking: Ref[Look] | None = None
        self._exit_stack = AsyncExitStack()
        self._closing = anyio.Lock()
        self._life = _Life.NEW
        self._has_block = False
        """True if an `async with` block has entered them, and so closes them."""
        self._is_close_asked = False
        """Set by a close; a task that is still opening them then closes them in place of it."""
        self._region: Region[Command | Query] | None = None
        """Set while handles can be made; a close clears it first."""
        self._runtime: Runtime | None = runtime

    def __repr__(self) -> str:
        state = "open" if self.is_entered else "closed" if self._was_entered else "new"
        return f"<Conversations {self._name!r} on {type(self._journal).__name__}, {state}>"

    async def __aenter__(self) -> Self:
        await self._enter(has_block=True)
        return self

    async def start(self) -> Self:
        """Open without a block; any task may close it, with `aclose`.

        For start-up hooks, fixtures and notebooks. Prefer `async with`, which cannot be forgotten.
        """
        await self._enter(has_block=False)
        return self

    async def aclose(self) -> None:
        """Close what `start` has opened. A second call waits until the first has closed it.

        If another task is still in `start`, that `start` closes what it has opened and raises
        `ConversationsClosed`; `aclose` waits for this. Raises `RuntimeError` in another event loop
        than the one of `start`, in an agent that answers one of the conversations, and while an
        `async with` block is open, which closes them at its end; nothing is closed then. If it is
        cancelled, it closes them all the same, and waits until the owners have ended.
        """
        if self._has_block and self.is_open:
            # It may hold scopes of the task that entered it, which no other task can leave.
            raise RuntimeError(
                "the conversations were entered with `async with`, which closes them; nothing was "
                "closed; leave the block, or open them with `start`"
            )
        from turnkeeper.runtime.lowlevel import running_task  # as in `__init__`

        from ..owner.wait_graph import turn_of

        inside = turn_of.get(None)
        if (
            inside is not None
            and inside.wait_graph is self._setup.wait_graph
            and inside.task_id == id(running_task())
            and not inside.is_over
        ):
            raise RuntimeError(
                "a turn cannot close its own conversations, since the close would wait for it; "
                "nothing was closed; let another task close them, such as the one that opened them"
            )
        await self._close()

    async def _close(self) -> None:
        if self._runtime is not None:
            self._runtime.check_home()
        self._region = None
        self._is_close_asked = self._was_entered
        try:
            # `acquire` begins with a checkpoint: a cancelled task would leave here without closing
            # anything.
            self._closing.acquire_nowait()
        except anyio.WouldBlock:
            await self._closing.acquire()
        try:
            stack, self._exit_stack = self._exit_stack, AsyncExitStack()
            await stack.aclose()
        finally:
            self._closing.release()

    async def _enter(self, *, has_block: bool) -> None:
        if self._was_entered:
            raise RuntimeError(
                "Conversations can be entered once; make new Conversations for the same journal"
            )
        from ..core.snapshots import build_models  # as in `__init__`

        self._life = _Life.OPENING
        self._has_block = has_block
        # `aclose` waits until this has ended.
        self._closing.acquire_nowait()
        try:
            build_models()
            await self._open()
        except BaseException:
            self._region = None
            raise
        finally:
            self._closing.release()

    async def _open(self) -> None:
        from turnkeeper.runtime.lowlevel import to_its_end  # as in `__init__`

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._journal)
            self._setup.subscriptions.open()
            self._journal.watch_lease(self._setup.subscriptions.lease_lost)
            runtime = self._given_runtime
            if runtime is None:
                runtime = Runtime(ports=self._ports)
                if self._has_block:
                    await stack.enter_async_context(runtime)
                else:
                    await runtime.start()
                    stack.push_async_callback(runtime.aclose)
            self._runtime = runtime
            self._setup.watching.watcher.opened(runtime)
            self._region = runtime.region(
                self._name,
                self._make_owner,
                supervision=SUPERVISION,
                idle_s=self._idle_s,
                active_max=self._active_max,
                refuse_s=REFUSE_S,
            )
            # The stack runs them from the last to the first: refuse new owners, stop the owners,
            # end the readers. A cancellation does not cut that short: until the owners have ended,
            # their names are taken in a runtime that others use, too. Its limits bound the wait.
            stack.callback(self._setup.subscriptions.close)
            why = "its conversations are closing"
            stack.push_async_callback(
                to_its_end, partial(self._region.stop, why, refusal=ConversationsClosed)
            )
            stack.callback(self._begin_closing)
            if self._recover == "on_enter":
                from ..owner.recovery import Recovery, RecoveryActor

                recovery = Recovery(self._journal, self._region, at_once_max=self._recover_max)
                await recovery.open(await recovery.find())
                self._looking = runtime.spawn(
                    partial(RecoveryActor, recovery, every_s=self._recover_every_s),
                    name=f"{self._name}-recovery",
                )
                stack.push_async_callback(to_its_end, self._looking.stop)
            if self._is_close_asked:
                raise ConversationsClosed
            self._exit_stack = stack.pop_all()
            self._life = _Life.OPEN

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    def _begin_closing(self) -> None:
        self._life = _Life.CLOSING
        self._setup.subscriptions.begin_closing()

    def _make_owner(self, conversation_id: str) -> ConversationActor:
        # A handle that the caller kept still reaches the region, if the caller's runtime goes on.
        if self._life is _Life.CLOSING:
            raise ConversationsClosed(conversation_id)
        setup = self._setup
        if self._configure is not None:
            setup = _configured(setup, self._configure(conversation_id))
        return self._owner_class(conversation_id, setup)

    def __getitem__(self, conversation_id: str) -> Conversation:
        """Return a handle; the conversation begins with its first chat message."""
        return self._handle_class(conversation_id, self._open_region(), self._setup)

    def __contains__(self, conversation_id: object) -> NoReturn:
        raise TypeError(
            "`in` would not wait for the journal; use `await conversations.list(prefix=id)`, or "
            "`await conversations[id].view()`, which raises ConversationNotFound"
        )

    def __iter__(self) -> NoReturn:
        self._refuse_iteration()

    def __aiter__(self) -> NoReturn:
        self._refuse_iteration()

    def _refuse_iteration(self) -> NoReturn:
        raise TypeError(
            "iterating would read all conversations at once; use "
            "`for row in (await conversations.list()).rows`, a page at a time"
        )

    @property
    def _was_entered(self) -> bool:
        return self._life is not _Life.NEW

    def _open_region(self) -> Region[Command | Query]:
        if self._region is None and self._was_entered:
            raise ConversationsClosed
        if self._region is None:
            raise RuntimeError(_NOT_OPEN)
        return self._region

    def _open_journal(self) -> Journal:
        """Return the journal; raise `ConversationsClosed` once it is closed, or about to be."""
        if self._setup.subscriptions.is_closed:
            raise ConversationsClosed
        return self._journal

    @property
    def journal(self) -> Journal:
        """The journal, for reading and for `turnkeeper.actors.journals.transfer`."""
        return self._journal

    @property
    def runtime(self) -> Runtime:
        """The runtime that the owners run in, with its tree and its dead letters."""
        if self._runtime is None:
            raise RuntimeError(_NOT_OPEN)
        return self._runtime

    def watch(self, watcher: Watcher) -> None:
        """Report all that happens from now on to this watcher; it replaces the one before it.

        Set it before entering to see what recovery does as well. For OpenTelemetry, use
        `instrument` of `turnkeeper.actors.integrations.otel`.
        """
        self._setup.watching.begin(watcher)
        if self._runtime is not None and self._was_entered:
            watcher.opened(self._runtime)

    def join(self, nodes: OtherNodes) -> ThisNode:
        """Send commands through `nodes` from now on if another process owns their conversation.

        Transports call this; `turnkeeper.actors.gateway.Node` is the one over HTTP. Returns the
        object through which the transport passes on what other processes ask of this one.
        """
        from ..owner.nodes import ThisNode

        region, setup = self._open_region(), self._setup
        here = ThisNode(self._journal, region, setup.subscriptions)
        setup.node_link.nodes, setup.node_link.here = nodes, here
        setup.subscriptions.want_pieces = nodes.want_pieces
        return here

    def leave_nodes(self) -> None:
        """Stop forwarding commands to other processes, and asking them for pieces of answers.

        As without `join`, a command raises `OwnedElsewhere` if another process owns its
        conversation.
        """
        self._setup.node_link.nodes = self._setup.node_link.here = None
        self._setup.subscriptions.want_pieces = None

    @property
    def active(self) -> int:
        """How many conversations have their owner in this process."""
        return self._setup.subscriptions.owned_count

    @property
    def readers(self) -> int:
        """How many live readers follow conversations in this process."""
        return self._setup.subscriptions.readers_count

    async def list(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        prefix: str = "",
        owner: str | None = None,
        status: str | None = None,
        label: tuple[str, str] | None = None,
        order: ListOrder = "id",
        scan_max: int = 1_000,
    ) -> ConversationPage:
        """Return a page of the conversations in the journal, without opening them.

        `prefix`: the beginning of their ids. `owner`: the user to whom they belong. `status`: the
        agent's status, in lower case. `label`: a name and its value. `order`: by id; by creation,
        the oldest first; or by activity, the newest first. For the next page, give the same filters
        and this page's `cursor`.

        However many conversations there are, a page takes the same time if it is filtered by
        owner, or by owner and a label or a status (other than "idle" and "finished"). With other
        filters it looks at `scan_max` conversations at most; a page that stopped there has
        `is_complete` False, and its cursor continues there. Raises `InvalidInput`.
        """
        from ..core.listing import make_query, page_of

        query = make_query(
            limit=limit,
            prefix=prefix,
            owner=owner,
            status=status,
            label=label,
            order=order,
            scan_max=scan_max,
            cursor=cursor,
        )
        return page_of(await self._open_journal().page(query), query)

    async def search(
        self,
        words: str,
        *,
        limit: int = 20,
        cursor: str | None = None,
        prefix: str = "",
        owner: str | None = None,
        status: str | None = None,
        label: tuple[str, str] | None = None,
        scan_max: int = 1_000,
    ) -> SearchResults:
        """Return a page of the chat messages that have all of these words, the newest first.

        Case and accents do not matter. With a `*` at the end, the last word stands for all words
        that begin with it. `owner`: the user to whom the conversations belong. `prefix`: the
        beginning of their ids. `status`: their status by now, in lower case. `label`: a name and
        its value. For the next page, give the same arguments and this page's `cursor`.

        The journal indexes a little later than it writes; a page has everything written before its
        `complete_to`. With a status, a label, or a prefix other than a whole folder (`alice:`), a
        page looks at `scan_max` messages with the words at most. A page that stopped there, or once
        its messages had 16 MiB, has `is_complete` False, and its cursor continues there. Raises
        `InvalidInput`, and `SearchIsOff` unless the journal was opened with `search=True`.
        """
        from ..core.search import make_search_query, results_of

        query = make_search_query(
            words,
            limit=limit,
            cursor=cursor,
            prefix=prefix,
            owner=owner,
            status=status,
            label=label,
            scan_max=scan_max,
        )
        return results_of(await self._open_journal().search(query), query)

    @property
    def is_entered(self) -> bool:
        """True while handles can be made: from entering, during recovery too, until leaving."""
        return self._region is not None

    @property
    def is_open(self) -> bool:
        """True from entering to leaving; recovery on entering is over by then."""
        return self._life is _Life.OPEN

    @property
    def is_draining(self) -> bool:
        """True from the first call of `drain` on."""
        return self._setup.drain.messages is not None

    async def drain(self, grace_s: float, *, messages: WhileDraining = "queue") -> Drained:
        """Hand the conversations over to other processes, within `grace_s` seconds or so.

        From now on no turn starts here. A chat message is durably queued for the next owner, or
        refused with `Draining`, as `messages` says. Conversations without a running turn are
        released first. With `unfinished="resume"`, the turn of a resumable agent stops before its
        next step, and continues in the next process. Other turns may go on until the grace period
        ends. Those that still run then are interrupted, and the text said so far is kept; with
        `unfinished="resume"`, a resumable agent is cancelled instead, nothing is written, and the
        next owner asks the model again. During the grace period, confirmations, interrupts and
        reads work as always. After it, every message is refused with `Draining`, and readers end.

        A drain cannot be undone: leave the block, and open the journal again. A second call can
        only shorten the grace period. Cancelling it leaves the conversations draining; call it
        again.
        """
        from ..owner.draining import check_drain, hand_over

        region = self._open_region()
        self.runtime.check_home()
        check_drain(grace_s, messages)
        drain = self._setup.drain
        drain.begin(messages, until=self._ports.loop_time() + grace_s)
        if self._looking is not None:
            await self._looking.stop()
        return await hand_over(region, self._setup.subscriptions, drain, self._ports)

    async def delete(
        self,
        conversation_id: str,
        *,
        owner: str | None = None,
        seq: int | None = None,
        event_id: str | None = None,
        at_us: int | None = None,
        behalf: Behalf | None = None,
    ) -> Deletion:
        """Delete a conversation, its log and all that is kept beside it.

        `owner`: the user to whom it must belong, else `NotYours`. `seq` and `event_id`: its
        log must have this event at this seq, else `NotThisLog`; so a call that is made again never
        deletes a conversation that was begun meanwhile. `at_us` and `behalf`: as in
        `Conversation.expecting`.

        A turn that runs is cut off; readers, and callers that await a turn, get
        `ConversationDeleted`. A chat message that is sent meanwhile is either in the log that is
        deleted, or begins a new conversation. The part of the log that forks need stays, and the
        returned `Deletion` says so. Raises `ConversationNotFound` and `OwnedElsewhere`. After
        `OutcomeUnknown` or a cancellation, delete it again; `ConversationNotFound` then means that
        it is gone.
        """
        from ..core.commands import Expected

        expected = Expected(owner, seq=seq, event_id=event_id, at_us=at_us, behalf=behalf)
        deletion = await self._delete(conversation_id, expected=expected)
        assert deletion is not None, "a deletion without a condition"
        return deletion

    async def expire(self, *, before: float) -> Sequence[str]:
        """Delete the conversations last written before this time (seconds since 1970, UTC).

        Conversations that another process owns, or that are written to meanwhile, stay. Returns the
        ids of the deleted ones. If it raises or is cancelled, some may have been deleted; call it
        again for the rest. Raises `CorruptLog` if one is damaged, after the others were deleted;
        if several are, `others` of the error has the ids of all but the first.
        """
        check_number("before", before, "seconds since 1970")
        deleted: list[str] = []
        damaged: dict[str, CorruptLog] = {}
        for info in await self._open_journal().list():
            if info.updated_at < before:
                try:
                    if await self._delete(info.conversation_id, listed=info) is not None:
                        deleted.append(info.conversation_id)
                except (OwnershipLost, ConversationNotFound):
                    pass
                except CorruptLog as error:
                    damaged[info.conversation_id] = error  # those behind it expire all the same
        if damaged:
            first, *others = damaged
            found = damaged[first]
            raise CorruptLog(first, found.seq, found.found, others=others) from found
        return deleted

    async def erase(self, owner: str, *, behalf: Behalf | None = None) -> Erasure:
        """Delete all conversations of a user; return which were deleted, and which were not.

        `behalf`: the principal for whom they are deleted, as in `Conversation.expecting`.

        A fork is deleted before the conversation it was forked from, so that no part of a log is
        kept for it. If one cannot be deleted, the others still are: `Erasure.left` has its error.
        Call it again for those, and after a cancellation. Conversations that the user begins
        meanwhile may stay.
        """
        check_id("owner", owner)
        receipts: dict[str, Deletion] = {}
        left: dict[str, TurnkeeperError] = {}
        for conversation_id in await self._newest_first(owner):
            try:
                receipts[conversation_id] = await self.delete(
                    conversation_id, owner=owner, behalf=behalf
                )
            except ConversationNotFound:
                pass  # deleted meanwhile, or given to another user
            except TurnkeeperError as error:
                left[conversation_id] = error
        return Erasure(receipts, left)

    async def _newest_first(self, owner: str) -> Sequence[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = await self.list(owner=owner, order="created", limit=1_000, cursor=cursor)
            found += [row.conversation_id for row in page.rows]
            cursor = page.cursor
            if cursor is None:
                return found[::-1]

    async def _delete(
        self,
        conversation_id: str,
        *,
        listed: ConversationInfo | None = None,
        expected: Expected | None = None,
    ) -> Deletion | None:
        """Delete a conversation; with `listed`, only if its log has not changed since."""
        from ..core.commands import Delete
        from ..owner.nodes import ask_owner

        check_conversation_id(conversation_id)
        region = self._open_region()
        await self._journal.info(conversation_id)  # raises if there is none: ask() would make one
        ref = region[conversation_id]
        command = Delete(listed, expected=expected)
        if listed is not None:
            return await ref.ask(command)  # not forwarded: each process expires those it owns
        return await ask_owner(ref, conversation_id, command, self._setup.node_link)


def _configured(setup: Setup, config: ConversationConfig) -> Setup:
    from ..core.commands import check_overlap
    from .checks import check_agent, check_system_prompt, is_resumable

    if not isinstance(config, ConversationConfig):
        raise InvalidInput(f"configure must return a ConversationConfig, and returned {config!r}")
    settings = setup.settings
    check_system_prompt(config.system_prompt)
    agent = setup.agent if config.agent is None else config.agent
    if config.agent is not None:
        check_agent(agent)
        settings = replace(settings, is_resumable=is_resumable(agent))
    if config.system_prompt is not None:
        settings = replace(settings, system_prompt=config.system_prompt)
    if config.on_overlap is not None:
        check_overlap(config.on_overlap)
        settings = replace(settings, on_overlap=config.on_overlap)
    return replace(setup, agent=agent, settings=settings)
