"""OpenHands SDK: view, indices, messages, a step, opening. Run by `core.py` in its own environment.

Usage: python _peer_openhands.py ROUNDS EVENTS…. Prints one JSON object, times in microseconds.
"""

import json
import logging
import os
import random
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from time import perf_counter

os.environ["OPENHANDS_SUPPRESS_BANNER"] = "1"
logging.disable(logging.CRITICAL)

# Ignored here and below: the SDK is installed in an environment of its own, not in the checker's.
# ruff: noqa: E402 - its log is silenced before it is imported
from openhands.sdk import (  # type: ignore[import-not-found]
    Agent,
    Conversation,
    LocalConversation,
)
from openhands.sdk.context.view import View  # type: ignore[import-not-found]
from openhands.sdk.event import (  # type: ignore[import-not-found]
    ActionEvent,
    AgentErrorEvent,
    Event,
    LLMConvertibleEvent,
    MessageEvent,
    SystemPromptEvent,
)
from openhands.sdk.llm import (  # type: ignore[import-not-found]
    Message,
    MessageToolCall,
    TextContent,
    ThinkingBlock,
)
from openhands.sdk.testing import TestLLM  # type: ignore[import-not-found]


def message(role: str, text: str) -> MessageEvent:
    source = "user" if role == "user" else "agent"
    content = [TextContent(text=text)]
    return MessageEvent(source=source, llm_message=Message(role=role, content=content))


def action(call: str, response: str, *, thinking: bool) -> ActionEvent:
    blocks = [ThinkingBlock(thinking="hm " * 20, signature="s")] if thinking else []
    arguments = json.dumps({"at": "place", "deep": {"a": [1, 2, 3]}})
    return ActionEvent(
        thought=[],
        thinking_blocks=blocks,
        tool_name="look",
        tool_call_id=call,
        tool_call=MessageToolCall(id=call, name="look", arguments=arguments, origin="completion"),
        llm_response_id=response,
    )


def result(call: str) -> AgentErrorEvent:
    return AgentErrorEvent(tool_name="look", tool_call_id=call, error="seen " * 340)


def talk(length: int, *, thinking: bool = False) -> list[Event]:
    events = [SystemPromptEvent(system_prompt=TextContent(text="be kind"), tools=[])]
    n = 0
    while len(events) < length:
        n += 1
        events.append(message("user", "please " + "x" * 900))
        for call in (f"c{n}.1", f"c{n}.2"):
            events += [action(call, f"r{call}", thinking=thinking), result(call)]
        events.append(message("assistant", "answer " * 130))
    return events[:length]


def timed(act: Callable[[], object], rounds: int) -> float:
    act()
    times = []
    for _ in range(rounds):
        began = perf_counter()
        act()
        times.append(perf_counter() - began)
    return statistics.median(times) * 1e6


def reopened_differently(tries: int) -> float:
    """Return the share of correct logs whose view differs when reopened at a random event."""
    draw = random.Random(1)
    differing = 0
    for _ in range(tries):
        events = talk(60)
        at = draw.randrange(1, len(events))
        view = View.from_events(events[:at])
        for event in events[at:]:
            view.append_event(event)
        differing += [e.id for e in view.events] != [e.id for e in View.from_events(events).events]
    return differing / tries


def conversation(folder: str, length: int, answers: int) -> LocalConversation:
    said = Message(role="assistant", content=[TextContent(text="done")])
    model = TestLLM.from_messages([said] * answers)
    found = Conversation(
        agent=Agent(llm=model, tools=[]),
        workspace=folder,
        persistence_dir=folder,
        conversation_id=uuid.uuid4(),
        visualizer=None,
        stuck_detection=False,
    )
    found.send_message("hello")  # which makes the agent write its system prompt
    found.run()
    for event in talk(length)[1:]:
        found.state.append_event(event)
    return found


def step(length: int, rounds: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        talking = conversation(folder, length, rounds + 4)

        def one() -> None:
            talking.send_message("and now?")
            talking.run()

        one()
        return timed(one, rounds)


def reopen(length: int, rounds: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        talking = conversation(folder, length, 2)
        agent = talking.agent
        kept = talking.id
        talking.close()

        def one() -> None:
            again = Conversation(
                agent=agent,
                workspace=folder,
                persistence_dir=folder,
                conversation_id=kept,
                visualizer=None,
            )
            assert len(again.state.view) >= length - 1
            again.close()

        return timed(one, rounds)


def main() -> None:
    rounds = int(sys.argv[1])
    found = {}
    for length in map(int, sys.argv[2:]):
        for thinking in (False, True):
            events = talk(length, thinking=thinking)
            name = f"rebuild{'_thinking' if thinking else ''}_{length}"
            found[name] = timed(partial(View.from_events, events), rounds)
        view = View.from_events(talk(length))
        found[f"indices_{length}"] = timed(partial(getattr, view, "manipulation_indices"), rounds)
        found[f"messages_{length}"] = timed(
            partial(LLMConvertibleEvent.events_to_messages, view.events), rounds
        )
        found[f"step_{length}"] = step(length, rounds)
    found[f"open_{length}"] = reopen(length, rounds)
    found["reopened_differently"] = reopened_differently(200)
    print(json.dumps(found))


main()
