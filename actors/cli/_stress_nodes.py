"""`turnkeeper stress --nodes`: several processes on one PostgreSQL database, under many failures.

The users, their history and its checker are those of `turnkeeper torture`. This module runs the
processes, which serve the library's own test agent, and the relays between them and in front of the
database.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NoReturn

import anyio
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import Ports, TurnkeeperError

from ._display import many, print_list, printable
from ._exits import BROKEN, INTERRUPTED, SEEDS, UNUSABLE, fail, how_stopped, no_folder
from ._torture import Display, report_verdict

if TYPE_CHECKING:
    from ..torture.history import How

__all__ = ["stress_nodes"]

AGENT = "turnkeeper.actors.cli.stress_agent:echo"
LEASE_S = 3.0
USERS = 24
_CONNECT_S = 10


def stress_nodes(
    nodes: int,
    postgres: str,
    *,
    duration: float,
    kills: int,
    backend: str,
    seed: int | None,
    as_json: bool,
    restart: str | None,
    beside: Path | None,
) -> NoReturn:
    """Run the nodes, check the history, print the verdict, and exit."""
    for package, extra in (("psycopg", "postgres"), ("fastapi", "gateway"), ("h11", "torture")):
        if importlib.util.find_spec(package) is None:
            fail(UNUSABLE, f"--nodes needs turnkeeper[{extra}]: {package} is not installed")
    from ..torture.checker import check  # noqa: PLC0415 - an extra
    from ..torture.machines import KINDS, Beside, Machines  # noqa: PLC0415 - with it
    from ..torture.server import ServerLost  # noqa: PLC0415 - with it
    from ..torture.torture import Plan, Torture  # noqa: PLC0415 - with it

    ports = Ports()
    seed = ports.random.randrange(SEEDS) if seed is None else seed
    errors = Console(stderr=True, highlight=False)
    schema = f"stress_{ports.ids.new()[24:]}"
    try:
        folder = Path(tempfile.mkdtemp(prefix="turnkeeper-stress-"))
    except OSError as error:
        no_folder(error)
    history = folder / "history.jsonl"
    kept = f"the history is {history}, the database's schema {schema}"
    errors.print(Text(f"{USERS} users of {nodes} nodes for {duration:g} s, seed {seed}"))
    key_file = folder / "node.keys"
    key_file.touch(mode=0o600)
    key_file.write_text(os.urandom(32).hex())
    restarted: list[How] = [] if restart is None else ["database restarted"]
    try:
        machines = Machines(
            nodes,
            ports,
            agent=AGENT,
            conninfo=postgres,
            schema=schema,
            lease_s=LEASE_S,
            key_file=key_file,
            backend=backend,
            random=Random(f"{seed} machines"),
            kinds=[*KINDS[1:], *[KINDS[0]] * kills, *restarted],
            restart=None if restart is None else shlex.split(restart),
            beside=None if beside is None else Beside(beside, _agent_of_others(folder)),
        )
        _check_reachable(postgres, schema)
    except ValueError as error:
        shutil.rmtree(folder)
        fail(UNUSABLE, str(error))
    except KeyboardInterrupt:  # the check may wait for a database that does not answer
        shutil.rmtree(folder)
        fail(INTERRUPTED, how_stopped())
    with history.open("w", encoding="utf-8") as file, Display(errors) as display:
        plan = Plan(
            seed=seed,
            users=USERS,
            seconds=duration,
            protocols=("own", "ai-sdk", "ag-ui"),
            kills=machines.count,
        )
        made = Torture(
            plan, machines.site, server=machines, file=file, ports=ports, changed=display.changed
        )
        display.show(made)
        try:
            anyio.run(made.run)
        except KeyboardInterrupt:
            fail(INTERRUPTED, f"stopped, and nothing is checked: {kept}")
        except ServerLost as lost:
            known = made.history.counts["acknowledged"]
            told = printable(str(lost))
            fail(BROKEN if known else UNUSABLE, f"{told}; {many(known, 'acknowledgement')}: {kept}")
        except BaseException:
            errors.print(Text(f"turnkeeper: the stress itself failed: {kept}"), soft_wrap=True)
            raise
    verdict = check(made.history.records)
    is_sound = verdict.is_sound and not made.unread
    if made.unread:
        print_list(errors, "these could not be read at the end:", made.unread)
    if is_sound:
        _drop(postgres, schema)
        shutil.rmtree(folder)
    else:
        errors.print(Text(kept), soft_wrap=True)
    report_verdict(verdict, as_json=as_json, history=None, status=BROKEN if made.unread else 0)


def _check_reachable(postgres: str, schema: str) -> None:
    """Raise `ValueError` if the database cannot be reached: then no failure could be survived."""
    import psycopg  # noqa: PLC0415 - an extra

    from ..journals.postgres.journal import PostgresJournal  # noqa: PLC0415 - as above
    from ..journals.postgres.schema import refusal  # noqa: PLC0415 - as above

    PostgresJournal(postgres, schema=schema)  # refuses an address that would be misread
    try:
        with refusal(schema):
            psycopg.connect(postgres, connect_timeout=_CONNECT_S).close()
    except TurnkeeperError as error:
        raise ValueError(str(error)) from error


def _agent_of_others(folder: Path) -> str:
    """Write the agent to a file, as another version may not have it; return the path."""
    text = Path(__file__).with_name("stress_agent.py").read_text(encoding="utf-8")
    path = folder / "agent.py"
    path.write_text(text.replace("from ..", f"from {__package__.rpartition('.')[0]}."))
    return f"{path}:echo"


def _drop(postgres: str, schema: str) -> None:
    import psycopg  # noqa: PLC0415 - an extra

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
