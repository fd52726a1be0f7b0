"""xoscar: tell, and ask one after another. Run by `runtime.py` in an environment of its own."""

import asyncio
import json
import socket
import sys
from time import perf_counter, process_time

import xoscar  # type: ignore[import-not-found]  # of a package that is not here


class Echo(xoscar.Actor):  # type: ignore[misc]
    async def get(self, message: object) -> int:
        del message
        return 1


async def main() -> None:
    tells, asks = int(sys.argv[1]), int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # All of it in this process: the actor, and the code that sends.
    pool = await xoscar.create_actor_pool(address, n_process=0)
    async with pool:
        echo = await xoscar.create_actor(Echo, uid="echo", address=pool.external_address)
        for _ in range(50):
            await echo.get("warm")
        began, cpu = perf_counter(), process_time()
        for _ in range(tells):
            await echo.get.tell("message")
        await echo.get("last")
        tell, tell_cpu = (perf_counter() - began) / tells, (process_time() - cpu) / tells
        began, cpu = perf_counter(), process_time()
        for _ in range(asks):
            await echo.get("message")
        ask, ask_cpu = (perf_counter() - began) / asks, (process_time() - cpu) / asks
    found = {"tell": tell, "tell_cpu": tell_cpu, "ask": ask, "ask_cpu": ask_cpu}
    print(json.dumps({name: seconds * 1e6 for name, seconds in found.items()}))


asyncio.run(main())
