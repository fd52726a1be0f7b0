"""The words of a text: what they are, and what they cost."""

from __future__ import annotations

import unicodedata
from itertools import groupby
from types import SimpleNamespace
from typing import Literal, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors.values import words
from turnkeeper.actors.values.words import find_words, snippet, words_of

PLAIN_RUN_MAX = 256
"""Sorting so many accents takes a tenth of a millisecond."""

ACCENTS = "\u0300\u0315\u0344\u0345\u0f73\u0f75\u0f81"
LETTERS = "a e\u03b1\u00e9\u1fb3\u1100\u1161\u11a8\uac00\ufdfa\u6771"


@pytest.mark.parametrize(
    "text",
    ["a" + "\u0315\u0300" * 16_000, "\u0345\u0300" * 16_000, "\u0f73" * 21_000],
    ids=["accents", "iotas", "signs that become two"],
)
def test_no_run_of_accents_is_sorted_that_is_longer_than_any_language_has(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Sorting takes the square of their number, and the interpreter lock: a second for 64 KB.

    A search shows a snippet of each message found, so twenty such messages were more than half a
    minute for everyone.
    """
    longest = 0

    def normalize(form: Literal["NFC", "NFKD"], piece: str) -> str:
        nonlocal longest
        decomposed = "".join(unicodedata.normalize("NFKD", letter) for letter in piece)
        for is_accent, run in groupby(decomposed, lambda letter: unicodedata.combining(letter) > 0):
            longest = max(longest, len(list(run)) if is_accent else 0)
        return unicodedata.normalize(form, piece)

    asked = SimpleNamespace(
        normalize=normalize, combining=unicodedata.combining, category=unicodedata.category
    )
    monkeypatch.setattr(words, "unicodedata", asked)

    words_of(text)

    assert longest <= 2 * PLAIN_RUN_MAX


@given(
    st.text(st.sampled_from(ACCENTS + LETTERS) | st.characters(), max_size=30), st.integers(1, 4)
)
def test_a_text_has_the_same_words_in_whatever_pieces_it_is_decomposed(
    text: str, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_PIECE", size)
        in_pieces = find_words(text)

    assert in_pieces == find_words(text)


def test_an_ideograph_is_found_in_a_long_run_without_a_look_at_each_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def count(text: str) -> list[str]:
        nonlocal looks
        looks += 1
        return find_words(text)

    monkeypatch.setattr(words, "find_words", count)

    shown = snippet("\u6771" * 21_000 + "\u4eac" + "\u6771" * 10, ["\u4eac"])

    assert "\u4eac" in shown
    assert looks < 21_000 / 20


class CountedText(str):
    """Counts the searches in it."""

    __slots__ = ("searches",)
    searches: int

    def find(
        self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /
    ) -> int:
        self.searches += 1
        return super().find(sub, start, end)


def test_a_word_is_not_looked_for_at_each_letter_of_a_long_one() -> None:
    text = CountedText("a" * 60_000 + " aaa")
    text.searches = 0

    assert words._find(text, "aa", is_whole=True) is None

    assert text.searches <= 3


@given(
    text=st.text(st.sampled_from("ab_ -\u00e9\u0301"), max_size=20),
    word=st.text("ab", min_size=1),
    is_whole=st.booleans(),
)
def test_a_word_is_found_where_it_stands_alone(text: str, word: str, *, is_whole: bool) -> None:
    places = [
        at
        for at in range(len(text))
        if text.startswith(word, at)
        and not text[at - 1 : at].isalnum()
        and not (is_whole and text[at + len(word) :][:1].isalnum())
    ]

    assert words._find(text, word, is_whole=is_whole) == next(iter(places), None)
