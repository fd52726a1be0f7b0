"""The `turnkeeper` command."""

from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say which extra it needs."""
    if find_spec("typer") is None:
        raise SystemExit("the turnkeeper command needs its extra: pip install 'turnkeeper[cli]'")
