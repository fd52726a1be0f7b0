"""`turnkeeper serve`: the socket that it listens on."""

from __future__ import annotations

import socket

from turnkeeper.actors.cli._serve import _listen


def test_small_parts_of_a_response_are_sent_at_once() -> None:
    """Else the first words of an answer wait for the acknowledgement of the response's head."""
    with _listen("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        with client, served:
            assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
