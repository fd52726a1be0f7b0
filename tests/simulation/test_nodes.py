"""Three nodes over a network that fails: fresh seeds, and the faults that they find."""

from __future__ import annotations

import pytest

from turnkeeper.actors.gateway.node import Node
from turnkeeper.actors.gateway.node_keys import Seen
from turnkeeper.actors.owner import nodes as owner_nodes
from turnkeeper.actors.owner.live_answer import PieceCursor
from turnkeeper.actors.owner.nodes import ThisNode
from turnkeeper.actors.simulation import ConversationWorld, run_campaign, silent_logs
from turnkeeper.runtime.testing import simulate

from ..drawn import drawn, first_seed, is_whole
from .mutants import Mutant, planted
from .nodes import MARKS, NodesWorld, PiecesWorld

SEEDS = 1_000 if is_whole() else 8
MARKED_SEEDS = 10_000
STEPS_MAX = 60_000
SEEDS_MAX = 150
"""Within how many seeds a planted fault is found."""

_AGAIN = (
    "ask_owner(self._region[conversation_id], conversation_id, command, "
    "NodeLink(self._subscriptions.want_pieces.__self__, self))"
)
# The last one takes the most seeds.
FAULTS = (
    (
        "N2",
        Mutant(
            "a command of unknown outcome is forwarded again",
            owner_nodes,
            "_ask_any",
            "except (OwnershipLost, Draining, ConversationsClosed) as error:",
            "except Exception as error:",
        ),
    ),
    (
        "N2",
        Mutant(
            "a nonce is forgotten at once",
            Seen,
            "check",
            "self._nonces[signed.nonce] = now + _REMEMBERED_S",
            "pass",
        ),
    ),
    (
        "C2",
        Mutant(
            "a reader is given again what a relay that broke begins with",
            PieceCursor,
            "_left_of",
            "piece.offset < given.end and given.is_of_same_attempt(piece)",
            "False",
        ),
    ),
    (
        "N3",
        Mutant(
            "a connection that broke counts as never made",
            Node,
            "ask",
            "raise _unknown(conversation_id) from error",
            "raise NotReached from error",
        ),
    ),
    (
        "N4",
        Mutant(
            "a command that did not get an answer waits for one",
            Node,
            "ask",
            "except Broken as error:",
            "except Broken as error:\n        await anyio.sleep(60)",
        ),
    ),
    (
        "N1",
        Mutant(
            "what was forwarded is forwarded again",
            ThisNode,
            "ask",
            "self._region[conversation_id].ask(command)",
            _AGAIN,
        ),
    ),
)


@pytest.mark.sweep
def test_fresh_seeds_of_readers_who_come_and_go_break_no_invariant() -> None:
    campaign = run_campaign(first_seed(), seeds=SEEDS, world=PiecesWorld)

    assert not campaign.failures, "\n".join(map(str, campaign.failures))
    assert campaign.marks["piece over the hop"]
    assert campaign.marks["piece heard"] > SEEDS


@pytest.mark.sweep
def test_fresh_seeds_of_three_nodes_break_no_invariant() -> None:
    campaign = run_campaign(first_seed(), seeds=SEEDS, world=NodesWorld)

    assert not campaign.failures, "\n".join(map(str, campaign.failures))
    assert campaign.marks["forwarded"] > SEEDS // 2


@pytest.mark.slow
def test_many_seeds_of_three_nodes_reach_every_interesting_place() -> None:
    campaign = run_campaign(first_seed(), seeds=MARKED_SEEDS, world=NodesWorld, jobs=2)

    assert not campaign.failures, "\n".join(map(str, campaign.failures))
    assert not MARKS - campaign.marks.keys()


def _world_of(invariant: str) -> ConversationWorld:
    """Return the world that is hard on this invariant."""
    return PiecesWorld() if invariant.startswith("C") else NodesWorld()


def test_every_fault_has_its_place_in_the_code() -> None:
    for _, mutant in FAULTS:
        with planted(mutant):
            pass


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("invariant", "mutant"),
    [*drawn(FAULTS[:-1], 1), pytest.param(*FAULTS[-1], marks=pytest.mark.slow)],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_fault_between_nodes_is_found(invariant: str, mutant: Mutant) -> None:
    with planted(mutant), silent_logs():
        for seed in range(SEEDS_MAX):
            run = simulate(_world_of(invariant), seed=seed, steps_max=STEPS_MAX, is_told=False)
            if run.broken is not None and run.broken.invariant == invariant:
                return
    pytest.fail(f"not found in {SEEDS_MAX} seeds: {mutant.name}")
