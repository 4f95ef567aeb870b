"""Interleaving: from sessions to numbered dialogues.

In:  sessions (linked turns whose traces are named by source graph and node) and a seeded random generator.
Out: dialogues in which sessions alternate in blocks under an ambiguity guard, traces numbered 1..K. `pack` chooses
     which sessions share a long dialogue. Source: CMT-RAG, appendix A.2-A.3 (long and ultra-long dialogues interleave
     synthesised sessions and remap identifiers; no language model is involved).
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from datamodules.mumu_model import Trace, Turn
from datamodules.mumu_operators import DraftTurn, Key, Session, gids_of, traces_of
from datamodules.mumu_relations import could_denote
from datamodules.mumu_text import keywords, topic_words
from datamodules.musique import REFERENCE

COMMON = 200  # a word of more sessions says nothing about the topic


def interleave(sessions: Sequence[Session], rng: random.Random) -> list[tuple[int, DraftTurn]]:
    """Mix sessions in blocks of 1-3 turns, order inside each kept; returns (session number, turn).

    Guard: between a trace that a later phrase stands for and the turn that says it, no other session
    introduces a trace the phrase could mean. A turn is emitted only if some order of finishing the open
    sessions remains, so this never gets stuck.
    """
    at = [0] * len(sessions)
    opened = [_openings(session) for session in sessions]
    types = [[frozenset(t.node.type for t in turn.traces) for turn in session] for session in sessions]

    def waiting(n: int, position: int) -> frozenset[str]:
        return opened[n][position]

    def clash(kinds: frozenset[str], open_types: frozenset[str]) -> bool:
        return any(could_denote(wanted, kind) for wanted in open_types for kind in kinds)

    def allowed(n: int) -> bool:
        turn = types[n][at[n]]
        if any(clash(turn, waiting(m, at[m])) for m in range(len(sessions)) if m != n):
            return False
        after = {m: at[m] + (m == n) for m in range(len(sessions))}
        active = [m for m in after if waiting(m, after[m])]
        while active:
            for m in active:
                rest = frozenset().union(*types[m][after[m] :])
                if not any(clash(rest, waiting(o, after[o])) for o in active if o != m):
                    active.remove(m)
                    break
            else:
                return False
        return True

    out: list[tuple[int, DraftTurn]] = []
    while live := [n for n in range(len(sessions)) if at[n] < len(sessions[n])]:
        rng.shuffle(live)
        n = next(m for m in live if allowed(m))
        for _ in range(rng.randint(1, 3)):
            if at[n] == len(sessions[n]) or not allowed(n):
                break
            out.append((n, sessions[n][at[n]]))
            at[n] += 1
    return out


def _openings(session: Session) -> list[frozenset[str]]:
    """For each position p: the types of traces in turns before p that a phrase in turn p or later stands for."""
    home = {trace.key: n for n, turn in enumerate(session) for trace in turn.traces}
    kind = {trace.key: trace.node.type for trace in traces_of(session)}
    out = []
    for p in range(len(session) + 1):
        keys = [turn.antecedent for turn in session[p:] if turn.antecedent is not None]
        out.append(frozenset(kind[key] for key in keys if home[key] < p))
    return out


def write_references(text: str, named: Mapping[int, int]) -> str:
    """Replace every `#k` by `[A_named[k]]`."""
    return REFERENCE.sub(lambda m: f"[A{named[int(m.group(1))]}]", text)


def finalise(turns: Sequence[DraftTurn]) -> tuple[Turn, ...]:
    """Number the traces 1..K in order and write references as `[A_k]`."""
    ids: dict[Key, int] = {}
    out = []
    for t, turn in enumerate(turns, 1):
        traces = []
        for draft in turn.traces:
            ids[draft.key] = len(ids) + 1
            named = {ref + 1: ids[key] for ref, key in zip(draft.node.refs, draft.deps, strict=True)}
            text = write_references(draft.node.text, named)
            traces.append(
                Trace(
                    ids[draft.key],
                    text,
                    keywords(text),
                    tuple(sorted(set(named.values()))),
                    (draft.node.pid,) if draft.node.pid else (),
                    draft.node.answer,
                    draft.node.type,
                    draft.key,
                )
            )
        out.append(
            Turn(
                t,
                turn.question,
                turn.answer,
                turn.aliases,
                turn.operator,
                turn.realiser,
                turn.phrase,
                False,
                tuple(traces),
            )
        )
    return tuple(out)


def pack(
    sessions: Sequence[Session],
    targets: Sequence[int],
    bounds: tuple[int, int],
    max_traces: int,
    rng: random.Random,
    tick: Callable[[], None],
    rejections: Counter[str],
) -> list[list[tuple[int, DraftTurn]]]:
    """Interleaved dialogues of near-by sessions with disjoint graphs and sub-questions.

    targets: wanted numbers of turns, one per dialogue; bounds: fewest and most turns. Returns, per dialogue,
    (index of the session in `sessions`, turn). Sessions that fit nowhere are left over.
    """
    words = [sorted(topic_words(trace.node for trace in traces_of(session))) for session in sessions]
    postings: dict[str, list[int]] = defaultdict(list)
    for n, bag in enumerate(words):
        for word in bag:
            postings[word].append(n)
    gids = [frozenset(gids_of(s)) for s in sessions]
    sids = [frozenset(trace.node.sid for trace in traces_of(s)) for s in sessions]
    sizes = [len(traces_of(s)) for s in sessions]
    free = dict.fromkeys(range(len(sessions)))

    dialogues = []
    for target in targets:
        tried_seeds = 0
        for seed in list(free):
            chosen = _gather(
                seed, free, target, bounds[1], max_traces, words, postings, gids, sids, sizes, sessions
            )
            turns = sum(len(sessions[n]) for n in chosen)
            if turns >= bounds[0]:
                break
            tried_seeds += 1
            if tried_seeds == 20:
                chosen = []
                break
        else:
            chosen = []
        if not chosen:
            rejections["pack/too_few_turns"] += 1
            continue
        for n in chosen:
            del free[n]
        mixed = interleave([sessions[n] for n in chosen], rng)
        dialogues.append([(chosen[n], turn) for n, turn in mixed])
        tick()
    return dialogues


def _gather(
    seed: int,
    free: dict[int, None],
    target: int,
    most: int,
    max_traces: int,
    words: Sequence[Sequence[str]],
    postings: dict[str, list[int]],
    gids: Sequence[frozenset[str]],
    sids: Sequence[frozenset[str]],
    sizes: Sequence[int],
    sessions: Sequence[Session],
) -> list[int]:
    """The seed session and its nearest free neighbours, until `target` turns are reached.

    Near is a large sum of inverse document frequencies of shared words of titles and sub-questions (mumu-qa 4.7).
    """
    score: dict[int, float] = defaultdict(float)
    for word in words[seed]:
        posting = postings[word]
        if len(posting) <= COMMON:
            weight = math.log(len(sessions) / len(posting))
            for n in posting:
                score[n] += weight
    near = [
        n for n, _ in sorted(score.items(), key=lambda item: (-item[1], item[0])) if n in free and n != seed
    ]
    near_set = set(near)
    chosen, turns, traces = [seed], len(sessions[seed]), sizes[seed]
    used_gids, used_sids = set(gids[seed]), set(sids[seed])
    questions = {turn.question for turn in sessions[seed]}
    for n in (*near, *(m for m in free if m not in near_set and m != seed)):
        if turns >= target:
            break
        size = len(sessions[n])
        if turns + size > most or traces + sizes[n] > max_traces or turns + size > target + 2:
            continue
        if (
            used_gids & gids[n]
            or used_sids & sids[n]
            or any(turn.question in questions for turn in sessions[n])
        ):
            continue
        chosen.append(n)
        turns, traces = turns + size, traces + sizes[n]
        used_gids |= gids[n]
        used_sids |= sids[n]
        questions.update(turn.question for turn in sessions[n])
    return chosen
