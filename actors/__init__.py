"""The conversation actors: one actor per conversation, the only writer of its event log."""

if __name__ != "turnkeeper.actors":
    raise ImportError(
        f"import turnkeeper.actors, not {__name__}: a second copy would share nothing"
    )

__all__: list[str] = []
