"""AutoGen core: ask one after another. Run by `runtime.py` in an environment of its own."""

import asyncio
import json
import sys
from dataclasses import dataclass
from time import perf_counter, process_time

# Ignored here and below: AutoGen is installed in an environment of its own, not in the checker's.
from autogen_core import (  # type: ignore[import-not-found]
    AgentId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)


@dataclass
class Get:
    text: str


class Echo(RoutedAgent):  # type: ignore[misc]
    @message_handler  # type: ignore[untyped-decorator]
    async def on_get(self, message: Get, ctx: MessageContext) -> Get:
        del ctx
        return message


async def main() -> None:
    asks = int(sys.argv[2])
    runtime = SingleThreadedAgentRuntime()
    await Echo.register(runtime, "echo", lambda: Echo("echo"))
    runtime.start()
    agent = AgentId("echo", "default")
    message = Get("message")
    for _ in range(50):
        await runtime.send_message(message, agent)
    began, cpu = perf_counter(), process_time()
    for _ in range(asks):
        await runtime.send_message(message, agent)
    ask, ask_cpu = (perf_counter() - began) / asks, (process_time() - cpu) / asks
    await runtime.stop()
    print(json.dumps({"ask": ask * 1e6, "ask_cpu": ask_cpu * 1e6}))


asyncio.run(main())
