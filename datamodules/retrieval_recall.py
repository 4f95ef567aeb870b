"""How often retrieval finds the gold paragraph of a sub-question: recall@k over a corpus.

In:  MuSiQue files, or a built MuMu directory; a corpus; an encoder or BM25. Out: the share of resolved sub-questions
     (references replaced by gold answers, as after reference resolution, CMT-RAG C.1) whose gold paragraphs are among
     the k best; the paper retrieves five (C.5). Each distinct pair of sub-question and gold paragraphs counts once.

    python -m datamodules.retrieval_recall --musique FILE... --corpus FILE [--distractors FILE...] --index DIR
    python -m datamodules.retrieval_recall --mumu DIR [--part dev] --index DIR [--kind bm25] [--k 1 5 10 20]

The index is built in --index, or opened if it is there. The recall of a sub-question with several gold paragraphs is
the share of them that is found (set recall, as in HippoRAG's evaluation); one without any is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.mumu_model import STAGE_OF, TRACE_REFERENCE, Dialogue, load_dialogues
from datamodules.musique import REFERENCE, SrcGraph, load_graphs
from inference.corpus import Paragraph, read_corpus
from inference.encoders import DEFAULT, load_encoder
from inference.index_manifest import KINDS, MANIFEST, PLAN
from inference.metrics import wilson
from inference.progress import progress
from inference.retrieval import Retriever, build_index, open_index

_BATCH = 64  # sub-questions searched at a time


@dataclass(frozen=True)
class SubQuestion:
    """A resolved sub-question and the ids of the paragraphs that answer it."""

    text: str
    gold: tuple[str, ...]


def from_graphs(graphs: Iterable[SrcGraph]) -> list[SubQuestion]:
    """Distinct sub-questions of MuSiQue items, in order; `#1` becomes the answer of node 1."""
    found: dict[SubQuestion, None] = {}
    for graph in graphs:
        answers = [node.answer for node in graph.nodes]
        for node in graph.nodes:
            text = REFERENCE.sub(lambda match: answers[int(match.group(1)) - 1], node.text)  # noqa: B023
            if node.pid is not None:
                found[SubQuestion(text, (node.pid,))] = None
    return list(found)


def from_dialogues(dialogues: Iterable[Dialogue]) -> list[SubQuestion]:
    """Distinct sub-questions of dialogues, in order; `[A20]` becomes the answer of trace 20."""
    found: dict[SubQuestion, None] = {}
    for dialogue in dialogues:
        answers = {trace.id: trace.answer for trace in dialogue.traces}
        for trace in dialogue.traces:
            text = TRACE_REFERENCE.sub(lambda match: answers[int(match.group(1))], trace.sub_question)  # noqa: B023
            if trace.paragraph_ids:
                found[SubQuestion(text, trace.paragraph_ids)] = None
    return list(found)


def recall(
    retriever: Retriever, questions: Sequence[SubQuestion], ks: Sequence[int], show_progress: bool = False
) -> dict[str, dict[str, float]]:
    """`recall@k` for each k as {"value", "n", "low", "high"} (95 %: Wilson where each question has one gold paragraph,
    else a bootstrap over questions with a fixed seed). Raises ValueError for no questions.
    """
    if not questions:
        raise ValueError("no sub-question with a gold paragraph to measure recall on")
    found: list[list[str]] = []
    with progress("search", len(questions), show_progress) as advance:
        for start in range(0, len(questions), _BATCH):
            batch = [question.text for question in questions[start : start + _BATCH]]
            found += [[hit.paragraph_id for hit in hits] for hits in retriever.search(batch, max(ks))]
            advance(len(batch))
    results = {}
    for k in ks:
        shares = np.asarray(
            [
                len(set(question.gold) & set(ids[:k])) / len(set(question.gold))
                for question, ids in zip(questions, found, strict=True)
            ]
        )
        if all(len(set(question.gold)) == 1 for question in questions):
            low, high = wilson(int(shares.sum()), len(shares))
        else:
            weights = np.random.default_rng(42).multinomial(
                len(shares), np.full(len(shares), 1 / len(shares)), 1000
            )
            low, high = np.quantile(weights @ shares / len(shares), [0.025, 0.975])
        results[f"recall@{k}"] = {
            "value": float(shares.mean()), "n": len(shares), "low": float(low), "high": float(high)
        }  # fmt: skip
    return results


def _corpus(files: Sequence[Path], graphs: Iterable[SrcGraph]) -> Iterator[Paragraph]:
    """The corpus files' paragraphs, then those of the MuSiQue items (without their own ids: they have none)."""
    for file in files:
        for _, paragraph in read_corpus(file):
            yield paragraph
    for graph in graphs:
        for p in graph.paragraphs:
            yield Paragraph(p.title, p.text)


def _questions_and_corpus(args: argparse.Namespace) -> tuple[list[SubQuestion], Any]:
    """What is asked, and what is searched: a file where it is one file alone, else paragraphs."""
    if args.mumu is not None:
        files = [args.mumu / stage / f"{args.part}.jsonl" for stage in STAGE_OF]
        there = [file for file in files if file.is_file()]
        if not there:
            raise FileNotFoundError(f"{args.mumu}: holds no {args.part} dialogues (STAGE/{args.part}.jsonl)")
        questions = from_dialogues(dialogue for file in there for dialogue in load_dialogues(file))
        return questions, (args.corpus or args.mumu / "corpus.jsonl")
    graphs, _ = load_graphs(args.musique)
    others, _ = load_graphs(args.distractors)
    return from_graphs(graphs), _corpus([args.corpus] if args.corpus else [], [*graphs, *others])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.retrieval_recall",
        description="Recall of the gold paragraphs of resolved sub-questions.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--musique", nargs="+", type=Path, metavar="FILE", help="MuSiQue files to ask from")
    source.add_argument("--mumu", type=Path, metavar="DIR", help="a built MuMu directory to ask from")
    parser.add_argument("--part", default="dev", help="split of the MuMu directory (default: dev)")
    parser.add_argument(
        "--corpus", type=Path, metavar="FILE", help="corpus JSONL (default with --mumu: its own)"
    )
    parser.add_argument(
        "--distractors", nargs="+", default=[], type=Path, metavar="FILE",
        help="MuSiQue files whose paragraphs also belong to the corpus",
    )  # fmt: skip
    parser.add_argument(
        "--index", type=Path, required=True, metavar="DIR", help="index directory, built if absent"
    )
    parser.add_argument("--kind", default="dense", choices=KINDS, help="what to build (default: dense)")
    parser.add_argument("--encoder", default=DEFAULT, metavar="NAME|DIR", help=f"default: {DEFAULT}")
    parser.add_argument(
        "--context", type=Path, metavar="DIR", help="paragraph encoder of a two-encoder model"
    )
    parser.add_argument(
        "--k", nargs="+", type=int, default=[1, 5, 10, 20], metavar="K", help="default: 1 5 10 20"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(argv)
    try:
        if min(args.k) < 1:
            raise ValueError(f"--k {min(args.k)}: ask for at least one paragraph")
        questions, corpus = _questions_and_corpus(args)
        if (args.index / MANIFEST).is_file() and not (args.index / PLAN).is_file():
            print(f"using the index in {args.index}")
            retriever = open_index(args.index)
        else:
            encoder = None if args.kind == "bm25" else load_encoder(args.encoder, args.context)
            retriever = build_index(corpus, args.index, encoder, args.kind)
        results = recall(retriever, questions, args.k, show_progress=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(questions)} sub-questions, {len(retriever)} paragraphs")
    for name, figure in results.items():
        print(f"{name:10} {figure['value']:6.1%} ({figure['low']:.1%} to {figure['high']:.1%})")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
