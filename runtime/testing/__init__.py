"""Testing code that is made of actors: a clock, a probe, a check for leaks, and a simulator.

1. It owns nothing of the runtime's; it only uses what the runtime exports.
2. `VirtualClock` moves when it is told to, and everything due runs in the order of time; `Probe`
   keeps what it was sent, in order; `no_leaks` fails when actors that were spawned inside it are
   still there when it is left. `simulate` runs a world of several nodes one step of one task at a
   time, under virtual time; the seed, or the tape of an earlier run, decides everything.
3. The first three do not make the order of tasks deterministic; `simulate` does, on trio, for
   code that takes time, ids, randomness and threads from its `Ports`.
4. All of it runs in the loop of the test; `simulate` brings its own, and returns when it is over.
5. Nothing survives; nothing needs to. A tape can be kept, and played again.

`simulate` needs trio, which nothing else here imports. docs/simulation.md is its guide.
"""

from ._simulate import shrink, simulate
from ._simulation import (
    Broken,
    Node,
    NodeCrashed,
    Policy,
    Run,
    Simulation,
    SimulatorUnsupported,
    Strike,
)
from ._tape import Tape
from ._virtual import Probe, VirtualClock, no_leaks, settle

__all__ = [
    "Broken",
    "Node",
    "NodeCrashed",
    "Policy",
    "Probe",
    "Run",
    "Simulation",
    "SimulatorUnsupported",
    "Strike",
    "Tape",
    "VirtualClock",
    "no_leaks",
    "settle",
    "shrink",
    "simulate",
]
