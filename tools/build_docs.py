"""Builds the documentation site. Usage: python tools/build_docs.py [FOLDER].

Pages are the files of `docs/`; two kinds are made here. A link to a file elsewhere in the
repository leads to a page that shows that file. Each public name has its place on one page of the
reference, which is written from its docstring. The site is built strictly: a warning fails it.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import ModuleType

ROOT = Path(__file__).parent.parent
PACKAGES = {"": "top", "runtime": "runtime", "actors": "actors"}
"""Where the folders stand under `turnkeeper`."""

REFERENCE = {
    "conversations": (
        "Conversations",
        "turnkeeper.actors",
        (
            "Conversations",
            "ConversationConfig",
            "Conversation",
            "Follower",
            "Turn",
            "TurnEnd",
            "OnOverlap",
            "Sent",
            "Appended",
            "Duplicate",
            "Rejected",
            "AppendResult",
            "LoggedEvent",
            "Deletion",
            "Erasure",
            "ConversationInfo",
            "ConversationPage",
            "ListedConversation",
            "SearchResults",
            "SearchHit",
            "FileContent",
            "ImageContent",
        ),
    ),
    "agents-and-tools": (
        "Agents and tools",
        "turnkeeper.actors",
        (
            "Agent",
            "agent",
            "TurnContext",
            "Task",
            "ToolAgent",
            "Tool",
            "tool",
            "Tools",
            "ToolContext",
            "ToolSpec",
            "ToolCall",
            "ToolResult",
            "BeforeCall",
            "AfterCall",
            "ConfirmationPolicy",
            "ConfirmRisky",
            "Prices",
            "agents.watcher.Watcher",
        ),
    ),
    "models": (
        "Models",
        "turnkeeper.actors",
        ("Model", "ModelRequest", "ModelResponse", "ScriptedModel", "TextDelta", "TokenUsage"),
    ),
    "providers": (
        "Models of providers",
        "turnkeeper.actors.models",
        (
            "openai.OpenAIChatModel",
            "openai.OpenAIResponsesModel",
            "anthropic.AnthropicModel",
            "base.ModelError",
            "base.ModelUnavailable",
            "base.ModelRefusal",
            "base.ContextOverflow",
            "base.MalformedHistory",
            "messages.to_llm_messages",
            "messages.LLMMessages",
            "messages.LLMShape",
            "messages.OpenCalls",
            "summaries.summarizing_condenser",
            "summaries.ModelSummary",
        ),
    ),
    "view": (
        "View, condensing and state",
        "turnkeeper.actors",
        (
            "View",
            "Violation",
            "Condenser",
            "RollingCondenser",
            "SummarizingCondenser",
            "PipelineCondenser",
            "Need",
            "Proposal",
            "core.condensation.find_runs",
            "StuckDetector",
            "Circle",
            "Metrics",
            "AgentExecutionStatus",
            "ConversationState",
        ),
    ),
    "journals": (
        "Journals",
        "turnkeeper.actors",
        (
            "Journal",
            "MemoryJournal",
            "MemoryStore",
            "SQLiteJournal",
            "PostgresJournal",
            "Event",
            "FrozenObject",
        ),
    ),
    "journal-port": (
        "Journals, the port and tools",
        "turnkeeper.actors",
        (
            "journal.Claim",
            "journal.FoundMessage",
            "journal.ListOrder",
            "journal.ListPage",
            "journal.ListQuery",
            "journal.ListRow",
            "journal.Listing",
            "journal.LogPages",
            "journal.Record",
            "journal.Rejection",
            "journal.SearchPage",
            "journal.SearchQuery",
            "journal.Snapshot",
            "journal.StoredRecord",
            "journals.contract.JournalContract",
            "journals.files.verify",
            "journals.files.verify_logs",
            "journals.files.check_event",
            "journals.files.check_folds",
            "journals.files.check_listing",
            "journals.files.repair",
            "journals.files.reindex",
            "journals.transfer.export_lines",
            "journals.transfer.import_lines",
            "journals.transfer.delete_unchanged",
            "recordings.exporting.openai_line",
            "recordings.importing.import_recorded",
            "recordings.transcripts.parse_recorded",
            "recordings.transcripts.RecordedConversation",
            "recordings.replies.recorded_replies",
        ),
    ),
    "events": ("Events", "turnkeeper.actors.events", ()),
    "errors": ("Errors of conversations", "turnkeeper.actors.errors", ()),
    "blocking": ("Synchronous callers", "turnkeeper.actors.blocking", ()),
    "gateway": ("Gateway", "turnkeeper.actors.gateway", ()),
    "integrations": (
        "Integrations",
        "turnkeeper.actors.integrations",
        ("openai_agents", "mcp", "pydantic_ai", "otel"),
    ),
    "runtime": ("Runtime", "turnkeeper.runtime", ()),
    "lowlevel": ("Runtime, low level", "turnkeeper.runtime.lowlevel", ()),
    "testing": ("Testing", "turnkeeper.runtime.testing", ()),
}
"""The pages of the reference: a title, a module, and the names of it; none: all of its names."""

LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
LANGUAGES = {".py": "python", ".c": "c", ".mjs": "javascript", ".md": "markdown", ".json": "json"}


def public_names(module: str) -> list[str]:
    """Return the names that a module of turnkeeper exports."""
    loaded = import_module(module)
    names = getattr(loaded, "__all__", None) or vars(loaded)
    return [
        name
        for name in names
        if not name.startswith("_") and _is_of(getattr(loaded, name), module, loaded)
    ]


def _is_of(value: object, module: str, loaded: ModuleType) -> bool:
    """Return whether a module without `__all__` defines this value itself."""
    return hasattr(loaded, "__all__") or getattr(value, "__module__", "") == module


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield each page of the reference: its file's name, its text."""
    for name, (title, module, listed) in REFERENCE.items():
        names = listed or public_names(module)
        parts = "\n".join(f"::: {module}.{each}\n" for each in names)
        yield f"{name}.md", f"# {title}\n\n`{module}`\n\n{parts}"


class Pages:
    """Writes the pages into a folder, and with each the files of the repository it links to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown: set[str] = set()

    def write(self, path: PurePosixPath, text: str, *, of: PurePosixPath) -> None:
        """Write a page; `of` is the file in the repository that its links are relative to."""

        def lead(link: re.Match[str]) -> str:
            target = link[2]
            if "://" in target or target.startswith("mailto:"):
                return link[0]
            found = (ROOT / of.parent / target).resolve().relative_to(ROOT)
            page = self._page_of(PurePosixPath(found.as_posix()))
            up = "../" * (len(path.parts) - 1)
            return f"{link[1]}{up}{page}{link[3]}"

        place = self._folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(LINK.sub(lead, text))

    def _page_of(self, file: PurePosixPath) -> str:
        """Return the page that a file of the repository is on; make it if it has none."""
        if file.parts[0] == "docs":
            return str(PurePosixPath(*file.parts[1:]))
        page = f"source/{file}.md"
        if page not in self._shown:
            self._shown.add(page)
            self._show(file, PurePosixPath(page))
        return page

    def _show(self, file: PurePosixPath, page: PurePosixPath) -> None:
        found = ROOT / file
        if found.is_dir():
            parts = sorted(
                each
                for each in found.iterdir()
                if each.name != "__pycache__" and not each.name.startswith(".")
            )
            lines = [f"- [{each.name}]({each.name})" for each in parts]
            self.write(page, f"# {file}\n\n" + "\n".join(lines) + "\n", of=file / "_")
        elif found.suffix == ".md":
            self.write(page, found.read_text(), of=file)
        else:
            language = LANGUAGES.get(found.suffix, "text")
            place = self._folder / page
            place.parent.mkdir(parents=True, exist_ok=True)
            text = found.read_text()
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
            place.write_text(f"# {file}\n\n{fence}{language}\n{text}{fence}\n")


def assemble(folder: Path) -> None:
    """Write all that the site is built from into a folder: pages, and the packages as one tree."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = Pages(folder / "pages")
    for found in sorted((ROOT / "docs").rglob("*")):
        path = PurePosixPath(found.relative_to(ROOT / "docs").as_posix())
        if found.suffix == ".md":
            pages.write(path, found.read_text(), of="docs" / path)
        elif found.is_file():
            (folder / "pages" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, folder / "pages" / path)
    for name, text in reference_pages():
        pages.write(PurePosixPath("reference", name), text, of=PurePosixPath("docs", name))
    for package, source in PACKAGES.items():
        shutil.copytree(
            ROOT / source,
            folder / "packages" / "turnkeeper" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    shutil.copy(ROOT / "zensical.toml", folder)


def main(folder: Path) -> None:
    """Assemble and build; the site is in `site` of the folder."""
    assemble(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    ended = subprocess.run(command, cwd=folder, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    print(f"the site is in {folder / 'site'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
