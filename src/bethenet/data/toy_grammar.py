"""A random grammar of a few English words, and the text that is shipped: nobody's work, free for every use.

The verb agrees in number with a noun some words before it, so that a chain that looks back two or three states can
tell more than one that looks back one. ``python -m bethenet.data.toy_grammar FOLDER`` writes the three files.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SIZES = {"train": 1600, "valid": 200, "test": 200}
SEED = 20190601

_NOUNS = (
    ("dog", "dogs"), ("cat", "cats"), ("child", "children"), ("teacher", "teachers"), ("farmer", "farmers"),
    ("bird", "birds"), ("king", "kings"), ("sailor", "sailors"), ("horse", "horses"), ("doctor", "doctors"),
)  # fmt: skip
_THINGS = ("book", "letter", "song", "house", "river", "garden", "boat", "table", "mountain", "road", "bridge", "lamp")
_TRANSITIVE = (("sees", "see"), ("finds", "find"), ("likes", "like"), ("paints", "paint"), ("leaves", "leave"))
_INTRANSITIVE = (("sleeps", "sleep"), ("sings", "sing"), ("runs", "run"), ("waits", "wait"), ("laughs", "laugh"))
_ADJECTIVES = ("old", "young", "small", "quiet", "happy", "tired", "brave", "tall")
_COLOURS = ("red", "green", "white", "black", "blue")
_PLACES = ("near", "behind", "beside", "above")
_TIMES = (("in", "the", "morning"), ("at", "night"), ("every", "day"), ("after", "the", "rain"))
_ADVERBS = ("often", "never", "always", "seldom")
_JOINING = ("and", "but", "while", "because")
_CLAIMS = (("says", "say"), ("thinks", "think"), ("knows", "know"))


def sentences(count: int, seed: int) -> list[list[str]]:
    """``count`` independent sentences."""
    source = random.Random(seed)
    return [_sentence(source) for _ in range(count)]


def write(folder: Path) -> None:
    """Write ``train.txt``, ``valid.txt`` and ``test.txt``."""
    for offset, (split, count) in enumerate(SIZES.items()):
        lines = [" ".join(sentence) + "\n" for sentence in sentences(count, SEED + offset)]
        (folder / f"{split}.txt").write_text("".join(lines), encoding="utf-8")


def _sentence(source: random.Random) -> list[str]:
    words = _clause(source)
    if _chance(source, 0.25):
        words += [_pick(source, _JOINING), *_clause(source)]
    if _chance(source, 0.3):
        words += _pick(source, _TIMES)
    return words


def _clause(source: random.Random) -> list[str]:
    plural = _chance(source, 0.5)
    words = _subject(source, plural)
    if _chance(source, 0.2):
        words.append(_pick(source, _ADVERBS))
    if _chance(source, 0.15):
        return [*words, _pick(source, _CLAIMS)[plural], "that", *_clause(source)]
    if _chance(source, 0.4):
        return [*words, _pick(source, _INTRANSITIVE)[plural]]
    return [*words, _pick(source, _TRANSITIVE)[plural], *_object(source)]


def _subject(source: random.Random, plural: bool) -> list[str]:
    words = _noun_phrase(source, plural)
    if _chance(source, 0.35):
        words += [_pick(source, _PLACES), "the", _pick(source, _THINGS)]
    return words


def _noun_phrase(source: random.Random, plural: bool) -> list[str]:
    words = [_pick(source, ("the", "these", "many") if plural else ("the", "this", "a"))]
    if _chance(source, 0.4):
        words.append(_pick(source, _ADJECTIVES))
    return [*words, _pick(source, _NOUNS)[plural]]


def _object(source: random.Random) -> list[str]:
    if _chance(source, 0.3):
        return _noun_phrase(source, _chance(source, 0.5))
    words = [_pick(source, ("the", "a", "every"))]
    if _chance(source, 0.5):
        words.append(_pick(source, _COLOURS))
    return [*words, _pick(source, _THINGS)]


def _chance(source: random.Random, probability: float) -> bool:
    return source.random() < probability


def _pick(source: random.Random, choices: tuple[T, ...]) -> T:
    # the earlier ones more often, as words are; Random.random is the same on every version of Python
    return choices[int(len(choices) * source.random() ** 1.5)]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
