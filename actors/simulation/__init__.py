"""The conversation actors in a simulated world with faults, to search for broken invariants.

1. The simulation owns a disk, the nodes over it, their clients, and the list of invariants.
2. It promises that the nodes run the production code, unchanged except for its ports; that a seed,
or a tape, decides everything; and that each invariant is checked in every run.
3. It does not promise that there are no bugs that it has not found. Threads, SQLite, PostgreSQL and
   the kernel are outside; another suite kills real processes.
4. Everything runs in one thread, in its own event loop; it needs trio.
5. A failing run leaves a tape, from which it can be replayed.

`turnkeeper simulate` runs it from the command line; docs/simulation.md says how to read it.
"""

from ._campaign import Campaign, TapeFile, replay, run_campaign, silent_logs
from ._disk import Disk, Fault, JournalStrike, SimulatedJournal
from ._oracles import INVARIANTS, Oracles
from ._world import MARKS, ConversationWorld, Options

__all__ = [
    "INVARIANTS",
    "MARKS",
    "Campaign",
    "ConversationWorld",
    "Disk",
    "Fault",
    "JournalStrike",
    "Options",
    "Oracles",
    "SimulatedJournal",
    "TapeFile",
    "replay",
    "run_campaign",
    "silent_logs",
]
