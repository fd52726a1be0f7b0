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
    _memory_journal,
    _turn_rules,
    agents,
    conversations,
    turns,
)
from turnkeeper.actors._conversation import ConversationActor
from turnkeeper.actors._memory_journal import MemoryJournal
from turnkeeper.actors._subscriptions import EventReader, Subscriptions
from turnkeeper.actors.simulation import Options

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
    options: Options | None = None
    """The runs to see it in, where drawn ones would seldom be hard on just this."""


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
        200,
    ),
    Mutant(
        "the queue has no limit",
        _turn_rules,
        "_queue",
        "if len(turns.queued) >= owner.policy.queued_messages_max:",
        "if False:",
        60,
        Options.crowded(),
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
        "a tool starts under a lease that has run out",
        agents.TurnContext,
        "check_lease",
        "self._side.check_lease()",
        "pass",
        120,
        Options.standing_still(),
    ),
    Mutant(
        "a lease that was renewed brings back what was lost under it",
        ConversationActor,
        "_check_lease",
        "since=self._claimed_at",
        "since=None",
        120,
        Options.standing_still(),
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
        200,
    ),
    Mutant(
        "the last event of a batch is not offered to subscribers",
        EventReader,
        "offer",
        "self._offered.extend(events)",
        "self._offered.extend(events[:-1])",
        # Where no owner is ever passivated, a reader has no second way to hear of it.
        options=Options(nodes=1, idle_s=None),
    ),
    Mutant(
        "a reader waits here for what is written elsewhere",
        Subscriptions,
        "is_owned",
        "return conversation_id in self._owned",
        "return True",
        400,
    ),
    Mutant(
        "a turn that was withdrawn gets its turn",
        turns.TurnTable,
        "fold",
        "case MessageWithdrawnEvent():\n            self._queued.pop(event.message_id, None)",
        "case MessageWithdrawnEvent():\n            pass",
        400,
    ),
    Mutant(
        "calls run without the confirmation that they wait for",
        agents.TurnContext,
        "propose_calls",
        "raise self._held()",
        "return actions",
    ),
    Mutant(
        "a rollback leaves what it rolls back in the view",
        _turn_rules,
        "_roll_back",
        "(*in_view, *(event.id for event in closing))",
        "(in_view[0],)",
    ),
    Mutant(
        "what had joined a turn is lost when that is rolled back",
        _turn_rules,
        "_roll_back",
        "for message in running.messages[1:]",
        "for message in ()",
        400,
    ),
    Mutant(
        "a fork runs what the other conversation runs",
        conversations,
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
