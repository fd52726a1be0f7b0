"""Tools to test actors with: a clock, a probe, a check for leaks, and a simulator.

1. It owns nothing of the runtime's. To tell the story of a failed run, it wraps some functions of
   the runtime.
2. `VirtualClock` moves only when it is told to, and runs everything due in the order of time.
   `Probe` keeps the messages that it was sent, in order. `no_leaks` fails if actors that were
   spawned inside it are still there when it is left. `simulate` runs a world of several nodes one
   step of one task at a time, under virtual time; the seed, or the tape of an earlier run, decides
   everything. `run_campaign` runs many seeds and keeps the tape of the first that fails.
3. The first three leave the order of tasks to the backend. `simulate` decides it, for code that
   takes time, ids, randomness and threads from its `Ports`: on trio, or on asyncio if asked.
4. All of it runs in the loop of the test; `simulate` brings its own, and returns when it is over.
5. Nothing survives; nothing needs to. A tape can be kept, and played again.

`simulate` on trio needs trio, which nothing else here imports. docs/simulation.md is its guide.
"""

from ._campaign import Campaign, TapeFile, run_campaign
from ._network import NetworkTimeout, SimulatedNetwork
from ._simulate import World, shrink, simulate
from ._simulation import (
    Backend,
    Broken,
    Node,
    NodeCrashed,
    NotAnswered,
    Policy,
    Run,
    Simulation,
    SimulatorUnsupported,
    Strike,
)
from ._tape import Tape
from ._virtual import Probe, VirtualClock, no_leaks, settle

__all__ = [
    "Backend",
    "Broken",
    "Campaign",
    "NetworkTimeout",
    "Node",
    "NodeCrashed",
    "NotAnswered",
    "Policy",
    "Probe",
    "Run",
    "SimulatedNetwork",
    "Simulation",
    "SimulatorUnsupported",
    "Strike",
    "Tape",
    "TapeFile",
    "VirtualClock",
    "World",
    "no_leaks",
    "run_campaign",
    "settle",
    "shrink",
    "simulate",
]
