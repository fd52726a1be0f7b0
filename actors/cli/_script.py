"""The script of a stress run: each exchange of each conversation is a pure function of a seed.

The clients, the agent in the worker and the audit each compute the script themselves. So it is
never sent, and a damaged log cannot agree with a damaged script.
"""

from __future__ import annotations

from random import Random

from ..recordings.transcripts import (
    RecordedCall,
    RecordedConversation,
    RecordedExchange,
    RecordedStep,
)
from ..values.frozen import FrozenObject

__all__ = ["exchange", "script"]

_TOOL_STEPS_MAX = 2
_CALLS_MAX = 2
_WORDS_MAX = 60
_WORDS = (
    "the",
    "order",
    "came",
    "late",
    "and",
    "was",
    "paid",
    "for",
    "but",
    "not",
    "sent",
    "there",
)


def exchange(seed: int, conversation: str, number: int) -> RecordedExchange:
    """Return the message with this number, and the agent's steps to its answer."""
    random = Random(f"{seed} {conversation} {number}")
    steps = [
        RecordedStep(
            text=f"step {n} of {number}",
            calls=tuple(
                RecordedCall(
                    provider_call_id=f"call-{number}-{n}-{c}",
                    tool_name="look_up",
                    arguments=FrozenObject({"message": number, "call": c}),
                    result=_words(random, f"found {c} of {number}:"),
                )
                for c in range(random.randint(1, _CALLS_MAX))
            ),
        )
        for n in range(random.randint(0, _TOOL_STEPS_MAX))
    ]
    steps.append(RecordedStep(text=_words(random, f"answer {number}:")))
    return RecordedExchange(content=_words(random, f"question {number}:"), steps=tuple(steps))


def script(seed: int, conversation: str, exchanges: int) -> RecordedConversation:
    """Return the first `count` exchanges of a conversation."""
    return RecordedConversation(
        item=1, exchanges=tuple(exchange(seed, conversation, n) for n in range(exchanges))
    )


def _words(random: Random, beginning: str) -> str:
    return " ".join([beginning, *random.choices(_WORDS, k=random.randint(5, _WORDS_MAX))])
