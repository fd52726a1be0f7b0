"""Faults planted in the production code, one at a time, and how they are put in.

A fault is a line of the real source, replaced. When the line is no longer there the test fails, so
that the faults stay as real as the code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from turnkeeper.actors import (
    _conversation,
    _memory_journal,
    _subscriptions,
    _turn_rules,
    agents,
    condensers,
    turns,
)
from turnkeeper.actors._conversation import ConversationActor
from turnkeeper.actors._memory_journal import MemoryJournal
from turnkeeper.actors._subscriptions import EventReader, Subscriptions
from turnkeeper.actors.conversations import Conversation, Turn
from turnkeeper.actors.simulation import SimulatedJournal

__all__ = ["MUTANTS", "Mutant", "planted"]


class Mutant(NamedTuple):
    """One fault."""

    name: str
    where: object
    """The module or the class that has the function."""
    function: str
    line: str
    becomes: str
    seeds_max: int = 60
    """Within how many seeds it has to be seen."""


_COMMIT = """\
        decided = self._decide(batch)
        try:
            await self._commit(decided)
        except Exception as error:
            # Parked results that this batch let out are among the decided, and in no mailbox.
            for one in decided:
                if one.taken.delivery is not None:
                    one.taken.delivery.fail(error)
            raise
        self._publish(decided)
"""

MUTANTS = [
    Mutant(
        "an answer goes out before the commit",
        ConversationActor,
        "_run",
        "    try:\n        await self._commit(decided)",
        "    self._publish(decided)\n    try:\n        await self._commit(decided)",
    ),
    Mutant(
        "an effect starts before the commit",
        ConversationActor,
        "_run",
        "    try:\n        await self._commit(decided)",
        "    self._show_state()\n    self._start_effects(decided)\n    try:\n"
        "        await self._commit(decided)",
    ),
    Mutant(
        "an owner whose commit failed goes on with its working state",
        ConversationActor,
        "_run",
        "one.taken.delivery.fail(error)\n        raise",
        "one.taken.delivery.fail(error)\n        return",
    ),
    Mutant(
        "a resent chat message is taken for a new one",
        _turn_rules,
        "_send",
        "known = turns.find(command.message_id) or stamp.known_message",
        "known = None",
    ),
    Mutant(
        "a chat message beyond memory is not looked up",
        ConversationActor,
        "_look_up_message",
        "if not turns.may_have_forgotten(message_id):",
        "if True:",
    ),
    Mutant(
        "what is known is not taken before the batch is decided",
        ConversationActor,
        "_look_up_message",
        "return known",
        "return None",
        600,
    ),
    Mutant(
        "a recovered turn leaves its calls open",
        _turn_rules,
        "_close",
        "for tool_call_id, action in owner.state.admission.open_calls.items():",
        "for tool_call_id, action in ():",
    ),
    Mutant(
        "a call that had started is said not to have happened",
        _turn_rules,
        "_close",
        "may_have_happened=True,",
        "may_have_happened=False,",
    ),
    Mutant(
        "an unfinished turn is not ended by the next owner",
        _turn_rules,
        "_recover",
        "if turns.waits_for is not None:",
        "if True:",
    ),
    Mutant(
        "what waits is forgotten when a turn ends",
        _turn_rules,
        "_then_next_queued",
        "waiting = next(iter(owner.state.turns.queued.values()), None)",
        "waiting = None",
    ),
    Mutant(
        "the newest of what waits goes first",
        _turn_rules,
        "_then_next_queued",
        "next(iter(owner.state.turns.queued.values()), None)",
        "next(reversed(owner.state.turns.queued.values()), None)",
    ),
    Mutant(
        "what an ended turn still says lands in the next one",
        _turn_rules,
        "check_running",
        "if running is None or running.turn_id != turn_id or epoch != owner.epoch:",
        "if running is None:",
    ),
    Mutant(
        "the queue has no limit",
        _turn_rules,
        "_queue",
        "if len(turns.queued) >= owner.policy.queued_messages_max:",
        "if False:",
    ),
    Mutant(
        "a message that was refused is kept all the same",
        _turn_rules,
        "_send",
        "raise TurnInProgress(owner.conversation_id, running.turn_id)",
        "owner.state.turns._queued.clear(); "
        "raise TurnInProgress(owner.conversation_id, running.turn_id)",
    ),
    Mutant(
        "an epoch is no higher than the last one",
        MemoryJournal,
        "claim",
        "log.epoch += 1",
        "log.epoch = max(1, log.epoch)",
    ),
    Mutant(
        "an older epoch may write, and anywhere",
        _memory_journal,
        "check_append",
        "if epoch != found_epoch or not epoch:",
        "expected_seq = head + 1\n    if not epoch:",
    ),
    Mutant(
        "the head is read before the epoch is claimed",
        ConversationActor,
        "on_start",
        "claim = await journal.claim(self._conversation_id)",
        "head = (await journal.info(self._conversation_id)).head\n"
        "    claim = await journal.claim(self._conversation_id)\n"
        "    claim = type(claim)(claim.epoch, head)",
    ),
    Mutant(
        "a tool starts under a lease that has run out",
        agents.TurnContext,
        "_run_call",
        "self._side.check_lease()",
        "pass",
        400,
    ),
    Mutant(
        "a lease that was renewed brings back what was lost under it",
        ConversationActor,
        "_check_lease",
        "since=self._claimed_at",
        "since=None",
        400,
    ),
    Mutant(
        "a tool starts before its call is written down",
        agents.TurnContext,
        "propose_calls",
        "await self._append(*events)",
        "await self._side.ref.tell(TurnAppend(self.turn_id, self._epoch, tuple(events)))",
    ),
    Mutant(
        "what was said before an answer began anew is kept with it",
        _turn_rules,
        "_turn_append",
        "is_answer_over=says,",
        "is_answer_over=False,",
    ),
    Mutant(
        "an interrupted answer is kept from its end",
        _turn_rules,
        "_close",
        'said = storable("".join(owner.streamed))',
        'said = storable("".join(owner.streamed[1:]))',
    ),
    Mutant(
        "a subscriber is given what it has had",
        EventReader,
        "next_item",
        "elif offered.seq == self._cursor + 1:",
        "elif True:",
    ),
    Mutant(
        "a subscriber that was too slow is not sent to the journal",
        EventReader,
        "_bound_offered",
        "self._is_behind = True",
        "pass",
        200,
    ),
    Mutant(
        "readers do not hear of a new owner",
        Subscriptions,
        "owner_began",
        "reader.look()",
        "pass",
        400,
    ),
    Mutant(
        "who waits for a turn does not see to its owner",
        EventReader,
        "next_item",
        "elif self._has_owner_ended and self._on_owner_ended is not None:",
        "elif False:",
    ),
    Mutant(
        "any proposal of a condenser is carried out",
        condensers,
        "check_proposal",
        "if cut not in now.manipulation_indices:",
        "if False:",
        400,
    ),
    Mutant(
        "a turn that was withdrawn gets its turn",
        turns.TurnTable,
        "fold",
        "case MessageWithdrawnEvent():\n            self._queued.pop(event.message_id, None)",
        "case MessageWithdrawnEvent():\n            pass",
        200,
    ),
    Mutant(
        "the sender is told of another turn's end",
        Turn,
        "_find_end",
        "watch = _TurnWatch(self.message_id, self.turn_id)",
        "watch = _TurnWatch('another', self.turn_id[:-1])",
        100,
    ),
    Mutant(
        "a fork runs what the other conversation runs",
        _turn_rules,
        "decide_fork",
        "if running is None:",
        "if True:",
    ),
    Mutant(
        "what waits in the other conversation waits in the fork, too",
        turns.TurnTable,
        "fold",
        "self._queued.clear()",
        "pass",
        400,
    ),
]

_ = (Conversation, SimulatedJournal, _conversation, _subscriptions, _COMMIT)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The production code with this fault in it."""
    original = inspect.getattr_static(mutant.where, mutant.function)
    setattr(mutant.where, mutant.function, _mutated(original, mutant))
    try:
        yield
    finally:
        setattr(mutant.where, mutant.function, original)


def _mutated(function: Callable[..., Any], mutant: Mutant) -> Callable[..., Any]:
    """The function with the fault, among the globals of its own module."""
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.line in source, f"{function.__qualname__} no longer has {mutant.line!r}"
    module = sys.modules[function.__module__]
    namespace: dict[str, Any] = dict(vars(module))
    code = "from __future__ import annotations\n" + source.replace(mutant.line, mutant.becomes)
    exec(compile(code, f"<{function.__qualname__} with a fault>", "exec"), namespace)
    made = namespace[function.__name__]
    mutated = types.FunctionType(
        made.__code__, vars(module), made.__name__, made.__defaults__, made.__closure__
    )
    mutated.__kwdefaults__ = made.__kwdefaults__
    return mutated
