"""The conversation actors in a simulated world with faults, to search for broken invariants.

1. It owns a disk, the nodes over it, their clients, and the list of invariants.
2. It promises that the nodes run the production code, unchanged but for its ports; that a seed, or
   a tape, decides everything; and that each invariant is looked at in every run.
3. It does not promise that what it has not found is not there. Threads, SQLite, PostgreSQL and the
   kernel are outside; real processes that are killed are another suite.
4. Everything runs in one thread, in a loop of its own; it needs trio.
5. A failing run leaves a tape, which plays it again.

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
