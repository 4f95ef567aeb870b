"""The page of a trace DAG: any text stays text, every trace and edge is drawn once, nothing lies on anything else."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules import mumu, mumu_page
from inference.dag_layout import Layout, Node, layout, text_lines
from inference.dag_page import Page, PageParagraph, PageTrace, PageTurn, closure, inverse, render
from tests.mumu_sources import records, write

HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "<!-- --> ]]> & &amp; &lt;b&gt; ' \" ` $title ${data} %s {0}",
    "مرحبا \u202e بالعالم [A1]",
    "👩‍👩‍👧‍👦 漢字 \x00 \x07 \ud800 \u2028 \r\n",
    "w" * 400,
    "</style></title><base href=//x>",
]


def random_page(seed: int, turns: int = 8, text: list[str] | None = None) -> Page:
    """Turns of 0 to 5 traces with random dependencies; texts are drawn from `text`."""
    rng, texts, traces = random.Random(seed), text or ["What is it?", "Who was [A1]?", "A name"], 0
    out = []
    for _ in range(turns):
        part = []
        for _ in range(rng.randint(0, 5)):
            deps = rng.sample(range(1, traces + 1), min(traces, rng.choice([0, 1, 1, 2, 3])))
            traces += 1
            words = [rng.choice(texts) for _ in range(3)]
            part.append(
                PageTrace(traces, *words[:2], tuple(deps), words[2], ("p1", "p2"), (rng.choice(texts),))
            )
        out.append(PageTurn(rng.choice(texts), rng.choice(["", *texts]), tuple(part), (rng.choice(texts),)))
    paragraph = PageParagraph("p1", rng.choice(texts), rng.choice(texts))
    return Page(rng.choice(texts), tuple(out), (paragraph,), ((rng.choice(texts), rng.choice(texts)),))


class Reader(HTMLParser):
    """Tags with their attributes in order, pieces of text with their count, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: Counter[str] = Counter()
        self.data = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"id": "data", "type": "application/json"}):
            self.data += data
        self.text[data] += 1

    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attrs)) for tag, attrs in self.tags]


def plain(value: object) -> object:
    """The same page with every non-empty text replaced by "x"."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return ("x" if value else "") if isinstance(value, str) else value


@pytest.mark.parametrize("seed", range(10))
def test_no_tag_and_no_attribute_comes_from_the_data(seed: int) -> None:
    page = random_page(seed, text=HOSTILE)
    hostile, harmless = Reader(render(page)), Reader(render(plain(page)))  # type: ignore[arg-type]
    assert hostile.shape() == harmless.shape()
    for tag, attributes in hostile.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset") for name in attributes), tag
        assert re.fullmatch(r"#[AT]\d+", attributes.get("href") or "#A1"), tag
    assert [tag for tag, _ in hostile.tags].count("script") == 2


@pytest.mark.parametrize("seed", range(10))
def test_the_embedded_data_is_the_page(seed: int) -> None:
    page = random_page(seed, text=HOSTILE)
    data = json.loads(Reader(render(page)).data)
    assert data["page"] == json.loads(json.dumps(dataclasses.asdict(page)))
    assert render(page).encode("utf-8").decode("utf-8") == render(page)


def test_texts_stand_where_they_belong() -> None:
    page = Page(
        "<title>",
        (
            PageTurn(
                "<q>",
                "",
                (PageTrace(1, "<sub>", "<kw>", (), "<a>"), PageTrace(2, "s", "k", (1,), "")),
                ("<l>",),
            ),
        ),
    )
    text = Reader(render(page)).text
    assert text["<title>"] == 2 and text["<q>"] == text["<sub>"] == text["<a>"] == text["<l>"] == 1
    assert text["no answer"] == 2, "of the second trace and of the turn"
    assert text["needs [A1]"] == 1


def test_nothing_is_fetched() -> None:
    page = render(random_page(3))
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|<link|<iframe|innerHTML|eval\(", page)
    policy = next(a["content"] for tag, a in Reader(page).tags if "http-equiv" in a)
    assert policy and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("seed", range(10))
def test_every_trace_and_every_edge_is_drawn_once(seed: int) -> None:
    page = random_page(seed, turns=12)
    tags = Reader(render(page)).tags
    traces = [trace for turn in page.turns for trace in turn.traces]
    assert [a["id"] for _, a in tags if a.get("class") == "card"] == [f"trace-{t.id}" for t in traces]
    drawn = Counter((int(a["data-from"] or 0), int(a["data-to"] or 0)) for _, a in tags if "data-from" in a)
    assert drawn == Counter((dep, trace.id) for trace in traces for dep in trace.deps)
    turn_of = {trace.id: n for n, turn in enumerate(page.turns) for trace in turn.traces}
    for _, a in tags:
        if "data-from" in a:
            cross = turn_of[int(a["data-from"] or 0)] != turn_of[int(a["data-to"] or 0)]
            assert a["class"] == ("edge cross" if cross else "edge inner")


nodes = st.integers(0, 10**6).map(
    lambda seed: [
        [Node(t.id, t.deps, 1 + t.id % 5) for t in turn.traces] for turn in random_page(seed, seed % 14).turns
    ]
)


@given(nodes)
def test_cards_lie_apart_and_on_the_canvas(turns: list[list[Node]]) -> None:
    placed = layout(turns, top=100, bottom=60)
    boxes = [(c.x, c.y, c.x + c.width, c.y + c.height) for c in placed.cards.values()]
    assert all(0 <= a and 100 < b and c <= placed.width and d + 60 <= placed.height for a, b, c, d in boxes)
    for n, (a, b, c, d) in enumerate(boxes):
        assert all(c < e or g < a or d < f or h < b for e, f, g, h in boxes[:n])


def segments(placed: Layout) -> list[tuple[int, int, int, int, int]]:
    """(source, left, top, right, bottom) of every straight piece of every edge."""
    return [
        (edge.source, min(a, c), min(b, d), max(a, c), max(b, d))
        for edge in placed.edges
        for (a, b), (c, d) in zip(edge.points, edge.points[1:], strict=False)
    ]


@given(nodes)
def test_edges_run_from_card_to_card_across_none(turns: list[list[Node]]) -> None:
    placed = layout(turns, top=100)
    for edge in placed.edges:
        for (x, y), card in (
            (edge.points[0], placed.cards[edge.source]),
            (edge.points[-1], placed.cards[edge.target]),
        ):
            inside = card.x <= x <= card.x + card.width and card.y <= y <= card.y + card.height
            assert inside and (x in (card.x, card.x + card.width) or y in (card.y, card.y + card.height))
    for _, left, top, right, bottom in segments(placed):
        assert left == right or top == bottom
        assert 0 < left and right < placed.width and 100 < top and bottom < placed.height
        for c in placed.cards.values():
            assert not (left < c.x + c.width and c.x < right and top < c.y + c.height and c.y < bottom)


@given(nodes)
def test_lines_of_different_traces_never_lie_on_each_other(turns: list[list[Node]]) -> None:
    pieces = sorted(set(segments(layout(turns, top=100))))
    for vertical in (True, False):
        lines: dict[int, list[tuple[int, int, int]]] = {}
        for source, left, top, right, bottom in pieces:
            if (left == right) == vertical:
                at, low, high = (left, top, bottom) if vertical else (top, left, right)
                lines.setdefault(at, []).append((source, low, high))
        for line in lines.values():
            for n, (source, low, high) in enumerate(line):
                assert all(source == s or high <= a or b <= low for s, a, b in line[:n])


def test_labels_name_the_reference_beside_the_arrowhead() -> None:
    """Trace 1 in the first turn, 2 and 3 in the second: 1 to 2 crosses turns, 2 to 3 goes straight down."""
    placed = layout([[Node(1, (), 1)], [Node(2, (1,), 1), Node(3, (2,), 1)]], top=0)
    (across, down), card = placed.edges, placed.cards[2]
    assert across.cross and not down.cross
    assert across.anchor == "end" and 0 < card.x - across.label[0] < 20
    assert card.y + card.height < down.label[1] < placed.cards[3].y


def test_ancestors_and_descendants() -> None:
    """1 -> 2 -> 4, 3 -> 4, 4 -> 5; 6 stands alone."""
    above = closure({1: (), 2: (1,), 3: (), 4: (2, 3), 5: (4,), 6: ()})
    assert above == {1: [], 2: [1], 3: [], 4: [1, 2, 3], 5: [1, 2, 3, 4], 6: []}
    assert inverse(above) == {1: [2, 4, 5], 2: [4, 5], 3: [4, 5], 4: [5], 5: [], 6: []}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 1),
        ("ab cd", 1),
        ("abcde fghij k", 2),
        ("a" * 10, 1),
        ("a" * 11, 2),
        ("ab " + "a" * 25, 4),
        ("漢" * 6, 2),
    ],
)
def test_lines_of_ten_characters(text: str, lines: int) -> None:
    assert text_lines(text, 10) == lines


def test_large_pages_and_empty_ones() -> None:
    deps = {n: tuple(sorted({n - 1, n // 2} - {0, n})) for n in range(1, 236)}
    traces = [PageTrace(n, f"Who is [A{n - 1}]?", "who", deps[n], f"Name {n}") for n in deps]
    turns = [PageTurn("Who?", "Name", tuple(traces[n * 235 // 67 : (n + 1) * 235 // 67])) for n in range(67)]
    page = render(Page("large", tuple(turns)))
    assert page.count("<section") == 67 and page.count("data-from=") == sum(map(len, deps.values()))
    assert page == render(Page("large", tuple(turns)))
    assert "<section" not in render(Page("empty", ()))


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([(1, ()), (1, ())], "trace 1 appears twice"),
        ([(1, (2,)), (2, ())], "trace 1 depends on 2, which is not an earlier trace"),
        ([(1, ()), (2, (1, 1))], "trace 2 depends on 1 twice"),
        ([(0, ())], "trace id 0 is out of range"),
    ],
)
def test_what_is_not_a_dag_is_refused(traces: list[tuple[int, tuple[int, ...]]], message: str) -> None:
    turn = PageTurn("q", "a", tuple(PageTrace(i, "s", "k", deps, "a") for i, deps in traces))
    with pytest.raises(ValueError, match=message):
        render(Page("bad", (turn,)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    paths = [write(folder / f"{split}.jsonl", records(1, 60, split, 8)) for split in ("train", "dev")]
    mumu.build(paths[:1], paths[1:], folder / "out", short=4, long=3, short_dev=4, long_dev=2, ultra=0)
    return folder / "out"


def test_the_sample_is_the_first_long_dialogue(directory: Path, tmp_path: Path) -> None:
    assert mumu_page.main([str(directory), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_bytes()
    assert page == (directory / "sample.html").read_bytes()
    dialogue = mumu.load_dialogues(directory / "long" / "dev.jsonl")[0]
    data = json.loads(Reader(page.decode()).data)["page"]
    assert data["title"] == dialogue.id
    assert [t["id"] for turn in data["turns"] for t in turn["traces"]] == [t.id for t in dialogue.traces]
    assert {p["id"] for p in data["paragraphs"]} == {p for t in dialogue.traces for p in t.paragraph_ids}


def test_without_a_development_split_the_sample_is_a_training_dialogue(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", records(1, 20, "A", 8))
    mumu.build([path], [], tmp_path / "out", short=0, long=0)
    assert "<title>stage1-train-00000</title>" in (tmp_path / "out" / "sample.html").read_text("utf-8")


def test_a_dialogue_by_its_id(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--split", "short", "--part", "train", "--dialogue", "short-train-00002"]
    assert mumu_page.main([str(directory), *options]) == 0
    assert "<title>short-train-00002</title>" in Path("short-train-00002.html").read_text("utf-8")
    assert capsys.readouterr().out == "wrote short-train-00002.html\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "ultra"], "has no ultra/dev; it has stage1/dev, stage1/train, short/dev"),
        (
            ["--dialogue", "long-dev-0001"],
            "long/dev has no dialogue 'long-dev-0001'; near it: long-dev-00001",
        ),
        (["--dialogue", "?"], "long/dev has no dialogue '?'; near it: long-dev-00000, long-dev-00001"),
        (["--index", "2"], "long/dev holds 2 dialogues; --index runs from 0 to 1"),
        (["--index", "-1"], "long/dev holds 2 dialogues; --index runs from 0 to 1"),
        (["--out", "nowhere/page.html"], "nowhere/page.html"),
    ],
)
def test_errors_are_one_line(
    directory: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mumu_page.main([str(directory), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_directories_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mumu_page.main([str(tmp_path / "missing")]) == 2
    assert "missing is not a directory; build one" in capsys.readouterr().err
    assert mumu_page.main([str(tmp_path)]) == 2
    assert "holds no dialogues; build them" in capsys.readouterr().err
