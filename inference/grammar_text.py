"""Plain text of a plan, byte by byte: the finite automaton below `inference.grammar`, and the tools to run it in bulk.

In: a state and a byte. Out: the next state, or DEAD. It accepts UTF-8 without control characters and line separators,
knows whether anything but white space was written, and notices when `[A` and a digit open a reference (whose number
only the grammar can judge, since that depends on the trace). Out as well: what every token of a vocabulary does from a
state, in one numpy pass; and tries for the few tokens that need a walk of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

# States of the text automaton. Bit 0 is "something other than white space was written"; the rest is what the last
# bytes opened: a bracket, a reference, or a UTF-8 character of which some bytes are missing.
# c1 to c3 lack so many bytes (c2:e0, … with a narrower next byte); s:e2, … may yet turn out to be white space.
KINDS = (
    "text [ [A [A1 c1 c2 c3 c2:e0 c2:ed c3:f0 c3:f4 s:c2 s:e1 s:e2 s:e3 s:e19a s:e280 s:e281 s:e380".split()
)
KIND = {name: index for index, name in enumerate(KINDS)}
NUMBER = 2 * KIND["[A1"]  # a reference whose digits have begun
N_STATES = 2 * len(KINDS)
DEAD = N_STATES
Trie = dict[Any, Any]  # byte -> Trie; "id" -> the tokens that end here


def _transition_table() -> np.ndarray:
    """uint8 [states, 256]: the text automaton. The number of a reference is judged by the grammar."""
    table = np.full((N_STATES, 256), DEAD, dtype=np.uint8)

    def put(kind: str, low: int, high: int, target: str, blank: bool = False) -> None:
        for filled in (0, 1):
            table[2 * KIND[kind] + filled, low : high + 1] = 2 * KIND[target] + (filled if blank else 1)

    for kind in ("text", "[", "[A"):
        put(kind, 0x20, 0x20, "text", blank=True)
        put(kind, 0x21, 0x7E, "text")
        put(kind, 0x5B, 0x5B, "[")
        put(kind, 0xC2, 0xC2, "s:c2", blank=True)
        put(kind, 0xC3, 0xDF, "c1")
        put(kind, 0xE0, 0xEF, "c2")
        put(kind, 0xE0, 0xE0, "c2:e0")
        for lead in (0xE1, 0xE2, 0xE3):
            put(kind, lead, lead, f"s:{lead:02x}", blank=True)
        put(kind, 0xED, 0xED, "c2:ed")
        put(kind, 0xF0, 0xF4, "c3")
        put(kind, 0xF0, 0xF0, "c3:f0")
        put(kind, 0xF4, 0xF4, "c3:f4")
    put("[", 0x41, 0x41, "[A")
    put("[A", 0x30, 0x39, "[A1")
    put("[A1", 0x30, 0x39, "[A1")
    put("[A1", 0x5D, 0x5D, "text")
    put("c1", 0x80, 0xBF, "text")
    put("c2", 0x80, 0xBF, "c1")
    put("c3", 0x80, 0xBF, "c2")
    put("c2:e0", 0xA0, 0xBF, "c1")
    put("c2:ed", 0x80, 0x9F, "c1")
    put("c3:f0", 0x90, 0xBF, "c2")
    put("c3:f4", 0x80, 0x8F, "c2")
    # Characters that may be white space: U+00A0, U+1680, U+2000-200A, U+202F, U+205F, U+3000. Left out altogether: C1
    # controls (U+0080-009F) and the separators U+2028 and U+2029.
    for kind in ("s:e1", "s:e2", "s:e3"):
        put(kind, 0x80, 0xBF, "c1")
    put("s:e1", 0x9A, 0x9A, "s:e19a", blank=True)
    put("s:e2", 0x80, 0x80, "s:e280", blank=True)
    put("s:e2", 0x81, 0x81, "s:e281", blank=True)
    put("s:e3", 0x80, 0x80, "s:e380", blank=True)
    for kind, spaces in {
        "s:c2": [(0xA0, 0xA0)],
        "s:e19a": [(0x80, 0x80)],
        "s:e280": [(0x80, 0x8A), (0xAF, 0xAF)],
        "s:e281": [(0x9F, 0x9F)],
        "s:e380": [(0x80, 0x80)],
    }.items():
        put(kind, 0xA0 if kind == "s:c2" else 0x80, 0xBF, "text")
        for low, high in spaces:
            put(kind, low, high, "text", blank=True)
    table[2 * KIND["s:e280"] : 2 * KIND["s:e280"] + 2, 0xA8:0xAA] = DEAD
    return table


def _text_costs() -> list[int]:
    """Per state: fewest single-byte tokens after which the text may end (a bound, where white space is suspected)."""
    costs = [0] * N_STATES + [99]
    for name, kind in KIND.items():
        if name in ("text", "[", "[A"):
            missing = 0
        elif name[0] == "c":
            missing = int(name[1])
        else:  # "[A1" lacks its bracket; s:c2, s:e19a, … one byte; s:e1, s:e2, s:e3 two
            missing = 2 if name in ("s:e1", "s:e2", "s:e3") else 1
        costs[2 * kind : 2 * kind + 2] = missing + 1, missing
    return costs


TABLE = _transition_table()
TEXT_COST = _text_costs()
MAX_TEXT_COST = max(TEXT_COST[:N_STATES])


def byte_columns(texts: list[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Column j of the vocabulary: (indices of the tokens that are longer than j, their byte j)."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    flat = np.frombuffer(b"".join(texts), dtype=np.uint8)
    columns = []
    for j in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > j)
        columns.append((longer, flat[starts[longer] + j]))
    return columns


def run_columns(columns: list[tuple[np.ndarray, np.ndarray]], state: int) -> tuple[np.ndarray, np.ndarray]:
    """End state of every token from `state`, and whether it wrote a digit of a reference on the way."""
    table = np.vstack([TABLE, np.full((1, 256), DEAD, dtype=np.uint8)])
    end = np.full(len(columns[0][0]) if columns else 0, state, dtype=np.uint8)
    numeric = np.zeros(len(end), dtype=bool)
    for tokens, data in columns:
        end[tokens] = table[end[tokens], data]
        numeric[tokens] |= end[tokens] >> 1 == NUMBER >> 1
    return end, numeric


def trie(items: Iterable[tuple[bytes, int]]) -> Trie:
    """The trie of (bytes, token) pairs."""
    root: Trie = {}
    for data, index in items:
        node = root
        for byte in data:
            node = node.setdefault(byte, {})
        node.setdefault("id", []).append(index)
    return root


def walk(node: Trie, state: Any, step: Callable[[Any, int], Any], fits: Callable[[Any], bool]) -> list[int]:
    """Tokens of the trie that `step` accepts byte by byte from `state` and whose end state `fits`, in order of id."""
    found: list[int] = []
    stack = [(node, state)]
    while stack:
        node, state = stack.pop()
        for byte, child in node.items():
            if byte == "id":
                continue
            following = step(state, byte)
            if following is not None:
                if "id" in child and fits(following):
                    found += child["id"]
                stack.append((child, following))
    return sorted(found)
