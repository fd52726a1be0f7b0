"""Faults planted in the production code, one at a time, and how they are put in.

A fault is a line of the real source, replaced. When the line is no longer there the test fails, so
that the faults stay as real as the code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from turnkeeper.actors.agents.tool_agent import _Run
from turnkeeper.actors.agents.turn_context import TurnContext
from turnkeeper.actors.conversations import conversation
from turnkeeper.actors.core import decide, turn_rules
from turnkeeper.actors.core.parking import Parking
from turnkeeper.actors.core.properties import _Groups
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.turn_table import TurnTable
from turnkeeper.actors.core.view import View, ViewFold
from turnkeeper.actors.core.working_state import PartialAnswer, WorkingState
from turnkeeper.actors.journals import memory
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.actors.journals.sqlite import state as state_shell
from turnkeeper.actors.models import base as models_base
from turnkeeper.actors.owner import draining, loading, look_ups
from turnkeeper.actors.owner.actor import ConversationActor
from turnkeeper.actors.owner.condensing import Condensing
from turnkeeper.actors.owner.event_reader import EventReader
from turnkeeper.actors.owner.live_answer import PieceCursor
from turnkeeper.actors.owner.log_cursor import LogCursor
from turnkeeper.actors.owner.recovery import Recovery
from turnkeeper.actors.owner.subscriptions import Subscriptions
from turnkeeper.actors.owner.wait_graph import WaitGraph
from turnkeeper.actors.simulation import Options
from turnkeeper.runtime import _slice
from turnkeeper.runtime._cell import Cell
from turnkeeper.runtime._incarnation import Incarnation
from turnkeeper.runtime._mailbox import Mailbox

__all__ = ["MUTANTS", "PROMISES", "Mutant", "planted"]


class Mutant(NamedTuple):
    """One fault."""

    name: str
    where: object
    """The module or the class that has the function."""
    function: str
    line: str
    becomes: str
    options: Options | None = None
    """The runs to see it in, where drawn ones would seldom be hard on just this."""
    test: str = ""
    """The test that finds it, if the simulated world cannot see it, or hardly: `FILE::NAME`."""


_REPLACED = Options(
    nodes=2,
    clients=2,
    messages=4,
    agent="tool",
    extras=("follow", "pause", "view"),
    subscribers=2,
    drains=True,
    has_prompts=True,
)
"""Runs in which nodes are drained and replaced by others with another system prompt."""

_CONDENSED = Options(
    clients=2, messages=4, agent="tool", condenser="careless", misbehaves=True, overlaps=("queue",)
)
"""Runs in which condensers are late, and models refuse their histories for length."""

MUTANTS = [
    Mutant(
        "an answer goes out before the commit",
        ConversationActor,
        "_run",
        "        del batch, taken, decided",
        "        del batch, taken, decided\n        self._publish(shown, 0)\n"
        "        self._answer(deliveries, answers)",
    ),
    Mutant(
        "an effect starts before the commit",
        ConversationActor,
        "_run",
        "        del batch, taken, decided",
        # The agent of a turn runs only if the owner shows the turn. Its effects start once.
        "        seq = self._seq\n        self._show_state()\n        self._seq = seq\n"
        "        self._start_effects(effects, has_written=False)\n        effects = ()",
    ),
    Mutant(
        "an owner whose commit failed goes on with its working state",
        ConversationActor,
        "_run",
        "self._raise_if_refused(failure)\n            if failure is not error:\n"
        "                raise failure from error\n            raise",
        "self._raise_if_refused(failure)",
    ),
    Mutant(
        "a resent chat message is taken for a new one",
        turn_rules,
        "_find_known",
        "known = working.state.turns.find(command.message_id) or stamp.known_message",
        "known = None",
    ),
    Mutant(
        "a chat message beyond memory is not looked up",
        look_ups,
        "_find_message",
        "if not turns.may_have_forgotten(message_id):",
        "if True:",
    ),
    Mutant(
        "a recovered turn leaves its calls open",
        turn_rules,
        "_close",
        "for tool_call_id, action in working.state.admission.open_calls.items():",
        "for tool_call_id, action in ():",
    ),
    Mutant(
        "a call that had started is said not to have happened",
        turn_rules,
        "_close",
        "may_have_happened=True,",
        "may_have_happened=False,",
    ),
    Mutant(
        "an unfinished turn is not ended by the next owner",
        turn_rules,
        "_recover",
        "if turns.waits_for is not None:",
        "if True:",
    ),
    Mutant(
        "what waits is forgotten when a turn ends",
        turn_rules,
        "_then_next_queued",
        "waiting = next(iter(draft.working.state.turns.queued.values()), None)",
        "waiting = None",
    ),
    Mutant(
        "the newest of what waits goes first",
        turn_rules,
        "_then_next_queued",
        "next(iter(draft.working.state.turns.queued.values()), None)",
        "next(reversed(draft.working.state.turns.queued.values()), None)",
    ),
    Mutant(
        "what an ended turn still says lands in the next one",
        turn_rules,
        "check_running",
        "if running is None or running.turn_id != turn_id or epoch != working.epoch:",
        "if running is None:",
    ),
    Mutant(
        "the queue has no limit",
        turn_rules,
        "_queue",
        "len(turns.queued) + again >= working.settings.queued_messages_max",
        "False",
        options=Options.crowded(),
    ),
    Mutant(
        "a message that was refused is kept all the same",
        turn_rules,
        "_send",
        "raise TurnInProgress(working.conversation_id, running.turn_id)",
        "working.state.turns._queued.clear(); "
        "raise TurnInProgress(working.conversation_id, running.turn_id)",
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
        memory,
        "check_append",
        "if epoch != found_epoch or not epoch:",
        "expected_seq = head + 1\n    if not epoch:",
    ),
    Mutant(
        "a tool starts under a lease that has run out",
        TurnContext,
        "check_lease",
        "self._owner.check_lease()",
        "pass",
        options=Options.standing_still(),
    ),
    Mutant(
        "a lease that was renewed brings back what was lost under it",
        ConversationActor,
        "check_lease",
        "since=self._claimed_at",
        "since=None",
        options=Options.standing_still(),
    ),
    Mutant(
        "a tool starts before its call is written down",
        TurnContext,
        "propose_calls",
        "await self._append(*events)",
        "await self._owner.ref.tell(TurnAppend(self.turn_id, self._epoch, tuple(events)))",
    ),
    Mutant(
        "what was said before an answer began anew is kept with it",
        turn_rules,
        "_turn_append",
        "is_answer_over=says,",
        "is_answer_over=False,",
    ),
    Mutant(
        "an interrupted answer is kept from its end",
        turn_rules,
        "_close",
        "said = working.partial_answer.text",
        "said = working.partial_answer.text[1:]",
    ),
    Mutant(
        "the last event of a batch is not offered to subscribers",
        EventReader,
        "offer",
        "offered.extend(events)",
        "offered.extend(events[:-1])",
        # Where no owner is ever passivated, a reader has no second way to hear of it.
        options=Options(nodes=1, idle_s=None),
    ),
    Mutant(
        "a reader waits here for what is written elsewhere",
        EventReader,
        "_wait",
        "if self._conversation_id not in self._owned:",
        "if False:",
    ),
    Mutant(
        "a turn that was withdrawn gets its turn",
        TurnTable,
        "fold",
        "isinstance(event, MessageWithdrawnEvent), event.kind\n"
        "            self._queued.pop(event.message_id, None)",
        "isinstance(event, MessageWithdrawnEvent), event.kind",
    ),
    Mutant(
        "calls run without the confirmation that they wait for",
        TurnContext,
        "propose_calls",
        "raise self._held()",
        "return actions",
    ),
    Mutant(
        "a rollback leaves what it rolls back in the view",
        turn_rules,
        "_take_out",
        "(*event_ids, *closing)",
        "(event_ids[0],)",
    ),
    Mutant(
        "what had joined a turn is lost when that is rolled back",
        turn_rules,
        "_queue_again",
        "for message in running.messages[1:]",
        "for message in ()",
        options=Options.steered(),
    ),
    Mutant(
        "a fork runs what the other conversation runs",
        conversation,
        "decide_fork",
        "if running is not None:",
        "if False:",
    ),
    Mutant(
        "what waits in the other conversation waits in the fork, too",
        TurnTable,
        "fold",
        "self._queued.clear()",
        "pass",
    ),
]

PROMISES = [
    # Faults against a promise, wherever the code that keeps it sits.
    Mutant(
        "an abandoned ask is handled by an actor that takes batches",
        _slice,
        "run_batch",
        "if not item.is_done:",
        "if True:",
        test="tests/runtime/test_batches.py::test_a_batch_holds_no_ask_whose_asker_has_left",
    ),
    Mutant(
        "an actor is passivated while its effects run",
        Incarnation,
        "is_quiet",
        "self.effects or self.deferred",
        "self.deferred",
    ),
    Mutant(
        "control mail comes last in an actor that takes batches",
        _slice,
        "run_batch",
        "if cell.control:",
        "if cell.control and not mail:",
        test="tests/runtime/test_batches.py::test_a_batch_begins_with_its_control_messages",
    ),
    Mutant(
        "an event behind a gap is given to a subscriber",
        EventReader,
        "next_item",
        "if logged.seq != log.seq + 1:",
        "if logged.seq not in (log.seq + 1, log.seq + 2):",
        test="tests/actors/owner/test_hints.py::"
        "test_an_event_behind_a_gap_is_not_given_before_those_in_the_gap",
    ),
    Mutant(
        "a page whose reading was cancelled is taken for read",
        LogCursor,
        "read_page",
        "except BaseException:\n        self.note(Signal.LOOK)",
        "except BaseException:\n        pass",
    ),
    Mutant(
        "an owner begins without sending its readers to the journal",
        Subscriptions,
        "owner_began",
        "reader.owner_began(newest)",
        "pass",
        test="tests/actors/owner/test_hints.py::"
        "test_a_reader_looks_at_the_journal_when_an_owner_begins",
    ),
    Mutant(
        "a deletion is told before it is durable",
        ConversationActor,
        "_delete",
        "        deletion = await journal.delete",
        "        self._setup.subscriptions.deleted(self._conversation_id)\n"
        "        deletion = await journal.delete",
        test="tests/actors/conversations/test_deletion.py::"
        "test_no_caller_is_told_of_a_deletion_before_it_is_durable",
    ),
    Mutant(
        "the lease is counted from after the claim",
        ConversationActor,
        "_open",
        "claim = await journal.claim(self._conversation_id)",
        "claim = await journal.claim(self._conversation_id)\n"
        "    self._claimed_at = self._setup.ports.monotonic()",
        test="tests/actors/owner/test_lapsed_leases.py::"
        "test_a_lease_that_was_lost_during_the_claim_is_no_lease_for_what_was_claimed",
    ),
    Mutant(
        "a load keeps a call whose result was retracted",
        ViewFold,
        "_retract",
        "self._watch(event.retracted_event_ids, None)",
        "pass",
        test="tests/actors/core/test_view.py::"
        "test_a_load_does_not_keep_a_call_whose_result_was_retracted",
    ),
    Mutant(
        "a load does not look at where a summary was put",
        ViewFold,
        "_condense",
        "self._watch(event.forgotten_event_ids, offset)",
        "self._watch(event.forgotten_event_ids, None)",
        test="tests/actors/core/test_view.py::"
        "test_a_summary_in_the_middle_of_a_tool_loop_does_not_make_two_of_it",
    ),
    Mutant(
        "a call stays pending though another response has followed",
        _Groups,
        "add_action",
        "elif response_id != self._response:\n        self.end_response()",
        "elif response_id != self._response:\n        pass",
        test="tests/actors/core/test_view.py::"
        "test_no_call_is_pending_once_another_response_has_followed",
    ),
    Mutant(
        "the newest event id is taken for the largest",
        Folded,
        "fold",
        "if event_id > self.event_id_max:",
        "if event_id:",
        test="tests/actors/owner/test_loop.py::"
        "test_an_event_older_than_memory_is_known_though_one_with_a_smaller_id_came_after_it",
    ),
    Mutant(
        "the newest forgotten message id is taken for the largest",
        TurnTable,
        "_know",
        "self._forgotten_max = max(self._forgotten_max, oldest, key=_rank)",
        "self._forgotten_max = oldest",
    ),
    Mutant(
        "a log whose turn ended counts as finished though a message waits",
        state_shell,
        "_is_unfinished_after",
        "return bool(turns.queued)",
        "return False",
    ),
    Mutant(
        "the head is read before the epoch is claimed",
        ConversationActor,
        "_open",
        "claim = await journal.claim(self._conversation_id)",
        "found = [i for i in await journal.list() if i.conversation_id == self._conversation_id]\n"
        "    claim = await journal.claim(self._conversation_id)\n"
        "    claim = type(claim)(claim.epoch, found[0].head if found else 0)",
        test="tests/actors/owner/test_lapsed_leases.py::"
        "test_what_the_last_owner_wrote_until_the_claim_is_read_by_the_next_one",
    ),
    Mutant(
        "a view that was handed out grows",
        View,
        "__iter__",
        "islice(self._shared, self._length)",
        "iter(self._shared)",
    ),
    Mutant(
        "a refused command leaves its events in the working state",
        decide,
        "decide",
        "if violation is not None:",
        "if violation is not None:\n            working.apply(decision)",
        test="tests/actors/owner/test_loop.py::"
        "test_a_refused_event_is_seen_by_nobody_and_kept_among_the_rejections",
    ),
    Mutant(
        "a rejected event is not kept among the rejections",
        ConversationActor,
        "_run",
        "if self._seq and rejections:",
        "if False:",
        test="tests/actors/owner/test_loop.py::"
        "test_a_refused_event_is_seen_by_nobody_and_kept_among_the_rejections",
    ),
    Mutant(
        "a call that is not idempotent runs again when its turn is resumed",
        _Run,
        "_answer_open_calls",
        "or tools.is_idempotent(action.tool_name)",
        "or True",
        test="tests/actors/agents/test_tool_agent_crashes.py::"
        "test_a_turn_that_is_killed_again_while_it_is_resumed_is_resumed_again",
    ),
    Mutant(
        "calls that the user rejected run",
        turn_rules,
        "_answer",
        "rejected = tuple(c for c in awaiting if answers[c] is not True)",
        "rejected = ()",
        test="tests/actors/conversations/test_confirming.py::"
        "test_mixed_answers_during_a_pause_run_only_what_was_confirmed_over_a_restart",
    ),
    Mutant(
        "senders that wait for room are admitted last first",
        Mailbox,
        "admit",
        "sender, _ = waiting.popitem(last=False)",
        "sender, _ = waiting.popitem()",
        test="tests/runtime/test_mailbox.py::"
        "test_a_sender_waits_for_room_and_is_admitted_in_its_turn",
    ),
    Mutant(
        "an abandoned ask is handled",
        _slice,
        "run_slice",
        "if item.is_done:  # its asker has left, or its deadline has passed",
        "if False:",
        test="tests/runtime/test_ask.py::"
        "test_a_deadline_before_the_start_means_that_nothing_happened",
    ),
    Mutant(
        "a restart loses the mail that waits",
        Cell,
        "_proceed",
        "self.restarts += 1\n        return True",
        "self.restarts += 1\n            self.mail.clear()\n        return True",
        test="tests/runtime/test_supervision.py::"
        "test_mail_that_waits_is_kept_through_a_restart_without_backoff",
    ),
    Mutant(
        "the buffer of a subscriber has no limit",
        EventReader,
        "offer",
        "len(offered) > self._limits.buffered_events_max",
        "False",
    ),
    Mutant(
        "the table of known messages forgets one that waits",
        TurnTable,
        "_know",
        "if not (known in self._queued or known in kept)",
        "if True",
        test="tests/actors/core/test_turn_rules.py::"
        "test_a_message_that_joins_a_turn_of_very_many_keeps_the_seq_of_its_first_event",
    ),
    Mutant(
        "the agent of an interrupted turn is not cancelled",
        ConversationActor,
        "_stop_agent",
        "self._agent_effect.cancel()",
        "pass",
    ),
    Mutant(
        "a chat message joins a turn while a call is open",
        turn_rules,
        "_begin_step",
        "if not working.state.admission.open_calls:",
        "if True:",
        test="tests/actors/core/test_turn_rules.py::"
        "test_no_chat_message_joins_a_turn_between_a_call_and_its_result",
    ),
    Mutant(
        "a chat message that missed the turn it steers gets none of its own",
        turn_rules,
        "_then_next_queued",
        "next(iter(draft.working.state.turns.queued.values()), None)",
        "next((q for q in draft.working.state.turns.queued.values() if q.steers is None), None)",
    ),
    Mutant(
        "a step begins during a pause",
        turn_rules,
        "_begin_step",
        "if turns.waits_for is not None or",
        "if turns.awaiting or",
    ),
    Mutant(
        "cancelling a message that waits interrupts the turn that runs",
        turn_rules,
        "_cancel_turn",
        "if running is not None and (",
        "if running is not None and (\n        True\n        or",
    ),
    Mutant(
        "a turn that failed is told as completed",
        turn_rules,
        "_end_turn",
        'outcome="completed" if command.error is None else "failed"',
        'outcome="completed"',
    ),
    Mutant(
        "what was streamed of one answer is kept with the next turn",
        turn_rules,
        "_begin_with",
        "is_answer_over=True",
        "is_answer_over=False",
        test="tests/actors/core/test_turn_rules.py::"
        "test_the_pieces_of_an_interrupted_answer_are_not_kept_with_the_next_turn",
    ),
    Mutant(
        "a condensation is judged by the view that its condenser was shown",
        decide,
        "_propose",
        "check_proposal(command.proposal, command.shown, view)",
        "check_proposal(command.proposal, command.shown, command.shown)",
        test="tests/actors/core/test_turn_rules.py::"
        "test_a_proposal_is_judged_by_the_view_that_there_is_when_it_comes",
    ),
    Mutant(
        "a turn waits for a condenser that proposes too late",
        Condensing,
        "_give_up",
        "if (effect := self.running()) is not None:",
        "if (effect := self.running()) is None:",
        options=_CONDENSED,
    ),
    Mutant(
        "a summary goes to the end of the view",
        ViewFold,
        "_condense",
        "events.insert(event.summary_offset, summary)",
        "events.append(summary)",
        test="tests/actors/core/test_view.py::"
        "test_a_condensation_forgets_and_puts_its_summary_at_the_offset_of_what_is_left",
    ),
    Mutant(
        "readers are not told that their owner has ended",
        Subscriptions,
        "_leave_to_journal",
        "self.leaders.choose(place)",
        "pass",
        test="tests/actors/owner/test_following.py::"
        "test_a_reader_that_waits_for_an_owner_here_follows_the_next_one_elsewhere",
    ),
    Mutant(
        "a reader that was chosen to lead leaves without another in its place",
        EventReader,
        "_leave_wait",
        "self._others.leaders.choose(self.place)",
        "pass",
        test="tests/actors/owner/test_leading_readers.py::"
        "test_another_reader_leads_when_the_one_that_leads_or_is_to_lead_leaves",
    ),
    Mutant(
        "a full page is taken for the last one",
        LogCursor,
        "read_page",
        "if may_have_more(page, self._page_size, self._page_bytes):",
        "if False:",
    ),
    Mutant(
        "what a crash left unfinished is not taken up on entering",
        Recovery,
        "find",
        "await self._journal.find_abandoned()",
        "()",
    ),
    Mutant(
        "a deleted conversation begins again with a low epoch",
        MemoryJournal,
        "delete",
        "_Log(log.epoch + 1, self)",
        "_Log(0, self)",
    ),
    Mutant(
        "the agent of a deleted conversation goes on",
        ConversationActor,
        "_drop_effects",
        "effect.cancel()",
        "pass",
    ),
    Mutant(
        "a result that came before its call is never let out",
        Parking,
        "take_ready",
        "parked.event.tool_call_id in open_calls",
        "False",
        test="tests/actors/owner/test_parked_results.py::"
        "test_a_parked_result_follows_its_call_in_the_same_commit",
    ),
    Mutant(
        "a snapshot forgets the chat messages that wait",
        Folded,
        "_restore",
        "self.turns = folds.turns",
        "self.turns = folds.turns; self.turns._queued.clear()",
        test="tests/actors/core/test_state.py::test_a_snapshot_holds_the_chat_messages_that_wait",
    ),
    Mutant(
        "the last event of a snapshot is folded once more",
        loading,
        "load_state",
        "await fold_log(journal, conversation_id, state.seq, seq, state.fold)",
        "await fold_log(journal, conversation_id, max(0, state.seq - 1), seq, state.fold)",
    ),
    Mutant(
        "two turns that wait for each other are not refused",
        WaitGraph,
        "_find",
        "ways: list[tuple[str, ...]] = [(start,)]",
        "ways: list[tuple[str, ...]] = []",
    ),
    Mutant(
        "a follower is given an answer from its middle",
        PieceCursor,
        "take_due",
        "answer.piece_after(taken)",
        "answer.piece_after(min(max(1, taken), written - 1))",
    ),
    Mutant(
        "an answer is read from the journal before its last pieces are shown",
        PieceCursor,
        "has_more_to_come",
        "return not newest.is_over",
        "return False and not newest.is_over",
        test="tests/actors/owner/test_pieces.py::"
        "test_who_reads_the_journal_gets_the_last_pieces_before_the_answer",
    ),
    Mutant(
        "half a character at the end of an answer is not among its pieces",
        PartialAnswer,
        "mend",
        "or not self.half",
        "or True",
        test="tests/actors/owner/test_pieces.py::"
        "test_half_a_character_is_held_back_and_mended_if_it_stays_half",
    ),
    Mutant(
        "a step names another view than its model was given",
        models_base,
        "request_of",
        "view_seq=request.view.seq",
        "view_seq=max(1, request.view.seq - 1)",
    ),
    Mutant(
        "calls confirmed during a pause count as started",
        turn_rules,
        "_resume",
        "unstarted=turns.confirmed",
        "unstarted=()",
        test="tests/actors/conversations/test_confirming.py::"
        "test_mixed_answers_during_a_pause_run_only_what_was_confirmed_over_a_restart",
    ),
    Mutant(
        "what an agent says during a pause is never answered",
        ConversationActor,
        "_decide_one",
        "self._held = (*self._held, taken)",
        "pass",
        test="tests/actors/conversations/test_turns.py::"
        "test_what_an_agent_that_waits_in_its_place_says_is_decided_after_the_pause",
    ),
    Mutant(
        "a turn starts in a process that drains",
        turn_rules,
        "_begin_with",
        "if draft.working.draining:",
        "if False:",
        options=_REPLACED,
    ),
    Mutant(
        "the next message gets its turn in a process that drains",
        turn_rules,
        "_then_next_queued",
        "if waiting is None or draft.working.draining:",
        "if waiting is None:",
        options=_REPLACED,
    ),
    Mutant(
        "a process that drains takes messages though it refuses them",
        turn_rules,
        "_send",
        'if working.draining == "refuse":',
        "if False:",
        options=_REPLACED,
    ),
    Mutant(
        "a process that was drained keeps its conversations",
        ConversationActor,
        "on_stop",
        "await self._release()",
        "pass",
        options=_REPLACED,
    ),
    Mutant(
        "the readers of a process that was drained wait on",
        draining,
        "hand_over",
        "subscriptions.end_live()",
        "pass",
        options=_REPLACED,
    ),
    Mutant(
        "a turn that cannot be resumed outlasts the grace",
        draining,
        "_tell_all",
        "if left_s <= 0 or not region.active:",
        "if not region.active:",
        options=_REPLACED,
    ),
    Mutant(
        "a changed system prompt is not noticed",
        turn_rules,
        "_add_changed_prompt",
        "and event.content == prompt for",
        "for",
        options=_REPLACED,
    ),
    Mutant(
        "a changed system prompt stands beside the one before it",
        ViewFold,
        "_put_first",
        "events[len(left) :]",
        "events",
        options=_REPLACED,
    ),
    Mutant(
        "a pinned conversation takes the system prompt of now",
        turn_rules,
        "_add_changed_prompt",
        'settings.prompt_policy == "pinned"',
        "False",
        options=replace(_REPLACED, prompt_policy="pinned"),
    ),
    Mutant(
        "an append that is sent again is refused",
        MemoryJournal,
        "append",
        "if events and all(log.has(record) for record in records):",
        "if False:",
        test="tests/contract/test_journal.py::"
        "TestMemoryJournal::test_known_ids_are_answered_with_their_seqs_whatever_the_epoch",
    ),
    Mutant(
        "an agent of an earlier owner goes on in the turn that was resumed",
        turn_rules,
        "check_running",
        " or epoch != working.epoch",
        "",
        test="tests/actors/core/test_turn_rules.py::"
        "test_an_agent_of_an_earlier_owner_says_nothing_in_the_turn_that_another_goes_on_with",
    ),
    Mutant(
        "the newest events are kept in memory without a limit",
        WorkingState,
        "apply",
        "if len(recent) > state.limits.recent_events_max:",
        "if False:",
        test="tests/actors/core/test_turn_rules.py::"
        "test_an_owner_keeps_no_more_of_the_newest_events_in_memory_than_its_limit",
    ),
    Mutant(
        "places of a commit are not compared with what was decided",
        ConversationActor,
        "_are_in_place",
        "return seqs[0]",
        "return True or seqs[0]",
        test="tests/actors/owner/test_lease_loss.py::"
        "test_an_event_that_a_rival_has_written_too_is_no_violation",
    ),
    Mutant(
        "an owner whose lease has run out is asked for the newest events",
        ConversationActor,
        "recent_after",
        "if not self._setup.journal.is_lease_valid(since=self._claimed_at):",
        "if False:",
        test="tests/actors/owner/test_recent_events.py::"
        "test_a_reader_does_not_wait_for_an_owner_whose_lease_has_run_out",
    ),
    Mutant(
        "a piece of an answer overtakes what waits in the mailbox",
        ConversationActor,
        "take_at_once",
        "if not (self.context.is_at_rest and is_valid):",
        "if not is_valid:",
        test="tests/actors/conversations/test_turns_following.py::"
        "test_a_piece_written_while_a_commit_is_under_way_comes_after_its_events",
    ),
    Mutant(
        "a piece of an answer is shown after the lease is lost",
        ConversationActor,
        "take_at_once",
        "if not (self.context.is_at_rest and is_valid):",
        "if not self.context.is_at_rest:",
        test="tests/actors/owner/test_lease_loss.py::"
        "test_no_piece_of_an_answer_is_shown_after_the_lease_is_lost",
    ),
    Mutant(
        "an owner whose lease has run out is not ended",
        ConversationActor,
        "end_if_lapsed",
        "self.context.ref.tell_nowait(GetView(), control=True)",
        "pass",
        test="tests/actors/owner/test_lease_loss.py::"
        "test_an_answer_without_a_write_is_not_given_by_an_owner_that_may_have_lost",
    ),
    Mutant(
        "a lease that is lost in the first commit is not noticed",
        ConversationActor,
        "_publish",
        "self.end_if_lapsed()",
        "pass",
        test="tests/actors/owner/test_lease_loss.py::"
        "test_a_reader_does_not_wait_for_an_owner_that_lost_the_lease_in_its_first_commit",
    ),
    Mutant(
        "an answer without a write is given under a lapsed lease",
        ConversationActor,
        "_run",
        "self.check_lease()",
        "pass",
        test="tests/actors/owner/test_lease_loss.py::"
        "test_an_answer_without_a_write_is_not_given_by_an_owner_that_may_have_lost",
    ),
    Mutant(
        "a log that another process has begun counts as empty",
        ConversationActor,
        "_run",
        "await self._check_is_empty()",
        "pass",
        test="tests/actors/conversations/test_forks.py::"
        "test_a_fork_takes_a_name_from_another_process_whose_log_of_it_is_empty",
    ),
    Mutant(
        "an owner begins beside the fork that takes its name",
        ConversationActor,
        "_open",
        "await forking.made.wait()",
        "pass",
        test="tests/actors/conversations/test_forks.py::"
        "test_a_turn_of_a_deleted_conversation_that_is_cancelled_while_a_fork_takes_its_name",
    ),
    Mutant(
        "a new owner leaves a row of lists behind",
        ConversationActor,
        "_open",
        "self._listed_seq = None",
        "self._listed_seq = state.seq",
        test="tests/actors/conversations/test_lists.py::"
        "test_a_row_that_old_code_left_behind_is_mended_by_the_next_owner",
    ),
    Mutant(
        "an agent sees what is decided and not yet committed",
        ConversationActor,
        "_decide",
        "self._view = self.view",
        "pass",
        test="tests/actors/owner/test_loop.py::"
        "test_an_agent_sees_the_committed_view_while_a_commit_waits",
    ),
    Mutant(
        "a deletion that the journal refuses is answered",
        ConversationActor,
        "_delete",
        "delivery.fail(refusal)  # there was",
        "delivery.reply(None)  # there was",
        test="tests/actors/conversations/test_deletion.py::"
        "test_a_deletion_that_the_journal_refuses_is_told_and_its_owner_goes_on",
    ),
    Mutant(
        "a late ask of a batch is told that nothing happened",
        _slice,
        "run_batch",
        "item.is_started = is_ask = True",
        "is_ask = True",
        test="tests/runtime/test_batches.py::"
        "test_a_late_ask_of_a_batch_may_have_been_handled_and_one_in_the_mailbox_was_not",
    ),
    Mutant(
        "the buffer of a subscriber has no limit in bytes",
        EventReader,
        "offer",
        "self._offered_bytes > self._limits.buffered_bytes_max",
        "False",
        test="tests/actors/owner/test_recent_events.py::"
        "test_few_large_events_are_held_that_have_left_the_view",
    ),
]
"""Faults placed by what is promised, and not by where the code is that keeps the promise."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The production code with this fault in it."""
    function = _function(inspect.getattr_static(mutant.where, mutant.function))
    # The function itself is changed, and not a name for it: others may have imported it.
    original = function.__code__
    function.__code__ = _mutated(function, mutant)
    try:
        yield
    finally:
        function.__code__ = original


def _function(found: object) -> types.FunctionType:
    """Return the function behind a property or a static method."""
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod):
        found = found.__func__
    assert isinstance(found, types.FunctionType), found
    return found


def _mutated(function: types.FunctionType, mutant: Mutant) -> types.CodeType:
    """Return the code of the function with the fault."""
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.line in source, f"{function.__qualname__} no longer has {mutant.line!r}"
    namespace: dict[str, Any] = dict(vars(sys.modules[function.__module__]))
    code = "from __future__ import annotations\n" + source.replace(mutant.line, mutant.becomes)
    exec(compile(code, f"<{function.__qualname__} with a fault>", "exec"), namespace)
    return _function(namespace[function.__name__]).__code__
