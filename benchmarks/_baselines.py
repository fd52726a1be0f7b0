"""Each figure, its baseline, and how that could be unfair to either side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Baseline:
    """The thing that a figure is compared with."""

    name: str
    is_: str
    unfair_to_us: str = ""
    unfair_to_it: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures whose names match; `{0}` in `what` is the pattern's first group."""

    pattern: str
    what: str
    baseline: Baseline | None = None


def describe(group: str, name: str) -> tuple[str, Baseline | None]:
    """Return a figure's description and its baseline; an empty text and None if it has none."""
    plain = name.removesuffix("_cpu")
    for figure in FIGURES.get(group, ()):
        if found := re.fullmatch(figure.pattern, plain):
            what = figure.what.format(*found.groups())
            return what if name == plain else f"{what}, in processor time", figure.baseline
    return "", None


BOUND = Baseline(
    "A bound",
    "a fixed number, not a program: nothing is measured for it in the run.",
    "on a slow or busy machine we take longer, but the bound stays the same.",
    "on a fast machine we reach the bound without any merit of our own.",
)
SHORT = Baseline(
    "Ourselves, on less or without the feature",
    "the same call of ours, on a shorter conversation or without the feature.",
    unfair_to_it="the ratio shows how a cost grows, but not whether the cost was small to begin "
    "with.",
)
SMALL = Baseline(
    "Ourselves, at the small end",
    "the same call of ours with a smaller quantity. Rows without a goal have to grow: each "
    "reader is woken for each event; a conversation is opened and forked from its snapshot, "
    "which holds its view and, up to a bound, its newest message ids.",
    unfair_to_it=SHORT.unfair_to_it,
)
LOOP = Baseline(
    "The loop's limit",
    "a hand-written queue with no actor around it: the loop's own queue, or a deque and one "
    "waiter. Its reader calls a function for each message, as an actor its handler, and an ask "
    "gets what that returns.",
    "the queue supervises, bounds, times out, counts and cleans up nothing.",
    "a `def` handler of ours can run in the asker's own stack, which the queue's reader never"
    " does.",
)
ANYIO = Baseline(
    "anyio memory stream",
    "`create_memory_object_stream(1024)` with a task that reads it.",
    "the stream has no handler to call.",
    "the stream promises more: several readers, and an end that all of them see.",
)
TASK = Baseline(
    "A bare task",
    "a task that does nothing, started and awaited.",
    "a bare task has no name and no mailbox, and answers nothing.",
    "our actors share pooled tasks, so most of them start no task at all.",
)
PYKKA = Baseline(
    "Pykka",
    "its newest release, in a separate environment and process. Each of its actors is a thread.",
    "both handlers return a number, but ours is counted and supervised.",
    "its threads may use several cores and may block; our actors may not. Here a single "
    "thread talks to it, which is its worst case.",
)
AUTOGEN = Baseline(
    "AutoGen core",
    "`SingleThreadedAgentRuntime` of its newest release, in a separate process.",
    unfair_to_it="it looks up types, serializers and subscriptions for each message, because its "
    "messages may go to programs in other languages; ours may not.",
)
THESPIAN = Baseline(
    "Thespian",
    "`simpleSystemBase` of its newest release, which runs all actors in the caller's thread, "
    "in a separate process.",
    "its messages need no task switch, and its handlers cannot wait for anything.",
    "it is made for messages between processes and machines, which this system leaves out.",
)
XOSCAR = Baseline(
    "xoscar",
    "its newest release, a pool without worker processes, in a separate process.",
    unfair_to_it="for each message it looks up the actor's address, since the actor may be on "
    "another machine.",
)
ONE_PROCESS = Baseline(
    "One process",
    "one of the two processes with its conversations, while the other is idle.",
    "two processes share the caches, the memory and the disk of one machine.",
    "a process alone already uses part of the second core, for its writing thread and the "
    "server; the baseline by cores allows for that.",
)
PYDANTIC = Baseline(
    "import pydantic",
    "the CPU time of a fresh interpreter that imports pydantic, or anyio, asyncio and one model.",
    "we import pydantic too, so we can never be faster.",
)
FOLD = Baseline(
    "A bare fold",
    "the view's own fold over the same events, with no checks around it.",
    unfair_to_it="the fold is our own code: the ratio shows what we add to it, not how fast it is.",
)
VALIDATE = Baseline(
    "pydantic's own rate",
    "`validate_json` over the same rows, in a loop, from memory: each row by the validator of its "
    "kind, and all events kept, as we do.",
    "pydantic alone reads no file, checks no checksum and folds nothing.",
)
COMMIT = Baseline(
    "One raw commit",
    "SQLite alone, in WAL mode at FULL and with our other settings: one row of one table, "
    "committed. On a fast disk it takes less, so what we compute counts for more.",
    "its table has no index and no checksum, and it needs no thread beside the caller's.",
)
PAYLOAD = Baseline(
    "The payload", "the bytes of the events' JSON.", "no store can write less without compression."
)
OPENHANDS = Baseline(
    "OpenHands SDK",
    "its newest release, in a separate environment (Python 3.12), with events of the same "
    "kinds and sizes and a model that answers at once.",
    "it does not guard against a second writer, and keeps no state for a restart.",
    "it syncs one file for each event, without group commits. Its step does more than ours: "
    "its agent, prompts and tools are a whole coding agent. It runs on another Python, "
    "and separately, not in turn with us.",
)
RAW_SQLITE = Baseline(
    "Raw SQLite",
    "one table with one unique index over event ids, the least that refuses a known id. It "
    "has our settings (page size, cache, secure_delete, FULL, the length of the log), and one"
    " statement and one commit for each round of the conversations that write at once.",
    "it has no epoch, no chained checksums, no head for each conversation and no queue, and "
    "its rows are prepared beforehand. It has no lists: the first append of a conversation "
    "here also writes its row in them, with up to nine indexes, and a run times some of these "
    "appends. With one writer, it has no hop between threads.",
    "its groups have one row for each conversation; ours can be larger.",
)
SMALLEST = Baseline(
    "The smallest honest program",
    "`_smallest.py`, hand-written for this benchmark, on the same backend. It has an owner "
    "and a mailbox for each conversation, validates events with pydantic, checks ids, checks "
    "epoch and place in the transaction, chains checksums, commits in one thread all that "
    "waits, and answers after the commit.",
    "it has no supervision, admission, bounds, view, readers, snapshots or lists, and does "
    "not know ids from before its start.",
)
RAW_POSTGRES = Baseline(
    "Raw PostgreSQL",
    "one array insert for each commit, into a table with our keys, on the same server.",
    "it checks no epoch, chains no checksums, and its rows are prepared beforehand. It has no "
    "lists: the first append of a conversation here also writes its row in them, with up to "
    "nine indexes.",
    "it uses one connection and one statement, as we do; a COPY could be faster.",
)
BEST_PEER = Baseline(
    "The best peer",
    "in each round, the fastest of the peers that ran, with up to a hundred conversations. "
    "Files are opened before the clock starts.",
    "a session's item is a plain dictionary; our event is validated, admitted, folded, and "
    "protected against a second owner.",
    "it commits one item at a time and cannot group them; it was not made for one process with "
    "many conversations.",
)
SESSION = Baseline(
    "OpenAI Agents SDK",
    "`SQLiteSession` of its newest release, one `add_items` of one item, in its own environment.",
    "it checks no owner and no known ids, and chains no checksums. It waits for the disk as "
    "we do: WAL at SQLite's default, which is FULL.",
    "each call goes to a thread and back; a program that adds several items in one call pays "
    "for that once.",
)
EVENTSOURCING = Baseline(
    "eventsourcing",
    "an `Application` of its newest release over its SQLite module, one event and one `save` at a "
    "time, in its own environment; the aggregate is kept in memory.",
    "it checks no owner, chains no checksums, and runs in the caller's thread, without a loop.",
    "it makes a domain event and a notification of each event, which programs may need.",
)
LANGGRAPH = Baseline(
    "LangGraph",
    "a graph of one node with `SqliteSaver` of its newest release, `durability='sync'`.",
    unfair_to_it="it stores a whole checkpoint at each step, so that a graph can resume at any "
    "step; our append does less.",
)
NO_READER = Baseline(
    "Without subscribers",
    "the same appends, with no reader.",
    unfair_to_it="the readers run in the same process and share its core.",
)
RAW_SQL = Baseline(
    "Raw SQL for the same rows",
    "one statement over our indexes, in a thread beside the loop, with the JSON of its rows "
    "parsed.",
    "it checks no checksums, makes no objects, and has all rows in one table.",
    "the indexes are ours: a schema made only for this list could be faster.",
)
FTS = Baseline(
    "FTS5 by hand",
    "an FTS5 table of the same texts and owners, built and queried as its manual says.",
    "it splits words by SQLite's own rules, and knows nothing of deletion or of the view.",
    "with another order, or with its own ranking, the table could be faster.",
)
TSVECTOR = Baseline(
    "tsvector by hand",
    "a `tsvector` column of the same texts with a GIN index, built and queried as its manual says.",
    "it splits words by PostgreSQL's own rules, and knows nothing of deletion or of the view.",
    "with another order, or with its own ranking, the table could be faster.",
)
IN_PROCESS = Baseline(
    "The library in process",
    "the same messages by `send` in one process.",
    "it has no HTTP at all.",
)
PLAIN = Baseline(
    "Plain FastAPI",
    "a route of the same server that sends the same pieces from memory, in the same form.",
    "it stores nothing, has no turns, and cannot resume a stream.",
    "a hand-written ASGI application would be faster than FastAPI.",
)
DURABLE = Baseline(
    "Plain FastAPI, a commit first",
    "the same route, after one row is committed to SQLite in WAL mode at FULL, in a thread.",
    "it keeps no log, has no turns, and cannot resume a stream.",
    "its one connection has to wait for a thread of the shared pool.",
)
ONE_NODE = Baseline(
    "One node",
    "the same conversations on one node alone, while the others are idle.",
    "each further node has its own event loop to wake and its own connections, but no larger "
    "commits.",
    "all nodes share the cores of one machine with the database, so by the clock one node "
    "alone has more cores.",
)
NO_HOP = Baseline(
    "No hop",
    "the same work, asked of the node that owns the conversations.",
    "both nodes are on one machine, so no command waits for a network.",
)
TURN = Baseline(
    "A turn", "one turn of two model calls and a tool. These figures are counts, not times."
)
SHARE = Baseline("The whole", "the total of which the figure is a part.")
DAYS = Baseline(
    "Itself, at another time or anew",
    "the live rows, one day, the first day, or the same rows in newly made tables.",
    unfair_to_it="the days are seconds long. Autovacuum checks once a second, with PostgreSQL's "
    "defaults otherwise, so it comes late by a good part of a day.",
)
NOTIFYING = Baseline(
    "Commits that notify",
    "the same rows by the same number of connections, with a `NOTIFY` in each commit, as "
    "another library might do.",
    unfair_to_it="its readers hear of each commit at once, and never of one that was rolled back.",
)
WAKE = Baseline(
    "A bare wake",
    "the same number of tasks, each woken equally often by the same primitive, and waiting again.",
    "these tasks take no item when they are woken.",
    "on asyncio, a plain future for each task would save one call.",
)

FIGURES: Mapping[str, Sequence[Figure]] = {
    "runtime": (
        Figure(r"tell_(?:async_handler_)?(asyncio|trio)", "a `tell` to an actor on {0}", LOOP),
        Figure(r"tell_vs_anyio_(\w+)", "a `tell` on {0}", ANYIO),
        Figure(r"ask_(asyncio|trio)", "an `ask` through the mailbox on {0}", LOOP),
        Figure(r"ask_100_callers_(\w+)", "an `ask` of 100 callers at once on {0}", LOOP),
        Figure(r"ask_inline_(asyncio|trio)", "an `ask` of a `def` handler on {0}", LOOP),
        Figure(
            r"ask_begun_in_place_(asyncio|trio)",
            "an `ask` whose handler begins in the asker's stack, on {0}",
            LOOP,
        ),
        Figure(r"ask_deadline_(\w+)", "an `ask` with a deadline on {0}", SHORT),
        Figure(
            r"spawn_and_ask_(?:async_handler_)?(\w+)", "an actor spawned and asked on {0}", TASK
        ),
        Figure(r"idle_actor_(\w+)", "the memory of an idle actor on {0}", BOUND),
        Figure(r"(tell|ask)_vs_pykka", "{0}, on asyncio", PYKKA),
        Figure(r"ask_(?:inline_)?vs_autogen", "an `ask`, on asyncio", AUTOGEN),
        Figure(r"ask_begun_in_place_vs_autogen", "an `ask` of a `def` handler", AUTOGEN),
        Figure(r"(tell|ask)_vs_thespian", "{0}, on asyncio", THESPIAN),
        Figure(r"ask_begun_in_place_vs_thespian", "an `ask` of a `def` handler", THESPIAN),
        Figure(r"(tell|ask)_vs_xoscar", "{0}, on asyncio", XOSCAR),
    ),
    "core": (
        Figure(r"import", "the names of a first program imported", PYDANTIC),
        Figure(r"import_and_make", "conversations opened, which loads the rest", PYDANTIC),
        Figure(r"view_(\d+)", "the view for a step at {0} events", BOUND),
        Figure(r"indices_(\d+)", "where a view of {0} may be cut", BOUND),
        Figure(
            r"messages_((?!vs_)\w+)_(\d+)", "{0}'s messages at {1} events, 2 of them new", BOUND
        ),
        Figure(r"rebuild_(?:thinking_)?(\d+)", "a view built from {0} events", FOLD),
        Figure(r"memory_condensed_(\d+)", "a state of {0} events, condensed to 240", SHORT),
        Figure(r"memory_condensed_(\d+)_tail", "the same, with its bounded tail", SHORT),
        Figure(r"step_(\d+)", "a whole step at {0} events", SHORT),
        Figure(
            r"step_beside_(\d+)_commits_(\d+)",
            "a step at {1} events, less {0} raw commits that are made right after it",
            BOUND,
        ),
        Figure(r"open_(\d+)", "a conversation of {0} events opened", VALIDATE),
        Figure(r"open_snapshot_(\d+)", "the same from a snapshot", COMMIT),
        Figure(r"open_snapshot_(\d+)_validated", "the same from a snapshot", VALIDATE),
        Figure(r"disk_(\d+)", "the file's bytes for each of {0} events", PAYLOAD),
        Figure(r"(\w+)_vs_openhands_(\d+)", "{0} at {1} events", OPENHANDS),
        Figure(r"reopened_differently", "logs whose view is another when reopened", OPENHANDS),
    ),
    "journal": (
        Figure(r"sqlite_(asyncio|trio)_(\d+)", "the journal alone, {1} conversations", RAW_SQLITE),
        Figure(r"sqlite_at_(\d+)_in_(\d+)", "appends at {0} events, in {1}", SHORT),
        Figure(r"whole_path_(\d+)", "a whole append, {0} conversations", RAW_SQLITE),
        Figure(
            r"whole_path_(\d+)_vs_smallest_(asyncio|trio)",
            "a whole append, {0} conversations",
            SMALLEST,
        ),
        Figure(r"subscriber_each", "an append with one reader each", NO_READER),
        Figure(r"postgres_(\d+)", "PostgreSQL alone, {0} conversations", RAW_POSTGRES),
        Figure(r"one_at_(\d+)_vs_openai", "one append at {0} events, the journal alone", SESSION),
        Figure(
            r"one_at_(\d+)_vs_eventsourcing",
            "one append at {0} events, the journal alone",
            EVENTSOURCING,
        ),
        Figure(
            r"one_at_(\d+)_vs_langgraph", "one append at {0} events, the journal alone", LANGGRAPH
        ),
        Figure(r"one_vs_openai", "one append, in turn with the session", SESSION),
        Figure(r"one_whole_path_vs_openai", "the same by a conversation", SESSION),
        Figure(r"whole_path_(\d+)_vs_best_peer", "a whole append, {0} conversations", BEST_PEER),
        Figure(
            r"four_together_(\d+)_vs_best_peer",
            "an event of four in one call, {0} conversations",
            BEST_PEER,
        ),
    ),
    "turns": (
        Figure(r"turn_(\d+)", "a turn of two model calls and a tool at {0} events", SHORT),
        Figure(r"turn_beside_(\d+)_commits_(\d+)", "the same, less {0} commits", BOUND),
        Figure(r"send_while_busy_p99", "`send` while a tool hangs, 99th percentile", COMMIT),
        Figure(r"turns_at_once_(\d+)", "{0} turns at once, each", SHORT),
        Figure(r"piece_to_each_of_(\d+)_readers", "a piece of an answer, to one of {0}", BOUND),
        Figure(r"memory_in_a_turn", "the memory of a turn that waits", SHORT),
        Figure(r"step_vs_openhands_(\d+)", "a turn of one model call at {0} events", OPENHANDS),
    ),
    "cores": (
        Figure(r"cores_files", "an append, by two processes with files of their own", ONE_PROCESS),
        Figure(r"cores_postgres", "an append, by two processes on one PostgreSQL", ONE_PROCESS),
    ),
    "pauses": (
        Figure(r"reader_(event|piece)_(\w+)_beside_wake", "one more reader of {0}s, {1}", WAKE),
        Figure(r"reader_(event|piece)_(\w+)", "one more reader of {0}s, {1}", BOUND),
        Figure(
            r"late_snapshot_(written|read)_(\d+)",
            "the longest that a task waits while a snapshot is {0}, of a view of {1} events",
            BOUND,
        ),
        Figure(r"late_plain_(\d+)", "the longest the loop was late, {0} active", BOUND),
        Figure(r"late_frozen_(\d+)", "the same with `freeze_objects`", BOUND),
        Figure(r"collection_plain_(\d+)", "the longest collection, {0} active", BOUND),
        Figure(r"collection_frozen_(\d+)", "the same with `freeze_objects`", BOUND),
        Figure(r"append_p99_\w+_(\d+)", "an append's 99th percentile, {0} active", SHORT),
        Figure(r"grown_by_a_passivation", "objects left by an opening and a passivation", BOUND),
        Figure(r"memory_active_(\d+)", "the memory of one of {0} active conversations", BOUND),
        Figure(r"objects_active_(\d+)", "its objects that the collector looks at", BOUND),
    ),
    "growth": (
        Figure(
            r"(append|send)_by_readers",
            "{0}, by readers: each is woken, for the price in `pauses.reader_event_…`",
            SMALL,
        ),
        Figure(
            r"activation_by_readers",
            "activation, by readers: each is woken as the owner ends, and as the next one begins",
            SMALL,
        ),
        Figure(
            r"(activation|forking)_by_view",
            "{0}, by events of the view: its snapshot has them all",
            SMALL,
        ),
        Figure(
            r"(activation|forking)_by_known_ids",
            "{0}, by message ids that the log knows: its snapshot has the newest 1,024",
            SMALL,
        ),
        Figure(r"(\w+?)_by_known_ids", "{0}, by message ids that the log knows", SMALL),
        Figure(r"(\w+?)_by_stored", "{0}, by conversations stored", SMALL),
        Figure(r"(\w+?)_by_active", "{0}, by conversations active", SMALL),
        Figure(r"(\w+?)_by_events", "{0}, by events of the log", SMALL),
        Figure(r"(\w+?)_by_view", "{0}, by events of the view", SMALL),
        Figure(r"(\w+?)_by_depth", "{0}, by forks that the conversation is behind", SMALL),
        Figure(r"(\w+?)_by_readers", "{0}, by readers", SMALL),
    ),
    "lists": (
        Figure(r"page_among_(\d+)", "a page of 50 rows among {0} conversations", RAW_SQL),
        Figure(r"postgres_page_among_(\d+)", "the same in PostgreSQL", RAW_SQL),
        Figure(r"turns_(\d+)_listed", "a turn of each of {0} conversations", SHORT),
        Figure(
            r"postgres_turns_(\d+)_listed",
            "a turn of each of {0} conversations, in PostgreSQL",
            SHORT,
        ),
    ),
    "search": (
        Figure(r"search_1", "20 hits of one word", FTS),
        Figure(r"search_2", "20 hits of two words", FTS),
        Figure(r"search_3", "20 hits of a word and the beginning of one", FTS),
        Figure(r"postgres_search_1", "20 hits of one word, in PostgreSQL", TSVECTOR),
        Figure(r"postgres_search_2", "20 hits of two words, in PostgreSQL", TSVECTOR),
        Figure(r"postgres_search_3", "20 hits of a word and the beginning of one, there", TSVECTOR),
        Figure(r"turn_searched", "a turn, with search", SHORT),
    ),
    "gateway": (
        Figure(r"messages", "the server's CPU for a message", IN_PROCESS),
        Figure(r"stream_speed", "the server's CPU for an answer of 2,000 pieces", PLAIN),
        Figure(r"stream_first", "the time to the first piece, as it is", PLAIN),
        Figure(r"stream_first_allowed", "the same, less 20 ms in which pieces may merge", PLAIN),
        Figure(r"stream_first_durable", "the time as it is, beside a route that commits", DURABLE),
        Figure(r"stream_first_new", "the same, in a conversation that begins with it", DURABLE),
        Figure(r"stream_first_ag_ui", "the same again, on the route of AG-UI", DURABLE),
        Figure(r"ack_p99_500_streams", "a message accepted, with 500 streams open", SHORT),
        Figure(r"idle_stream", "the memory of an open stream", BOUND),
        Figure(r"memory_200_answers", "the memory after rounds of 200 answers at once", SHORT),
    ),
    "nodes": (
        Figure(
            r"turns_(\d)_nodes", "a turn, by {0} nodes that each own what they are asked", ONE_NODE
        ),
        Figure(r"turns_hop_two_thirds", "a turn, two thirds of them asked elsewhere", NO_HOP),
        Figure(r"turns_hop_all", "a turn, each asked elsewhere", NO_HOP),
        Figure(r"commands_hop_all", "a title given, each asked elsewhere", NO_HOP),
        Figure(r"turn_server", "the server's part of a turn", SHARE),
        Figure(r"turn_events", "events", TURN),
        Figure(r"turn_commits_alone", "commits, one turn after the other", TURN),
        Figure(r"turn_commits_many", "commits, many turns at once", TURN),
        Figure(r"turn_(stored|wal)", "bytes {0}, for each turn", PAYLOAD),
        Figure(r"turn_wal_cold", "the same in pages unchanged since the checkpoint", SHORT),
        Figure(r"(\w+)_hot_updates", "rows of `{0}` updated in place, for each turn", SHARE),
        Figure(r"(\w+)_dead_rows", "rows of `{0}` left for vacuum, for each turn", TURN),
        Figure(r"days_turn_server", "the server's part of a turn on the last day", DAYS),
        Figure(r"days_deleted", "the bytes that stay of a deleted conversation", SHORT),
        Figure(r"days_renewals_hot", "renewals of a lease that are made in place", SHARE),
        Figure(r"days_(\w+)_dead_rows", "the most dead rows of `{0}` at a day's end", DAYS),
        Figure(r"days_(\w+)_vacuums", "vacuums of `{0}` in a day", DAYS),
        Figure(r"days_(\w+)_size", "the bytes of `{0}` with its indexes after the days", DAYS),
        Figure(
            r"event_server_cpu_(\d+)", "the server's time for an event, {0} a commit", RAW_POSTGRES
        ),
        Figure(r"event_(\d+)", "an event by the clock, {0} a commit", RAW_POSTGRES),
        Figure(r"commits_of_(\d)_writers", "a commit of {0} connections at once", NOTIFYING),
        Figure(r"notice_to_(\d+)", "the server's time for a `NOTIFY` that {0} hear", SHORT),
        Figure(r"turn_beside_(\d+)_readers", "a turn beside {0} readers elsewhere", NO_READER),
        Figure(r"notices", "`NOTIFY`s for these commits", BOUND),
        Figure(r"notice_payload", "the bytes of a `NOTIFY`", BOUND),
        Figure(r"rows_looked_at", "rows that the readers' node reads for them", SHARE),
    ),
}
