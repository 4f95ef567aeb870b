"""Invented names for the fictional world, built from syllables.

In: a split ("train" or "dev") and a random generator. Out: names that nobody has read before, so that a model must
copy them. Every unusual word ("stem") belongs to exactly one split for ever: the CRC of its letters decides, whatever
the seed. Hence the held-out entities of one world share no stem with the training entities of any other world. Years
and numbers are split the same way.
"""

from __future__ import annotations

import random
import zlib

_DEV_SHARE = 6  # one stem, year or number in six belongs to dev

_ONSETS = tuple("b br d dr f g gr h j k kr l m n p r s st t tr v z".split())
_VOWELS = ("a", "e", "i", "o", "u")
_LIGHT_CODAS = ("", "l", "r", "n", "s")
_LAST_ONSETS = tuple("b d f g k l m n p r t v z th".split())
_LAST_CODAS = ("n", "r", "l", "s", "th", "m", "nd", "x")
_SUFFIXES = ("ville", "burg", "shire", "ia", "land", "stan")

# Shapes of names by entity type; "*" is a stem. Shapes never contain a word that is itself a name.
_SHAPES: dict[str, tuple[str, ...]] = {
    "person": ("* *",),
    "city": ("*", "*", "*", "Port *", "Upper *", "*ville", "*burg"),
    "region": ("* Province", "* County", "* District", "North *", "*shire"),
    "country": ("*ia", "*land", "*stan", "*"),
    "river": ("* River", "* Creek", "River *"),
    "mountain": ("Mount *", "* Peak", "* Ridge"),
    "lake": ("Lake *", "* Bay", "* Sea"),
    "company": ("* Industries", "* Motors", "* Shipping", "* Press", "* Pictures", "* Holdings", "* Works"),
    "label": ("* Records", "* Music", "* Recordings"),
    "university": ("* University", "* College", "* Institute", "* Academy"),
    "band": ("* Quartet", "* Brothers", "* Ensemble", "* Trio", "* *"),
    "film": ("The Last *", "* at Dawn", "Escape from *", "Return to *", "The * Affair", "Seven Days in *"),
    "book": ("A Letter to *", "The House of *", "Tales of *", "* Remembered", "The * Inheritance", "Memoirs of *"),
    "song": ("* Blues", "Song for *", "Goodbye *", "Under the * Sky", "Dancing with *", "* Serenade"),
    "organization": ("* Society", "* League", "* Foundation", "* Council", "* Union"),
    "award": ("* Prize", "* Medal", "* Award", "* Cup"),
    "team": ("* United", "* Rovers", "* Athletic", "* Wanderers"),
    "treaty": ("Treaty of *", "* Accord", "* Pact"),
    "railway": ("* Line", "* Railway", "* Express"),
    "currency": ("*",),
}  # fmt: skip


def belongs_to_dev(word: str) -> bool:
    """Whether a stem, year or number (as written, case ignored) is reserved for held-out entities."""
    return zlib.crc32(word.lower().encode()) % _DEV_SHARE == 0


def first_syllables() -> list[str]:
    """All first syllables of stems, capitalised."""
    return [(o + v + c).capitalize() for o in _ONSETS for v in _VOWELS for c in _LIGHT_CODAS]


def last_syllables() -> list[str]:
    """All last syllables of stems; suffixes such as "-ville" may follow them."""
    return [o + v + c for o in _LAST_ONSETS for v in _VOWELS for c in _LAST_CODAS]


def syllable_patterns() -> tuple[str, str]:
    """Regular expressions of a stem's first syllable, and of its last one where a suffix follows."""

    def one_of(parts: tuple[str, ...]) -> str:
        return "(?:" + "|".join(sorted(parts, key=len, reverse=True)) + ")"

    onsets = tuple(onset.capitalize() for onset in _ONSETS)
    last = f"{one_of(_LAST_ONSETS)}[{''.join(_VOWELS)}]{one_of(_LAST_CODAS)}"
    suffix = one_of(_SUFFIXES)
    first = f"^{one_of(onsets)}[{''.join(_VOWELS)}][{''.join(_LIGHT_CODAS)}]?(?={last}{suffix}?$)"
    return first, f"^{last}(?={suffix}$)"


class Names:
    """A source of distinct names for one split.

    Args:
        rng: the only source of randomness.
        split: "train" or "dev".
        reserved: lower-case words that a stem must not equal (the words of the question templates).
    """

    def __init__(self, rng: random.Random, split: str, reserved: frozenset[str] = frozenset()):
        if split not in ("train", "dev"):
            raise ValueError(f"split must be 'train' or 'dev', not {split!r}")
        self._rng = rng
        self._dev = split == "dev"
        self._used: set[str] = set(reserved)

    def _claim(self, word: str) -> bool:
        key = word.lower()
        if key in self._used or belongs_to_dev(key) != self._dev:
            return False
        self._used.add(key)
        return True

    def stem(self) -> str:
        """A capitalised invented word of two syllables, new in this split."""
        rng = self._rng
        while True:
            first = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_LIGHT_CODAS)
            last = rng.choice(_LAST_ONSETS) + rng.choice(_VOWELS) + rng.choice(_LAST_CODAS)
            if self._claim(first + last):
                return (first + last).capitalize()

    def name(self, kind: str) -> str:
        """A new name for an entity of type `kind`."""
        shape = self._rng.choice(_SHAPES[kind])
        parts = shape.split("*")
        return parts[0] + "".join(self.stem() + part for part in parts[1:])

    def _number(self, low: int, high: int) -> int:
        while True:
            value = self._rng.randint(low, high)
            if belongs_to_dev(str(value)) == self._dev:
                return value

    def year(self) -> str:
        """A year; years repeat within a split and never across splits."""
        return str(self._number(1500, 2019))

    def date(self) -> str:
        """A date such as "14 March 1921"; its year belongs to the split."""
        month = self._rng.choice(
            ("January", "February", "March", "April", "May", "June", "July", "August", "September",
             "October", "November", "December")
        )  # fmt: skip
        return f"{self._rng.randint(1, 28)} {month} {self.year()}"

    def quantity(self, low: int, high: int) -> str:
        """A number with thousands separators; numbers repeat within a split and never across splits."""
        return f"{self._number(low, high):,}"
