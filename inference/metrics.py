"""How good decoded plans are, against gold plans of the same turns.

In: plans. Out: the plan metrics of metrics.json, each `{"value","n","low","high"}` with a 95 % interval. Traces are
compared field by field (CMT-RAG section 3.1: sub-question, keywords, dependencies); an unparseable plan (None) scores
zero everywhere. Text is compared as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np

from inference.traces import TraceDraft, TracePlan

_REFERENCE = re.compile(r"\[A(\d+)\]")
_NO_TRACE = 999_999_999
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_Z = 1.959963984540054  # two-sided 95 % of the normal distribution


def normalise_squad(text: str) -> str:
    """Lower, drop ASCII punctuation, replace the articles by a space, collapse white space (SQuAD 2 evaluation)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(a: str, b: str) -> float:
    """Bag-of-tokens F1 of the normalised texts; where either has no tokens: 1 if both have none, else 0."""
    tokens_a, tokens_b = normalise_squad(a).split(), normalise_squad(b).split()
    if not tokens_a or not tokens_b:
        return float(tokens_a == tokens_b)
    shared = (Counter(tokens_a) & Counter(tokens_b)).total()
    return 2 * shared / (len(tokens_a) + len(tokens_b))


def renumber(
    written: Sequence[TracePlan | None], gold: Sequence[TracePlan]
) -> list[tuple[TracePlan | None, TracePlan]]:
    """(written, gold) plans of the successive turns of one dialogue, written traces numbered as gold ones.

    Trace k of a turn is trace k of the gold turn, whatever number it got: one trace too many in turn 3 must not make
    all later references wrong. A written trace without a gold one gets a number that no gold trace has, and so does a
    reference to it.
    """
    number: dict[int, int] = {}

    def named(text: str) -> str:
        return _REFERENCE.sub(lambda m: f"[A{number.get(int(m.group(1)), _NO_TRACE)}]", text)

    pairs: list[tuple[TracePlan | None, TracePlan]] = []
    for plan, expected in zip(written, gold, strict=True):
        if plan is None:
            pairs.append((None, expected))
            continue
        ids = [trace.id for trace in expected.traces]
        number |= {trace.id: ids[i] if i < len(ids) else _NO_TRACE for i, trace in enumerate(plan.traces)}
        traces = tuple(
            TraceDraft(
                number[trace.id],
                named(trace.sub_question),
                named(trace.keywords),
                tuple(number.get(dep, _NO_TRACE) for dep in trace.deps),
            )
            for trace in plan.traces
        )
        pairs.append((TracePlan(traces), expected))
    return pairs


def plan_exact_match(pred: TracePlan | None, gold: TracePlan) -> bool:
    """The same number of traces, each with the same normalised sub-question and the same set of dependencies."""
    return hop_count_match(pred, gold) and all(
        normalise_squad(p.sub_question) == normalise_squad(g.sub_question) and set(p.deps) == set(g.deps)
        for p, g in zip(_traces(pred), gold.traces, strict=True)
    )


def hop_count_match(pred: TracePlan | None, gold: TracePlan) -> bool:
    """The same number of traces."""
    return pred is not None and len(pred) == len(gold)


def match_traces(pred: TracePlan | None, gold: TracePlan) -> list[tuple[TraceDraft, TraceDraft]]:
    """One-to-one (predicted, gold) pairs: highest sub-question F1 first, the earlier ones on ties."""
    scored = [
        (-token_f1(p.sub_question, g.sub_question), abs(i - j), j, i)
        for i, p in enumerate(_traces(pred))
        for j, g in enumerate(gold.traces)
    ]
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for _, _, j, i in sorted(scored):
        if j not in pairs and i not in taken:
            pairs[j] = i
            taken.add(i)
    return [(_traces(pred)[pairs[j]], gold.traces[j]) for j in sorted(pairs)]


def sub_question_f1(pred: TracePlan | None, gold: TracePlan) -> float:
    """Token F1 of matched sub-questions, summed and divided by the larger number of traces."""
    return _matched_f1(pred, gold, "sub_question")


def keyword_f1(pred: TracePlan | None, gold: TracePlan) -> float:
    """Token F1 of the keywords of the traces matched by sub-question, divided as in `sub_question_f1`."""
    return _matched_f1(pred, gold, "keywords")


def dependency_prf(pred: TracePlan | None, gold: TracePlan) -> tuple[int, int, int]:
    """(edges in both, edges predicted, edges in gold). An edge is (position of the trace in the plan, dependency)."""
    predicted, expected = _edges(_traces(pred)), _edges(gold.traces)
    return len(predicted & expected), len(predicted), len(expected)


def aggregate_plan_metrics(
    pairs: Sequence[tuple[TracePlan | None, TracePlan]], seed: int = 42, resamples: int = 1000
) -> dict[str, dict[str, float]]:
    """Plan metrics over turns, by their names in metrics.json.

    Shares get Wilson's interval, means and the pooled dependency F1 a percentile bootstrap over turns (fixed seed).
    Raises ValueError for no turns.
    """
    if not pairs:
        raise ValueError("no turns to aggregate plan metrics over")
    n = len(pairs)
    weights = np.random.default_rng(seed).multinomial(
        n, np.full(n, 1 / n), size=resamples
    )  # turns drawn per resample

    def share(hits: Sequence[bool]) -> dict[str, float]:
        low, high = wilson(sum(hits), n)
        return {"value": sum(hits) / n, "n": n, "low": low, "high": high}

    def interval(value: float, samples: np.ndarray) -> dict[str, float]:
        low, high = np.quantile(samples, [0.025, 0.975])
        return {"value": value, "n": n, "low": float(low), "high": float(high)}

    def mean(values: Sequence[float]) -> dict[str, float]:
        array = np.asarray(values, dtype=np.float64)
        return interval(float(array.mean()), weights @ array / n)

    counts = np.asarray([dependency_prf(pred, gold) for pred, gold in pairs], dtype=np.int64)
    return {
        "plan_valid": share([pred is not None for pred, _ in pairs]),
        "plan_exact_match": share([plan_exact_match(pred, gold) for pred, gold in pairs]),
        "hop_count_accuracy": share([hop_count_match(pred, gold) for pred, gold in pairs]),
        "sub_question_f1": mean([sub_question_f1(pred, gold) for pred, gold in pairs]),
        "keyword_f1": mean([keyword_f1(pred, gold) for pred, gold in pairs]),
        "dependency_f1": interval(float(_pooled_f1(counts.sum(axis=0))), _pooled_f1(weights @ counts)),
    }


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927)."""
    p, z2 = hits / n, _Z * _Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return (centre - half if hits else 0.0), (centre + half if hits < n else 1.0)  # exact at the ends


def _traces(plan: TracePlan | None) -> tuple[TraceDraft, ...]:
    return plan.traces if plan is not None else ()


def _edges(traces: tuple[TraceDraft, ...]) -> set[tuple[int, int]]:
    return {(position, dep) for position, trace in enumerate(traces) for dep in trace.deps}


def _matched_f1(pred: TracePlan | None, gold: TracePlan, name: str) -> float:
    total = sum(token_f1(getattr(p, name), getattr(g, name)) for p, g in match_traces(pred, gold))
    return total / max(len(_traces(pred)), len(gold), 1)


def _pooled_f1(counts: np.ndarray) -> np.ndarray:
    """F1 of summed (both, predicted, gold) counts [..., 3]; 1 where neither side has an edge."""
    both, size = counts[..., 0], counts[..., 1] + counts[..., 2]
    return np.where(size == 0, 1.0, 2 * both / np.maximum(size, 1))
