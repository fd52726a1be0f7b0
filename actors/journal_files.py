"""What an operator does to a journal file: verify it, repair it.

Both run in the caller's thread. `verify` reads beside whoever uses the file; `repair` needs it to
itself. Giving room back and deleting are methods of the journal (`SQLiteJournal.vacuum`,
`Journal.delete`), and moving conversations between journals is in `transfer`.
"""

from ._sqlite_repair import Loss, Repair, repair
from ._sqlite_verify import CheckSnapshot, Problem, Verification, verify

__all__ = ["CheckSnapshot", "Loss", "Problem", "Repair", "Verification", "repair", "verify"]
