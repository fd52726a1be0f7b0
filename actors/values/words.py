"""The words of a text, as search knows them: the same for stored texts and for queries.

A text is normalized (NFKD) and case-folded. Words are its longest runs of letters, digits and the
signs that stand inside words; all else separates. Accents are left out, so `café` is `cafe` and
finds `CAFÉ`; joiners and soft hyphens are left out too. Each ideograph and each kana is a word of
its own, since nothing separates them. Of a longer word, the first 64 characters count.

A journal that stores words stores the number of these rules with them: `WORD_RULES`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

__all__ = ["TEXT_BYTES_MAX", "WORD_RULES", "find_words", "snippet", "words_of"]

WORD_RULES = 1
"""Rises with each change of what is a word; an index of other rules is made again."""

TEXT_BYTES_MAX = 64 << 10
"""The bytes of a text, in UTF-8, whose words count."""

WORD_LENGTH_MAX = 64
SNIPPET_LENGTH_MAX = 200
_BEFORE = 60  # characters of a snippet before the word

# Han with its extensions, Hiragana, Katakana: written without spaces.
_UNSPACED = re.compile(
    "[\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_ASCII = re.compile("[0-9a-z]+")
_SEGMENT = re.compile(r"\S+")
_SIGN = re.compile(r"[\W_]")  # all that `str.isalnum` is not true of
_MARKS = {"Mn", "Mc"}
_PIECE = 256  # characters that are decomposed at once
_LETTERS = 64  # letters of a run that are looked at together
_KNOWN_MAX = 20_000


class _Letters(dict[int, str]):
    """Maps each character of a normalized text to its word form; looks each up once."""

    def __missing__(self, code: int) -> str:
        if len(self) >= _KNOWN_MAX:
            self.clear()
        letter = chr(code)
        category = unicodedata.category(letter)
        if unicodedata.combining(letter) or category == "Cf":
            found = ""
        elif _UNSPACED.match(letter):
            found = f" {letter} "
        elif category[0] in "LN" or category in _MARKS:
            found = letter
        else:
            found = " "
        self[code] = found
        return found


_letters = _Letters()


def find_words(text: str) -> list[str]:
    """Return the words of a text in order, with repetitions, however long it is."""
    if text.isascii():
        return [word[:WORD_LENGTH_MAX] for word in _ASCII.findall(text.lower())]
    folded = _decompose(_decompose(text).casefold())
    plain = unicodedata.normalize("NFC", folded.translate(_letters))
    return [word[:WORD_LENGTH_MAX] for word in plain.split()]


def _decompose(text: str) -> str:
    """Return the text in NFKD, but for the order of the accents in a long run of them.

    Python sorts each run in a time that grows with the square of its length, and holds the
    interpreter lock meanwhile: a second for a message of nothing but accents. Words have none.
    """
    if len(text) <= _PIECE:
        return unicodedata.normalize("NFKD", text)
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return "".join(unicodedata.normalize("NFKD", piece) for piece in pieces)


def words_of(text: str) -> Sequence[str]:
    """Return the words of the first `TEXT_BYTES_MAX` bytes of a text: sorted, each once."""
    return sorted(set(find_words(_first(text))))


def _first(text: str) -> str:
    # A lone surrogate has no bytes; it is no word either.
    if len(text) * 3 < TEXT_BYTES_MAX:
        return text
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


def snippet(text: str, words: Sequence[str], begins: str = "") -> str:
    """Return up to 200 characters of a text around one of these words, on one line.

    `begins` is how a further word begins. If the text has none of them, return its beginning.
    """
    text = _first(text)
    at = _place(text, tuple(words), begins)
    start = max(0, at - _BEFORE)
    if start:
        # At a word's beginning, if there is one before the word that was found.
        space = text.find(" ", start, at)
        start = start if space < 0 else space + 1
    shown = "…" if start else ""
    # Spaces are joined, so twice the length is enough to fill a usual line.
    rest = text[start : start + 2 * SNIPPET_LENGTH_MAX]
    if "  " in rest or not rest.isprintable():  # the only printable space is " "
        rest = " ".join(rest.split())
    rest = rest.strip()
    room = SNIPPET_LENGTH_MAX - len(shown)
    is_whole = len(rest) <= room and len(text) - start <= 2 * SNIPPET_LENGTH_MAX
    shown += rest if is_whole else f"{rest[: room - 1]}…"
    # Half of a surrogate pair cannot be encoded.
    return shown if rest.isascii() else shown.encode("utf-8", "replace").decode()


def _place(text: str, words: Sequence[str], begins: str) -> int:
    """Return where one of these words is in a text; 0 if none is."""
    lower = text.lower()
    if len(lower) == len(text):
        asked = [(word, len(word) < WORD_LENGTH_MAX) for word in words]
        for word, is_whole in (*asked, (begins, False)):
            if word and (at := _find(lower, word, is_whole=is_whole)) is not None:
                return at
    if text.isascii():
        return 0

    def is_found(part: str) -> bool:
        return any(
            word in words or (begins and word.startswith(begins)) for word in find_words(part)
        )

    # The word has accents there, or is in a run of words without spaces.
    for segment in _SEGMENT.finditer(text):
        part = segment.group()
        if is_found(part):
            # In a long run without spaces, return the place of the ideograph.
            run = part if len(part) > _BEFORE else ""
            for first in range(0, len(run), _LETTERS):
                letters = run[first : first + _LETTERS]
                if is_found(" ".join(letters)):
                    at = next(at for at, one in enumerate(letters, first) if is_found(one))
                    return segment.start() + at
            return segment.start()
    return 0


def _find(text: str, word: str, *, is_whole: bool) -> int | None:
    """Return where a word begins in a text in which it stands as it is."""
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        if not (text[at - 1 : at].isalnum() or (is_whole and text[end : end + 1].isalnum())):
            return at
        # The next word begins after a sign; a long run of letters may have thousands of such parts.
        if (sign := _SIGN.search(text, at)) is None:
            return None
        at = text.find(word, sign.end())
    return None
