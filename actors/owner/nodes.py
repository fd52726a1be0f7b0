"""Commands and pieces of answers between the processes that share a journal.

Every process accepts commands to every conversation. If another living process owns the
conversation, the command is forwarded to the address in that process's lease, and is not forwarded
again from there. The owner is looked up in the journal each time, and never remembered. Every
process reads events from the journal; only the pieces of answers come from the owner's process.

A transport implements `OtherNodes` and calls a `ThisNode`; `turnkeeper.actors.gateway.Node` does so
over HTTP. Without a transport, a command that would be forwarded raises `OwnedElsewhere`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from turnkeeper.runtime import OwnershipLost, Ref, Region, TurnkeeperError

from ..core.commands import Command, FromOutside, Query
from ..core.status import AgentExecutionStatus
from ..errors import ConversationNotFound, ConversationsClosed, Draining, OwnedElsewhere
from ..events import TextDelta
from ..journal import Journal, ListQuery, ListRow
from .event_reader import EventReader
from .live_answer import ends_answer
from .subscriptions import Subscriptions

__all__ = [
    "NodeLink",
    "NotReached",
    "NotRead",
    "OtherNodes",
    "Passed",
    "ThisNode",
    "ask_owner",
    "find_row",
]

R = TypeVar("R")

_WITHOUT_A_STEP = frozenset(
    status.lower()
    for status in (
        AgentExecutionStatus.IDLE,
        AgentExecutionStatus.FINISHED,
        AgentExecutionStatus.ERROR,
        AgentExecutionStatus.WAITING_FOR_CONFIRMATION,
    )
)
FORWARDED_MAX = 2
"""How many owners one call asks at most. It asks another one only if the one before has lost the
conversation."""


class NotReached(Exception):
    """The other process did not take the command; nothing happened there."""


class NotRead(NotReached):
    """The other process cannot read the command, which only a newer version has."""


class OtherNodes(Protocol):
    """The way to the other processes of the journal."""

    async def ask(self, address: str, conversation_id: str, command: FromOutside[R]) -> R:
        """Have the process at this address carry a command out, and return its reply.

        Raises the error that the command raised there, `NotReached`, and `OutcomeUnknown` if the
        answer did not come.
        """
        ...

    def want_pieces(self, conversation_id: str) -> None:
        """Note that a reader here waits for pieces of a conversation that is not owned here."""
        ...


@dataclass(slots=True)
class NodeLink:
    """The link of a `Conversations` to the other nodes; empty until `Conversations.join`."""

    nodes: OtherNodes | None = None
    here: ThisNode | None = None
    """The other direction: set if and only if `nodes` is."""


def ask_owner(
    ref: Ref[Command | Query], conversation_id: str, command: FromOutside[R], node_link: NodeLink
) -> Awaitable[R]:
    """Ask the owner of a conversation, here or in another process.

    The command is forwarded by this process only, never by the one that it is forwarded to. Raises
    `OwnedElsewhere` if the owner's process cannot be reached, and the last owner's error if
    `FORWARDED_MAX` owners in a row had lost the conversation.
    """
    if node_link.nodes is None or node_link.here is None:
        return ref.ask(command)
    return _ask_any(ref, conversation_id, command, node_link.nodes, node_link.here)


async def _ask_any(
    ref: Ref[Command | Query],
    conversation_id: str,
    command: FromOutside[R],
    nodes: OtherNodes,
    here: ThisNode,
) -> R:
    lost: Exception | None = None
    for _ in range(FORWARDED_MAX):
        try:
            await here.check_owner(conversation_id)
            return await ref.ask(command)
        except OwnedElsewhere as elsewhere:
            try:
                return await nodes.ask(elsewhere.owner, conversation_id, command)
            except NotRead as error:
                raise OwnedElsewhere(elsewhere.owned, elsewhere.owner, is_older=True) from error
            except NotReached as error:
                # The owner's process is dead or cut off, and no other one can own the conversation
                # while its lease lasts.
                raise elsewhere from error
            except (OwnershipLost, Draining, ConversationsClosed) as error:
                lost = error  # that process has given the conversation up; nothing was written
        except OwnershipLost as error:
            lost = error  # the owner here has lost the conversation, and only now found out
    assert lost is not None, "a round that neither returned nor lost the owner"
    raise lost


async def find_row(journal: Journal, conversation_id: str) -> ListRow | None:
    """Return the conversation's row in the list; None if the conversation does not exist."""
    page = await journal.page(ListQuery(1, prefix=conversation_id))
    return next((row for row in page.rows if row.conversation_id == conversation_id), None)


class Whereabouts(NamedTuple):
    """The place of a conversation's owner, as this process reads it in the journal."""

    owner: str | None
    """The address of the other living process that owns it; None if there is none."""
    is_idle: bool
    """True if no step of a turn runs: an event will come before the next piece."""


class Passed(NamedTuple):
    """The place of an event between pieces: the pieces that follow come after this seq."""

    seq: int
    turn_id: str | None = None
    """The turn, if this event carries its answer or ends it: no more pieces of that answer come."""


class PiecesHere(AsyncIterator[Passed | TextDelta]):
    """The pieces of one conversation's answers, with their places in the log.

    The first item is the end of the log. The iteration ends when the live readers of this process
    end. Cancelling its wait loses nothing.
    """

    def __init__(self, reader: EventReader, head: int) -> None:
        self._reader = reader
        self._head: int | None = head

    async def __anext__(self) -> Passed | TextDelta:
        if self._head is not None:
            head, self._head = self._head, None
            return Passed(head)
        item = await self._reader.next_item()
        if isinstance(item, TextDelta):
            return item
        return Passed(item.seq, item.event.turn_id if ends_answer(item) else None)


class ThisNode:
    """Carries out commands of other processes, and exchanges pieces with them; forwards nothing."""

    def __init__(
        self, journal: Journal, region: Region[Command | Query], subscriptions: Subscriptions
    ) -> None:
        self._journal = journal
        self._region = region
        self._subscriptions = subscriptions

    async def ask(self, conversation_id: str, command: FromOutside[R]) -> R:
        """Carry a command out here. Raises `OwnedElsewhere` if this process is not the owner."""
        return await self._region[conversation_id].ask(command)

    async def pieces(self, conversation_id: str) -> PiecesHere:
        """Return the pieces of answers that are written here from now on."""
        try:
            head = (await self._journal.info(conversation_id)).head
        except ConversationNotFound:
            head = 0
        reader = self._subscriptions.read(
            conversation_id, after=head, live=True, pieces=True, is_for_other_node=True
        )
        return PiecesHere(reader, head)

    async def check_owner(self, conversation_id: str) -> None:
        """Raise `OwnedElsewhere` if another living process owns the conversation.

        It reads one row, which costs a fraction of a refused claim. If the read fails or finds no
        owner, nothing is raised: the claim that follows will tell.
        """
        if self._subscriptions.is_owned(conversation_id):
            return
        try:
            address = await self.owner_of(conversation_id)
        except TurnkeeperError:
            return
        if address is not None:
            raise OwnedElsewhere(f"conversation {conversation_id}", address)

    # --- of pieces that come from another process -------------------------------------------------

    async def owner_of(self, conversation_id: str) -> str | None:
        """Return the address of the other living process that owns it; None if there is none.

        It reads one row.
        """
        return (await self.whereabouts_of(conversation_id)).owner

    async def whereabouts_of(self, conversation_id: str) -> Whereabouts:
        """Return where its owner is, and whether it runs a step. It reads one row."""
        row = await find_row(self._journal, conversation_id)
        if row is None:
            return Whereabouts(None, is_idle=True)
        is_idle = not row.is_stale and row.listing.status in _WITHOUT_A_STEP
        return Whereabouts(row.address if row.owned == "elsewhere" else None, is_idle)

    async def has_moved(self, conversation_id: str, address: str) -> bool:
        """Return True if the conversation exists and this address's process does not own it."""
        row = await find_row(self._journal, conversation_id)
        return row is not None and (row.owned != "elsewhere" or row.address != address)

    def is_owner(self, conversation_id: str) -> bool:
        """Return True if an owner is active here."""
        return self._subscriptions.is_owned(conversation_id)

    def wants_pieces(self, conversation_id: str) -> bool:
        """Return True if readers here wait for pieces that are not written here."""
        return self._subscriptions.wants_pieces(conversation_id)

    def take_piece(self, conversation_id: str, piece: TextDelta, after: int) -> None:
        """Show readers here a piece that follows the event at seq `after`."""
        self._subscriptions.relay_piece(conversation_id, piece, after)

    def take_passed(self, conversation_id: str, passed: Passed) -> None:
        """Note that the owner has written an event."""
        self._subscriptions.relay_passed(conversation_id, passed.seq, passed.turn_id)

    def note_heard(self, conversation_id: str, *, is_heard: bool) -> None:
        """Note whether the owner's process can be heard; if not, readers here get events alone."""
        self._subscriptions.note_heard(conversation_id, is_heard=is_heard)

    def drop_pieces(self, conversation_id: str) -> None:
        """Forget the pieces that came from another process, which cannot be heard any more."""
        self._subscriptions.drop_relayed(conversation_id)
