"""One table says the status and the type of every public error."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from turnkeeper.actors import errors
from turnkeeper.actors.core.admission import AdmissionRefused, Violation
from turnkeeper.actors.errors import (
    ConversationNotFound,
    CorruptLog,
    JournalOutcomeUnknown,
    MessageIdConflict,
    NotConfirmable,
    TurnInProgress,
)
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.actors.gateway.problems import OWN, TABLE, Problem, problem_of
from turnkeeper.runtime import Refused, TurnkeeperError

ROOT = Path(__file__).parents[3]
KINDS = {"Refused", "OwnershipLost", "Unavailable", "OutcomeUnknown", "InvariantViolation"}


@cache
def public_errors() -> dict[str, set[str]]:
    """Every error class of the two packages, with the kinds it is of, read from the sources.

    Those of simulated worlds are left out: they are raised in tests alone.
    """
    bases: dict[str, set[str]] = {}
    for folder in ("actors", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            if "testing" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    bases[node.name] = {ast.unparse(base) for base in node.bases}

    def kinds(name: str) -> set[str]:
        above = set().union(*(kinds(base) for base in bases.get(name, ())))
        return above | ({name} & KINDS)

    found = {name: kinds(name) for name in bases}
    return {name: of for name, of in found.items() if of}


def test_each_public_error_has_a_row_and_each_row_an_error() -> None:
    assert set(public_errors()) == set(TABLE)
    assert len(TABLE) > 40


def test_the_status_says_what_the_kind_of_the_error_says() -> None:
    for name, kinds in public_errors().items():
        problem = TABLE[name]
        if "OutcomeUnknown" in kinds:
            assert problem.status == 504, name
        elif kinds & {"Unavailable", "OwnershipLost"}:
            assert problem.status == 503, name
            assert problem.retry_after_s, name
        elif "InvariantViolation" in kinds:
            assert problem.status == 500, name
        else:
            assert 400 <= problem.status < 600, name
            assert problem.status != 504, name


def test_the_facts_of_a_problem_are_arguments_of_its_error() -> None:
    for name, problem in TABLE.items():
        error = getattr(errors, name, None)
        if error is not None:
            arguments = getattr(error.__init__, "__annotations__", {})
            assert set(problem.facts) <= set(arguments), name


def test_an_unknown_outcome_says_to_send_again_under_the_same_key() -> None:
    problem, _ = problem_of(JournalOutcomeUnknown("the connection broke"))
    assert problem.status == 504
    assert "same Idempotency-Key" in problem.detail


def test_an_error_without_a_row_is_the_problem_of_its_kind() -> None:
    class NewlyRefused(Refused):
        pass

    problem, _ = problem_of(NewlyRefused("x"))
    assert problem is TABLE["Refused"]


@pytest.mark.parametrize("problem", [OWN["unauthenticated"], OWN["forbidden"]])
def test_an_application_with_users_of_its_own_does_not_speak_of_tokens_only(
    problem: Problem,
) -> None:
    """Its `authenticate` may read a cookie."""
    assert "such as a bearer token" in problem.detail or "token" not in problem.detail


def test_a_damaged_log_is_a_fault_that_operators_are_told() -> None:
    assert problem_of(CorruptLog("alice", 3, "x"))[0].status == 500


def test_no_document_holds_an_id_of_the_store_or_what_was_said() -> None:
    planted = "planted-secret"
    event = UserMessageEvent(content=planted)
    raised: list[TurnkeeperError] = [
        ConversationNotFound(planted),
        TurnInProgress(planted, "t1"),
        MessageIdConflict(planted, "m1", 4),
        NotConfirmable(planted, ["c1"]),
        AdmissionRefused(planted, Violation("interleaved_message", event, planted)),
    ]
    for error in raised:
        problem, facts = problem_of(error)
        assert planted not in str(problem.document(facts))


def test_the_facts_of_an_error_do_not_replace_the_members_of_its_document() -> None:
    document = OWN["gone"].document({"status": 1, "type": "x", "seq": 4})
    assert (document["status"], document["type"], document["seq"]) == (
        410,
        "urn:turnkeeper:gone",
        4,
    )


def test_the_types_are_plain_and_each_means_one_status() -> None:
    statuses: dict[str, set[int]] = {}
    for problem in (*TABLE.values(), *OWN.values()):
        assert problem.name.replace("-", "").isalpha()
        assert problem.name.islower()
        statuses.setdefault(problem.name, set()).add(problem.status)
    assert all(len(known) == 1 for known in statuses.values())
