"""The condensing of one conversation: when its condenser runs, rests, or is given up.

Owns the effect in which the condenser runs beside the owner's loop; there is one at a time. The
condenser only proposes: its proposals and its failures are commands to the owner, which decides
about them as about any other. A failure of the condenser never fails a turn or the owner.

The owner starts the effect after a commit, if the condenser says that there is a need. A condenser
rests with a view that it could not make shorter, until the view changes. If a proposal takes more
than `condense_s` seconds, a timer tells the owner, which goes on without it, even if the condenser
swallows its cancellation.

The owner's loop and the effect call this, both in one event loop. What is set here is set without
an await between looking and acting. Nothing of it survives a crash: the next owner asks the
condenser anew.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from turnkeeper.runtime import ActorContext, Effect, Message
from turnkeeper.runtime.lowlevel import Logger, closing_scopes

from ..agents.turn_context import is_own_failure
from ..core.commands import Propose, ProposeFailed, ProposeLate
from ..core.condensation import Condenser, Need, Proposal, check_proposal
from ..core.view import View
from ..errors import CondenserTooSlow
from ..values.text import error_text
from ..values.type_names import a_type

__all__ = ["CondensedOwner", "Condensing"]

T = TypeVar("T")

_logger = Logger("turnkeeper.actors")


class CondensedOwner(Protocol):
    """The owner of the conversation, as its condensing sees it; `ConversationActor` is one."""

    @property
    def context(self) -> ActorContext: ...

    @property
    def view(self) -> View:
        """The committed view."""

    @property
    def epoch(self) -> int: ...

    def check_lease(self) -> None:
        """Raise `LeaseExpired` if another process may own the conversation by now."""

    async def tell_owner(self, command: Message[T]) -> T | None:
        """Ask the owner; None if it has ended."""


class Condensing:
    """The condenser of one owner, and the effect in which it runs.

    The owner holds this. Each method gets the owner as an argument, because a reference back would
    make a circle, which only the garbage collector frees.
    """

    __slots__ = (
        "_condense_s",
        "_condenser",
        "_conversation_id",
        "_is_hard",
        "_reasons_told",
        "_rests_with",
        "effect",
        "late",
    )

    def __init__(self, conversation_id: str, condenser: Condenser, condense_s: float) -> None:
        self._conversation_id = conversation_id
        self._condenser = condenser
        self._condense_s = condense_s
        self.effect: Effect | None = None
        """The newest effect, which may have ended."""
        self.late: Propose | None = None
        """The proposal that the condenser has not made in time, until it is given up or comes."""
        self._is_hard = False
        """True if the condenser's newest answer was that the need is hard."""
        self._reasons_told: frozenset[str] = frozenset()
        """The reasons for refusing a proposal for which this owner has written a log line."""
        self._rests_with: View | None = None
        """The view that the condenser could not make shorter; it rests until the view changes."""

    # --- for the owner's loop ---------------------------------------------------------------------

    def start_if_needed(self, owner: CondensedOwner) -> None:
        """Start the condenser's effect if the committed view needs it; give up a late one."""
        if self.late is not None:
            self._give_up(owner, self.late)
        if self.running() is not None or self._is_resting(owner.view):
            return
        try:
            need = self._need(owner.view)
        except BaseException as error:
            if not is_own_failure(error):
                raise
            self._start(owner, partial(self._refuse_need, owner, owner.view, error))
        else:
            self._is_hard = need == "hard"
            if need is not None:
                self._start(owner, partial(self._run, owner))

    def _give_up(self, owner: CondensedOwner, late: Propose) -> None:
        """Go on without the condenser's proposal, even if it never takes notice of being cancelled.

        What it still proposes is ignored: `_run` finds that another effect has its place.
        """
        self.late = None
        if late.epoch != owner.epoch:
            return  # its log was deleted, and the condenser that runs is another
        if (effect := self.running()) is not None:
            effect.cancel()
            self._start(owner, partial(self._run, owner, late))

    def _start(self, owner: CondensedOwner, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.effect = owner.context.start_effect(run, name="condenser")

    def drop(self) -> None:
        """Cancel the effect of a log that is deleted; what it still sends has an older epoch."""
        if self.effect is not None:
            self.effect.cancel()
        self.effect = self._rests_with = self.late = None

    # --- for the running turn ---------------------------------------------------------------------

    def running(self) -> Effect | None:
        """Return the effect, if it goes on."""
        effect = self.effect
        return None if effect is None or effect.is_done else effect

    def must_be_awaited(self, view: View) -> bool:
        """True if the next step waits for the condenser that runs. `view`: the committed one."""
        return self._is_hard or view.unhandled_condensation_request

    def is_too_long(self, view: View) -> bool:
        """True if this view is over a hard limit, and nothing more of it can be left out."""
        return self._is_hard and not view.unhandled_condensation_request and self._is_resting(view)

    def _need(self, view: View) -> Need | None:
        need = self._condenser.need(view)
        if need not in (None, "soft", "hard"):
            raise TypeError(f'its need is {a_type(need)}; it is "soft", "hard" or None')
        return need

    def _is_resting(self, view: View) -> bool:
        resting = self._rests_with
        return resting is not None and view.is_unchanged_since(resting)

    # --- the effect -------------------------------------------------------------------------------

    async def _run(self, owner: CondensedOwner, late: Propose | None = None) -> None:
        """Condense until there is no need, or the view gets no shorter.

        `late`: a proposal that was given up, to go on without.
        """
        effect, epoch = self.effect, owner.epoch
        if late is not None:
            error = CondenserTooSlow(self._conversation_id, self._condense_s)
            if not await self._go_on_without(owner, late, error):
                return
        while True:
            owner.check_lease()
            asked = Propose(epoch, None, owner.view)
            try:
                need = self._need(asked.shown)
                self._is_hard = need == "hard"
                if need is None:
                    return
                asked = replace(asked, need=need)
                proposal = await self._ask(owner, asked)
            except BaseException as error:
                if not is_own_failure(error):
                    raise
                is_useful = self.effect is effect and await self._go_on_without(owner, asked, error)
            else:
                answer = replace(asked, proposal=proposal)
                is_useful = self.effect is effect and await self._propose(owner, answer)
            if not is_useful:
                return

    async def _ask(self, owner: CondensedOwner, asked: Propose) -> Proposal | None:
        """Return the condenser's proposal. After `condense_s` the owner is told that it is late."""
        timer = owner.context.timers.once(self._condense_s, ProposeLate(asked))
        try:
            with closing_scopes(type(self._condenser).__name__):
                proposal = await self._condenser.propose(asked.shown, asked.need)
        finally:
            timer.cancel()
            if self.late is asked:
                self.late = None
        if not isinstance(proposal, Proposal | None):
            raise TypeError(f"its proposal is {a_type(proposal)}")
        return proposal

    async def _propose(self, owner: CondensedOwner, proposal: Propose) -> bool:
        """Tell the owner the proposal; return False if the condenser rests or ends with it."""
        self._log_if_unfit(proposal)
        is_progress = await owner.tell_owner(proposal)
        if is_progress is None:
            return False
        if not is_progress and owner.view.is_unchanged_since(proposal.shown):
            # If the view has changed meanwhile, the condenser is asked once more instead.
            self._rests_with = proposal.shown
            return False
        return True

    def _log_if_unfit(self, answer: Propose) -> None:
        """Warn, once for each reason, of a proposal that does not fit the view it was made for.

        That is the condenser's fault, and the owner will refuse it. If the owner refuses one only
        because the conversation has gone on meanwhile, nothing is wrong.
        """
        if answer.proposal is None:
            return
        reason = check_proposal(answer.proposal, answer.shown, answer.shown)
        if isinstance(reason, str) and reason not in self._reasons_told:
            self._reasons_told |= {reason}
            name = self._conversation_id
            _logger.warning("proposal of a condenser refused", conversation=name, reason=reason)

    async def _go_on_without(
        self, owner: CondensedOwner, asked: Propose, error: BaseException
    ) -> bool:
        """Record that the condenser failed; return False if it rests or ends with that."""
        await _record_failure(owner, error)
        if asked.need != "hard":
            self._rests_with = asked.shown
            return False
        return await self._propose(owner, asked)

    async def _refuse_need(self, owner: CondensedOwner, shown: View, error: BaseException) -> None:
        """Record that the condenser's `need` has raised, and let the condenser rest."""
        self._rests_with = shown
        await _record_failure(owner, error)


async def _record_failure(owner: CondensedOwner, error: BaseException) -> None:
    failed = ProposeFailed(owner.epoch, type(error).__name__, error_text(error))
    await owner.tell_owner(failed)
