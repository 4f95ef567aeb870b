"""MuMu-QA: multi-turn, multi-hop dialogues built from MuSiQue reasoning graphs.

    MuSiQue JSONL -> load, reject -> de-duplicate -> purge train of dev -> type and word the nodes
        -> stage1/ single questions, short/ 3-7 turns, long/ 6-32 turns, ultra/ 33-67 turns (dev only)
        -> corpus.jsonl (every paragraph of every context), sample.html (a dialogue to look at), manifest.json (what
        went in, came out, and was rejected, by rule)

    python -m datamodules.mumu --train FILE... --dev FILE... --out DIR [--seed N] [--short N --long N --ultra N]
        [--realiser llm --llm-url URL]        # questions worded by a language model (mumu_llm.py), not by templates

Same inputs and seed give the same bytes. Source: CMT-RAG, section 3.1 and appendix A; Table 6 for the lengths.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.mumu_interleave import finalise, pack
from datamodules.mumu_model import (
    SCHEMA,
    SPEC_VERSION,
    STAGE_OF,
    Dialogue,
    Trace,
    Turn,
    dump_line,
    load_dialogues,
    to_row,
)
from datamodules.mumu_operators import DraftTurn, original
from datamodules.mumu_page import sample_page
from datamodules.mumu_relations import NodeTemplate
from datamodules.mumu_sessions import Pool, build_sessions, build_short
from datamodules.mumu_splits import deduplicate, hold_out, purge
from datamodules.mumu_statistics import statistics
from datamodules.mumu_text import Wording, annotate
from datamodules.musique import SrcGraph, load_graphs

if TYPE_CHECKING:
    from inference.llm import LLMClient

__all__ = ["Dialogue", "NodeTemplate", "Trace", "Turn", "build", "load_dialogues", "main"]

MAX_TRACES = {"short": 64, "long": 128, "ultra": 10_000}
BOUNDS = {"long": (6, 32), "ultra": (33, 67)}
_OWN_ENTRIES = frozenset((*STAGE_OF, "corpus.jsonl", "sample.html", "manifest.json"))

Report = Callable[[str, int, int], None]  # (what, done, total)


def build(
    train: Iterable[str | Path],
    dev: Iterable[str | Path],
    out: str | Path,
    seed: int = 42,
    realiser: str = "template",
    *,
    short: int | None = None,
    long: int | None = None,
    ultra: int | None = None,
    ultra_train: int = 0,
    short_dev: int | None = None,
    long_dev: int | None = None,
    tune: float = 0.0,
    max_uses: int = 3,
    mention_splice: bool = False,
    allow_without_paragraphs: bool = False,
    templates: Sequence[NodeTemplate] = (),
    phrases: Mapping[str, str] | None = None,
    overwrite: bool = False,
    report: Report | None = None,
    llm: LLMClient | None = None,
    llm_thinking: bool = False,
) -> dict[str, Any]:
    """Build a MuMu directory and return its manifest.

    train, dev: MuSiQue files. short, long, ultra_train: dialogues of the training split, short_dev, long_dev, ultra: of
    the development split (ultra-long ones are for evaluation unless asked for); None takes a share of the source
    questions (short 32 %, long 20 %, ultra 4 %), and what cannot be reached is recorded in the manifest. tune:
    share of the training questions held out, in whole groups, as a third split for choosing settings. max_uses:
    dialogues of a split one source question may appear in. mention_splice: also splice on a root `X >> rel` whose X an
    earlier turn answered. templates, phrases: extra wordings of sub-questions and of "that <type>", tried before the
    built-in ones. report: called with (what, done, total). llm: the model that words the questions of realiser
    "llm", llm_thinking: its thinking mode stays on; the graphs are the same either way.

    Written to a temporary directory beside `out` and renamed at the end. Raises ValueError for malformed
    sources (file, line, field), an unknown realiser or impossible sizes, FileNotFoundError for a missing
    source, FileExistsError when `out` is in use, LLMError for what the model's server does.
    """
    files = {"train": [Path(p) for p in train], "dev": [Path(p) for p in dev]}
    out = Path(out)
    sizes = (short, long, ultra, ultra_train, short_dev, long_dev)
    _check_arguments(files["train"], files["dev"], realiser, llm, max_uses, tune, sizes)
    _check_target(out, overwrite)
    tell = report or (lambda what, done, total: None)

    wording = Wording(templates, phrases)
    rejected: dict[str, Counter[str]] = {}
    source: dict[str, list[SrcGraph]] = {}
    counts: dict[str, Any] = {"source_questions": {}}
    for split, paths in files.items():
        tell(f"read {split}", 0, 1)
        graphs, rejected[f"source/{split}"] = load_graphs(paths, allow_without_paragraphs)
        kept, rejected[f"duplicates/{split}"] = deduplicate(graphs)
        counts["source_questions"][split] = {"accepted": len(graphs), "distinct": len(kept)}
        source[split] = annotate(kept, wording)
        tell(f"read {split}", 1, 1)
    source["train"], rejected["purged/train"] = purge(source["train"], source["dev"])
    if tune > 0:
        source["train"], source["tune"] = hold_out(source["train"], tune, random.Random(f"{seed}/tune"))
    for split, graphs in source.items():
        counts["source_questions"].setdefault(split, {})["used"] = len(graphs)
    for split, paths in files.items():
        if paths and not source[split]:
            raise ValueError(
                f"no usable question left in {', '.join(map(str, paths))}: {_why(rejected, split)}"
            )

    n_train, n_dev, n_tune = (len(source.get(split, ())) for split in ("train", "dev", "tune"))
    wanted = {
        ("short", "train"): _share(short, 0.32, n_train),
        ("short", "dev"): _share(short_dev, 0.30, n_dev),
        ("long", "train"): _share(long, 0.20, n_train),
        ("long", "dev"): _share(long_dev, 0.20, n_dev),
        ("ultra", "dev"): _share(ultra, 0.04, n_dev),
        ("ultra", "train"): ultra_train,
    }
    if tune > 0:
        wanted |= {("short", "tune"): round(0.30 * n_tune), ("long", "tune"): round(0.20 * n_tune)}
    drafted: dict[tuple[str, str], list[list[DraftTurn]]] = {}
    for split in source:
        drafted["stage1", split] = [[original(graph)] for graph in source[split]]
    for (stage, split), count in wanted.items():
        rng = random.Random(f"{seed}/{stage}/{split}")
        pool = Pool(source[split], wording, max_uses, mention_splice)
        drafted[stage, split] = _build_stage(stage, split, pool, count, rng, tell)
        rejected[f"{stage}/{split}"] = pool.rejections
    extra: dict[str, Any] = {}
    if mention_splice:
        extra["mention_splices"] = {
            f"{stage}/{split}": sum(turn.graph.borrowed for turns in drafts for turn in turns)
            for (stage, split), drafts in drafted.items()
        }
    if realiser == "llm" and llm is not None:
        from datamodules.mumu_llm import realise

        every = [turns for drafts in drafted.values() for turns in drafts]
        worded, extra["realisation"] = realise(every, llm, wording, tell, llm_thinking)
        rest = iter(worded)
        drafted = {name: [next(rest) for _ in drafts] for name, drafts in drafted.items()}
    built = {
        (stage, split): [_dialogue(stage, split, n, turns, seed) for n, turns in enumerate(drafts)]
        for (stage, split), drafts in drafted.items()
    }

    manifest = {
        "schema": SCHEMA,
        "spec_version": SPEC_VERSION,
        "seed": seed,
        "realiser": realiser,
        "max_uses": max_uses,
        "tune": tune,
        "allow_without_paragraphs": allow_without_paragraphs,
        "sources": {
            split: [{"file": path.name, "sha256": _sha256(path)} for path in paths]
            for split, paths in files.items()
        },
        "counts": counts,
        "wanted": {f"{stage}/{split}": count for (stage, split), count in wanted.items()},
        "rejections": {name: dict(sorted(c.items())) for name, c in rejected.items()},
        "statistics": {f"{s}/{p}": statistics(d) for (s, p), d in built.items() if d},
        "absent": _absent(built, wanted),
        **extra,
    }
    _write(out, built, source, manifest, overwrite)
    return manifest


def _build_stage(
    stage: str, split: str, pool: Pool, count: int, rng: random.Random, tell: Report
) -> list[list[DraftTurn]]:
    """The drafted dialogues of one stage and split."""
    name, done = f"{stage} {split}", 0
    tell(name, 0, max(count, 1))

    def tick() -> None:
        nonlocal done
        done += 1
        tell(name, done, count)

    if stage == "short":
        dialogues = build_short(pool, count, rng, MAX_TRACES[stage], tick)
    else:
        low, high = BOUNDS[stage]
        targets = [
            rng.randint(low, high) if stage == "ultra" else min(high, low + int(rng.expovariate(1 / 6.3)))
            for _ in range(count)
        ]
        sessions = build_sessions(pool, int(1.1 * sum(targets)), rng)
        packed = pack(sessions, targets, (low, high), MAX_TRACES[stage], rng, tick, pool.rejections)
        dialogues = [[turn for _, turn in dialogue] for dialogue in packed]
    tell(name, max(count, 1), max(count, 1))
    return dialogues


def _dialogue(stage: str, split: str, number: int, turns: Sequence[DraftTurn], seed: int) -> Dialogue:
    return Dialogue(f"{stage}-{split}-{number:05d}", split, STAGE_OF[stage], seed, finalise(turns))


def _share(wanted: int | None, share: float, n: int) -> int:
    return wanted if wanted is not None else round(share * n)


def _absent(
    built: Mapping[tuple[str, str], list[Dialogue]], wanted: Mapping[tuple[str, str], int]
) -> dict[str, str]:
    """Why a file of the layout is missing or smaller than wanted."""
    out = {}
    for (stage, split), dialogues in built.items():
        count = wanted.get((stage, split))
        if (stage, split) == ("ultra", "train") and count == 0:
            out["ultra/train"] = (
                "not built: ultra-long dialogues are for evaluation unless ultra_train asks for them"
            )
        elif not dialogues:
            out[f"{stage}/{split}"] = (
                "absent: the source holds too few questions" if count != 0 else "not asked for"
            )
        elif count is not None and len(dialogues) < count:
            out[f"{stage}/{split}"] = f"{len(dialogues)} of {count}: the source holds no more within max_uses"
    return out


def _why(rejected: Mapping[str, Counter[str]], split: str) -> str:
    reasons = {k: dict(v) for k, v in rejected.items() if k.endswith(split) and v}
    return f"rejected {reasons}" if reasons else "the files are empty"


def _check_arguments(
    train: Sequence[Path],
    dev: Sequence[Path],
    realiser: str,
    llm: LLMClient | None,
    max_uses: int,
    tune: float,
    sizes: Sequence[int | None],
) -> None:
    if realiser not in ("template", "llm"):
        raise ValueError(f"unknown realiser {realiser!r}; use 'template' or 'llm'")
    if realiser == "llm" and llm is None:
        raise ValueError("realiser 'llm' needs a server: name it with --llm-url URL")
    if not train and not dev:
        raise ValueError("no source given: name at least one MuSiQue file for train or dev")
    if not 0 <= tune < 1:
        raise ValueError(f"tune is {tune}: it is a share of the training questions, from 0 to below 1")
    if max_uses < 1 or any(size is not None and size < 0 for size in sizes):
        raise ValueError("sizes must be 0 or more and max_uses at least 1")


def _check_target(out: Path, overwrite: bool) -> None:
    """Refuse to touch anything that is not ours. A `source/` beside the build (a world directory) is left alone."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"{out} is a file; --out names a directory")
    names = {entry.name for entry in out.iterdir()} - {"source"}
    if not names:
        return
    if foreign := sorted(names - _OWN_ENTRIES):
        raise FileExistsError(
            f"{out} holds something else ({', '.join(foreign[:5])}); choose an empty directory"
        )
    if not overwrite:
        raise FileExistsError(f"{out} already holds a built directory; pass --overwrite to replace it")


def _write(
    out: Path,
    built: Mapping[tuple[str, str], list[Dialogue]],
    source: Mapping[str, Sequence[SrcGraph]],
    manifest: dict[str, Any],
    overwrite: bool,
) -> None:
    """Write everything beside `out`, then rename; the manifest comes last, so a directory with one is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for (stage, split), dialogues in built.items():
            if dialogues:
                (temporary / stage).mkdir(exist_ok=True)
                with (temporary / stage / f"{split}.jsonl").open("w", encoding="utf-8") as handle:
                    handle.writelines(dump_line(to_row(dialogue)) for dialogue in dialogues)
        paragraphs = {p.pid: p for graphs in source.values() for graph in graphs for p in graph.paragraphs}
        with (temporary / "corpus.jsonl").open("w", encoding="utf-8") as handle:
            for pid in sorted(paragraphs):
                p = paragraphs[pid]
                handle.write(dump_line({"id": p.pid, "title": p.title, "text": p.text}))
        with (temporary / "sample.html").open("w", encoding="utf-8", newline="\n") as handle:
            handle.write(sample_page(built, paragraphs))
        manifest["counts"]["paragraphs"] = len(paragraphs)
        text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False)
        (temporary / "manifest.json").write_text(text + "\n", encoding="utf-8")
        _check_target(out, overwrite)
        if not out.exists():
            temporary.chmod(0o755)
            temporary.rename(out)
            return
        (out / "manifest.json").unlink(missing_ok=True)
        for name in sorted(_OWN_ENTRIES):
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
        for name in sorted((e.name for e in temporary.iterdir()), key=lambda n: (n == "manifest.json", n)):
            (temporary / name).rename(out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.mumu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--train", nargs="+", default=[], type=Path, metavar="FILE", help="MuSiQue files to train on"
    )
    parser.add_argument(
        "--dev", nargs="+", default=[], type=Path, metavar="FILE", help="MuSiQue files to evaluate on"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to create")
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--realiser", default="template", help="how questions are worded: template or llm")
    parser.add_argument("--llm-url", metavar="URL", help="OpenAI-compatible server (key: OPENAI_API_KEY)")
    parser.add_argument("--llm-model", metavar="NAME", help="its model (default: the only one it serves)")
    parser.add_argument(
        "--llm-cache", type=Path, metavar="FILE", help="its answers (default: in TRACE_MEMORY_HOME)"
    )
    parser.add_argument("--llm-concurrency", type=int, metavar="N", help="requests in flight (default: 32)")
    parser.add_argument(
        "--llm-thinking", action="store_true", help="do not ask it to answer without thinking"
    )
    for name, what in (
        ("short", "training dialogues of 3-7 turns (default: 32 %% of the questions)"),
        ("long", "training dialogues of 6-32 turns (default: 20 %%)"),
        ("short-dev", "development dialogues of 3-7 turns (default: 30 %%)"),
        ("long-dev", "development dialogues of 6-32 turns (default: 20 %%)"),
        ("ultra", "development dialogues of 33-67 turns (default: 4 %%)"),
        ("ultra-train", "training dialogues of 33-67 turns (default: 0)"),
    ):
        default = 0 if name == "ultra-train" else None
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=what)
    parser.add_argument(
        "--tune", default=0.05, type=float, metavar="SHARE",
        help="share of the training questions held out to choose settings on (default 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--max-uses", default=3, type=int, metavar="N", help="dialogues of a split per source question"
    )
    parser.add_argument(
        "--mention-splice", action="store_true",
        help="also splice on a subject `X >> ...` that an earlier turn answered",
    )  # fmt: skip
    parser.add_argument("--allow-without-paragraphs", action="store_true", help="accept plan-only records")
    parser.add_argument("--overwrite", action="store_true", help="replace a directory built before")
    args = vars(parser.parse_args(argv))
    named = {name: args.pop(f"llm_{name}") for name in ("url", "model", "cache", "concurrency")}
    server = {name: value for name, value in named.items() if value is not None}

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with ExitStack() as stack:
            if args["realiser"] == "llm" and "url" in server:
                from inference.home import memory_home
                from inference.llm import LLMClient

                server.setdefault("cache", memory_home() / "llm-cache.sqlite")
                args["llm"] = stack.enter_context(LLMClient(**server))
            elif args["realiser"] == "template" and (server or args["llm_thinking"]):
                raise ValueError("the --llm options belong to --realiser llm; add it, or leave them out")
            progress = stack.enter_context(Progress(*columns, console=console))
            tasks: dict[str, Any] = {}

            def report(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = progress.add_task(what, total=total)
                progress.update(tasks[what], completed=done, total=total)

            manifest = build(**args, report=report)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    for name, row in manifest["statistics"].items():
        turns, subs, cross = (row[key]["mean"] for key in ("turns", "sub_questions", "cross_turn_edges"))
        print(
            f"{name:13} {row['dialogues']:6} dialogues, per dialogue {turns} turns, "
            f"{subs} sub-questions, {cross} cross-turn edges"
        )
    for name, why in manifest["absent"].items():
        print(f"{name:13} {why}")
    print(f"written to {args['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
