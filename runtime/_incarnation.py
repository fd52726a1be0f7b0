"""One incarnation of an actor: the actor itself, and everything that it has started.

Owns the actor, its context variables, its effects, timers, children, unanswered asks and watches.
All of these end with it.

1. It has one end, in two steps. `close` comes first: from then on nothing can be started, and the
   timers are gone. `end` comes last, after the effects, the children and the last hook: then
   unanswered asks fail and watches are taken back.
2. Nothing can be armed or reached through it after `close`. Code that still holds it (an effect
   given up as stuck, a caller that kept a context) is refused with `ActorEnded`.
3. It fails once. Errors of its effects and children that come after `close` are only reported,
   and the refusals of 2 not even that.

The tables are made at first use: most actors need none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import Context
from itertools import repeat
from operator import is_not
from typing import Final, Protocol

from ._effects import Effect
from ._hooks import Hooks
from ._messages import Ask, Firing, Item, Order, OrderKind
from ._reports import Failure
from ._supervision import leaves
from ._timers import Timer
from ._world import World
from .errors import ActorEnded, ActorFailed

__all__ = ["UNANSWERED", "Incarnation", "Offspring", "Place", "Watch"]

UNANSWERED: Final = "it ended before it answered"
_UNSET: Final = object()
_REFERENCES_AT_REST: Final = 2
"""The references to a context without tokens: the incarnation's, and that of the counting call."""


class Place(Protocol):
    """The cell that an incarnation lives in, as the incarnation sees it."""

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> World: ...

    @property
    def within(self) -> Incarnation | None: ...

    def new_context(self) -> Context: ...

    def put(self, item: Item, *, control: bool = False) -> None: ...

    def give_order(self, order: Order) -> None: ...

    def note_if_idle(self) -> None: ...


class Offspring(Protocol):
    """The supervisor of an actor's children, as the actor's incarnation sees it."""

    @property
    def names(self) -> Collection[str]: ...

    def asks_of(self, target: object) -> Iterator[Ask]: ...

    def close(self) -> None: ...

    def request_stop(self, reason: str) -> None: ...

    def resume(self) -> None: ...

    async def stop_children(self, reason: str, *, patient_until: float) -> None: ...


class Watch(Protocol):
    """A watch that this incarnation has placed on another actor."""

    def take_back(self) -> None: ...


class Incarnation:
    """One actor object from its making to its end, with all that it has started."""

    __slots__ = (
        "_context",
        "actor",
        "children",
        "deferred",
        "effects",
        "is_open",
        "place",
        "timers",
        "watches",
    )

    def __init__(self, place: Place) -> None:
        self.place = place
        self._context: Context | None = None
        self.actor: Hooks | None = None
        self.is_open = True
        self.effects: dict[Effect, None] | None = None
        self.timers: dict[object, Timer] | None = None
        self.children: Offspring | None = None
        self.deferred: dict[Ask, None] | None = None
        self.watches: dict[object, Watch] | None = None

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def system(self) -> World:
        return self.place.system

    @property
    def context(self) -> Context:
        """The actor's own context, which its hooks, its handlers and their variables share."""
        context = self._context
        if context is None:
            context = self._context = self.place.new_context()
        return context

    def drop_context(self, base: Context) -> Context | None:
        """Drop and return the context of an idle actor; None if a variable differs from `base`.

        The next message needs another one. For most actors this leaves the garbage collector three
        objects less to look at.
        """
        # Any further reference is a token's, of a variable that was set to the value that it had. A
        # later handler may reset the variable with it, which works in this context only.
        if self._context is None or sys.getrefcount(self._context) > _REFERENCES_AT_REST:
            return None
        # A sum, because a loop in Python takes longer. The variable that says which actor runs
        # always differs.
        context = self._context
        of_base = map(base.get, context, repeat(_UNSET))
        if sum(map(is_not, context.values(), of_base)) != 1:
            return None
        self._context = None
        return context

    @property
    def is_quiet(self) -> bool:
        """True if nothing that it has started is going on."""
        if self.effects or self.deferred or self.timers:
            return False
        return self.children is None or not self.children.names

    def check_open(self, attempt: str) -> None:
        """Raise `ActorEnded` if the incarnation is ending or has ended."""
        if not self.is_open:
            raise ActorEnded(self.place.name, attempt)

    # --- what it starts --------------------------------------------------------------------------

    def start_effect(self, run: Callable[[], Awaitable[None]], name: str) -> Effect:
        """Run an effect beside the actor. Raises `ActorEnded` after `close`."""
        self.check_open(f"start the effect {name}")
        effect = Effect(self, run, name)
        if self.effects is None:
            self.effects = {}
        self.effects[effect] = None
        return effect

    def remove_effect(self, effect: Effect) -> None:
        """Forget an effect that has ended."""
        if self.effects is not None:
            self.effects.pop(effect, None)
            if not self.effects:
                self.effects = None  # an empty table takes 200 bytes, and most actors rest now
            self.note_if_idle()

    def remove_timer(self, timer: Timer) -> None:
        """Forget a timer that was cancelled, or whose message is being handled."""
        if self.timers is not None and self.timers.get(timer.key) is timer:
            del self.timers[timer.key]
            self.note_if_idle()

    def receive_firing(self, firing: Firing) -> None:
        """Queue a timer's message, unless the incarnation has ended meanwhile."""
        if self.is_open:
            self.place.put(firing)

    def defer(self, ask: Ask) -> None:
        """Keep an ask whose answer is given later."""
        if self.deferred is None:
            self.deferred = {}
        self.deferred[ask] = None

    def note_answered(self, ask: Ask) -> None:
        """Forget a deferred ask that has its answer."""
        if self.deferred is not None and ask in self.deferred:
            del self.deferred[ask]
            self.note_if_idle()

    def note_if_idle(self) -> None:
        """Have the cell tell its region if it has become idle."""
        if self.is_open:
            self.place.note_if_idle()

    def fail(self, error: BaseException, found: str) -> None:
        """Fail the actor with the error of an effect or child; if it is ending, only report it.

        An effect that tries to start something once the actor has begun to end cannot know that:
        the refusal that ends it is no failure.
        """
        if self.is_open:
            self.place.give_order(Order(OrderKind.FAIL, error, found, self))
        elif not all(self._has_refused(leaf) for leaf in leaves(error)):
            self.report_late(error, found)

    def _has_refused(self, error: BaseException) -> bool:
        return isinstance(error, ActorEnded) and error.actor == self.name

    def report_late(self, error: BaseException, found: str) -> None:
        """Report an error that does not fail the incarnation, because it is ending already."""
        self.system.report(Failure(self.name, error, f"{found}; it was ending already"))

    def go_on(self) -> None:
        """Go on after a failure; if children have failed, bring them back."""
        if self.children is not None:
            self.children.resume()

    def forget_watch(self, target: object) -> None:
        """Forget a watch: its target has ended, and the notice of that is on the way."""
        if self.watches is not None:
            self.watches.pop(target, None)

    # --- its end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse everything new, and cancel the timers."""
        self.is_open = False
        timers, self.timers = self.timers, None
        for timer in tuple((timers or {}).values()):
            timer.cancel()
        if self.children is not None:
            self.children.close()

    def asks_from_below(self) -> Iterator[Ask]:
        """Yield the asks of this actor that handlers of actors below it wait for."""
        if self.children is not None:
            yield from self.children.asks_of(self.place)

    @property
    def has_offspring(self) -> bool:
        """True if ending it has to wait for effects or children."""
        return bool(self.effects) or self.children is not None

    async def end_offspring(self, patient_until: float) -> None:
        """End the effects and children, and wait for that; each of them has its own bound."""
        for effect in tuple(self.effects or ()):
            effect.cancel()
        for effect in tuple(self.effects or ()):
            await effect.wait_until_ended()
        if self.children is not None:
            await self.children.stop_children("its parent has stopped", patient_until=patient_until)
            self.children = None

    def abandon_offspring(self) -> None:
        """Have the effects and children end without waiting for them."""
        for effect in tuple(self.effects or ()):
            effect.cancel()
        if self.children is not None:
            self.children.request_stop("its parent is stuck")

    def end(self, error: BaseException | None = None) -> None:
        """End for good: unanswered asks fail, watches are taken back, the actor is let go."""
        self.close()
        for ask in tuple(self.deferred or ()):
            ask.fail(error or ActorFailed(self.place.name, UNANSWERED))
        self.deferred = None
        watches, self.watches = self.watches, None
        for watch in tuple((watches or {}).values()):
            watch.take_back()
        self.actor = None
