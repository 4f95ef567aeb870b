"""A sub-question turned into a noun phrase by its form: `who wrote X` -> `the person who wrote X`.

In:  a question in which every reference is already filled.
Out: a noun phrase that fits into another question, or None when no rule is sure (the caller then says
     `the answer to "..."`). Source: CMT-RAG appendix A, question realisation as templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_BE = "is|was|are|were"
_TAIL = (
    "from|in|on|at|by|to|of|with|part of|located in|based in|born in|known as|named after|called|"
    "located|based|born|held"
)
# A word that, right after "what N is", shows N to be the subject: "which stadium is in the Bronx".
_PREDICATE = (
    r"(?:in|on|at|from|of|the|an?|near|part|known|considered|responsible|adjacent|home|one|now|also|not|"
    r"\w+ed|built)\b"
)
_VERB = (
    r"(?:is|was|are|were|has|had|have|will|can|could|held|won|wrote|made|led|sang|sung|built|bought|sold|became|began|ran|gave|"
    r"took|came|fought|left|lost|kept|found|spoke|said|hold|give|own|grew|met|put|set|drew|beat|hit|brought|taught|won|"
    r"[a-z]{3,}ed|(?!this|series|was|as)[a-z]{2,}[^s\W_]s)"
)
_SKIP_NOUN = re.compile(r".*\b(?:of|in|on|for|the|and|that|other|two|three|does|did|do)", re.I)


def _where(m: re.Match[str]) -> str:
    link = "where" if m["p"].lower() in ("located", "based", "born", "held") else "that"
    return f"the {m['n']} {link} {m['x']} {m['a']} {m['p']}"


def _place(m: re.Match[str]) -> str:
    return f"the place where {m['x']} {m['a']} {m['p']}"


def _object(m: re.Match[str]) -> str:
    return f"the person {m['x']} {m['v']} {m['p']}"


def _subject(m: re.Match[str]) -> str:
    return "" if _SKIP_NOUN.fullmatch(m["n"]) else f"the {m['n']} that {m['v']} {m['x']}"


def _trailing(m: re.Match[str]) -> str:
    verbless = re.match(r"(?:who|whom|what|which|when|where|why|how)\b", m["x"], re.I)
    return "" if verbless else f"the {m['n']} {m['p']} which {m['x']}"


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.I), make)
    for pattern, make in (
        (rf"(?:what|which) (?:{_BE}) the name of (?P<x>.+)", lambda m: m["x"]),
        (rf"who (?P<v>{_BE}) (?P<x>the .+) (?P<p>to|by|with|for|from|after)", _object),
        (rf"(?:what|which|who) (?:{_BE}) (?P<x>the .+)", lambda m: m["x"]),
        (rf"(?:what|who) (?:{_BE}) (?P<x>\S.*['’]s .+)", lambda m: m["x"]),
        (rf"where (?:{_BE}) the location of (?P<x>.+)", lambda m: f"the location of {m['x']}"),
        (rf"(?:in )?(?:what|which) (?P<n>[\w-]+(?: \w+)?) (?P<a>{_BE}) (?P<x>.+?) (?P<p>{_TAIL})", _where),
        (rf"where (?P<a>{_BE}) (?P<x>.+) (?P<p>born|held|located|buried|built|formed|from)", _place),
        (rf"(?:what|which) (?P<n>(?!year\b)[\w-]+(?: [\w-]+)?) (?P<v>{_BE}) (?P<x>{_PREDICATE}.*)", _subject),
        (rf"(?:in )?(?:what|which) [\w-]+ (?:did|does|do|the|{_BE})\b.+", lambda m: ""),
        (rf"(?:what|which) (?P<n>[\w-]+(?: [\w-]+){{0,2}}?) (?P<v>{_VERB}) (?P<x>.+)", _subject),
        (rf"who (?P<v>{_VERB}) (?P<x>.+)", lambda m: f"the person who {m['v']} {m['x']}"),
        (r"(?P<x>.+) (?P<p>in|of|from|to|by|at|for) (?:what|which) (?P<n>(?!two\b)\w+(?: \w+)?)", _trailing),
    )
)  # fmt: skip


def noun_form(question: str) -> str | None:
    """A filled sub-question as a noun phrase, or None when no rule fits.

    `who wrote the book thief` -> `the person who wrote the book thief`; `What city is WGCK located in?` ->
    `the city that WGCK is located in`.
    """
    body = question.rstrip("?!. ")
    for pattern, make in _RULES:
        if found := pattern.fullmatch(body):
            return make(found) or None
    return None
