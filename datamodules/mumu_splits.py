"""Which source graphs each split may use: near-duplicates removed, and train purged of everything dev knows.

In:  annotated graphs of the training and development files. Out: the graphs kept and the counts of those
removed, by rule. Source: CMT-RAG appendix A ("effectively identical" questions are removed; train and dev
share no evidence). The development side is fixed first and training gives way ("dev-first purge"). A tuning part can be
held out of training: whole groups of graphs that share evidence with nothing else in it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from datamodules.musique import SrcGraph, normalise

HUB_SHARE = 0.01


def deduplicate(graphs: Sequence[SrcGraph]) -> tuple[list[SrcGraph], Counter[str]]:
    """Keep the smallest id among graphs with the same last two sub-questions and answer, and among graphs with
    the same answers of all nodes and all but at most one sub-question in common. Order is kept.
    """
    removed: Counter[str] = Counter()
    by_tail: dict[tuple[tuple[str, ...], str], str] = {}
    for graph in graphs:
        key = (tuple(node.sid for node in graph.nodes[-2:]), normalise(graph.answer))
        by_tail[key] = min(by_tail.get(key, graph.gid), graph.gid)
    smallest = set(by_tail.values())
    kept = [graph for graph in graphs if graph.gid in smallest]
    removed["same_tail"] = len(graphs) - len(kept)

    by_answers: dict[tuple[str, ...], list[SrcGraph]] = defaultdict(list)
    for graph in sorted(kept, key=lambda g: g.gid):
        answers = tuple(sorted(normalise(node.answer) for node in graph.nodes))
        sids = {node.sid for node in graph.nodes}
        twins = by_answers[answers]
        if any(len(sids & {node.sid for node in twin.nodes}) >= len(sids) - 1 for twin in twins):
            removed["same_answers"] += 1
        else:
            twins.append(graph)
    unique = {graph.gid for twins in by_answers.values() for graph in twins}
    return [graph for graph in kept if graph.gid in unique], +removed


def bridges(graph: SrcGraph) -> set[str]:
    """The normalised answers of a graph's intermediate nodes."""
    return {normalise(node.answer) for node in graph.nodes[:-1]}


def purge(train: Sequence[SrcGraph], dev: Sequence[SrcGraph]) -> tuple[list[SrcGraph], Counter[str]]:
    """Training graphs that share no sub-question, supporting title, paragraph or (non-hub) bridge entity with dev.

    A hub is a bridge entity of more than 1 % of all graphs ("United States").
    """
    frequency: Counter[str] = Counter(b for graph in (*train, *dev) for b in sorted(bridges(graph)))
    hubs = {b for b, n in frequency.items() if is_hub(n, len(train) + len(dev))}
    gids = {graph.gid for graph in dev}
    sids = {node.sid for graph in dev for node in graph.nodes}
    titles = {node.title for graph in dev for node in graph.nodes}
    pids = {node.pid for graph in dev for node in graph.nodes if node.pid}
    known = {b for graph in dev for b in bridges(graph)} - hubs
    kept: list[SrcGraph] = []
    removed: Counter[str] = Counter()
    for graph in train:
        if graph.gid in gids or any(node.sid in sids for node in graph.nodes):
            removed["sub_question"] += 1
        elif any(node.title in titles or node.pid in pids for node in graph.nodes):
            removed["title"] += 1
        elif bridges(graph) & known:
            removed["bridge"] += 1
        else:
            kept.append(graph)
    return kept, removed


def groups(graphs: Sequence[SrcGraph]) -> list[list[int]]:
    """Indices of graphs tied by a supporting title, a sub-question or a (non-hub) bridge entity, by union-find.

    Ordered by their first graph.
    """
    frequency: Counter[str] = Counter(b for graph in graphs for b in bridges(graph))
    parent = list(range(len(graphs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[str, str], int] = {}
    for i, graph in enumerate(graphs):
        keys = [("title", node.title) for node in graph.nodes] + [("sid", node.sid) for node in graph.nodes]
        keys += [("bridge", b) for b in sorted(bridges(graph)) if not is_hub(frequency[b], len(graphs))]
        for key in keys:
            if key in first:
                a, b = sorted((root(first[key]), root(i)))
                parent[b] = a
            else:
                first[key] = i
    tied: dict[int, list[int]] = defaultdict(list)
    for i in range(len(graphs)):
        tied[root(i)].append(i)
    return [tied[i] for i in sorted(tied)]


def is_hub(count: int, total: int) -> bool:
    """Whether a bridge entity of so many graphs is too common to tie them ("United States")."""
    return count > HUB_SHARE * total and count > 2


def hold_out(
    train: Sequence[SrcGraph], share: float, rng: random.Random
) -> tuple[list[SrcGraph], list[SrcGraph]]:
    """Split training graphs into (train, tuning): whole groups, drawn at random, up to `share` of the graphs.

    A group larger than a quarter of what is wanted is never drawn, so a giant component stays in training.
    """
    wanted = share * len(train)
    drawn: set[int] = set()
    candidates = [group for group in groups(train) if len(group) <= max(1.0, wanted / 4)]
    rng.shuffle(candidates)
    for group in candidates:
        if len(drawn) + len(group) <= wanted:
            drawn.update(group)
    kept = [graph for i, graph in enumerate(train) if i not in drawn]
    return kept, [graph for i, graph in enumerate(train) if i in drawn]
