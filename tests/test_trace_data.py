"""Packing, the order of dialogues, and the documents of the stages."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.packed_data import PlannedTurn, spread
from datamodules.packing import Document, PackedLoader, pack
from datamodules.pretrain import repeat
from datamodules.traces import TraceData, draw_replay, encode_dialogue, planned_turns, read_split
from inference.traces import TraceDraft, TracePlan
from tests.tiny_training import tiny

TURNS = [
    PlannedTurn("Who sang [A3]?", TracePlan((TraceDraft(1, "Who sang it?", "sang", ()),))),
    PlannedTurn(
        "And where?",
        TracePlan((TraceDraft(2, "Where is [A1]?", "[A1]", (1,)), TraceDraft(3, "In [A2]?", "[A2]", (2, 1)))),
    ),
]


def numbered(n: int, length: int = 3) -> list[Document]:
    """Documents whose every id is their own number, so that a batch tells which it holds."""
    return [Document.of([i] * (length + i % 2), [1.0] * (length + i % 2), length) for i in range(n)]


# -- packing --------------------------------------------------------------------------------------------------------


def test_pack_by_hand() -> None:
    """Ids 10 11 12 | 20 21: targets 12 (of document 1, weight 1) and 21 (weight 0.5) are predicted one place earlier.

    The first token never is a target, whatever weight it was given.
    """
    batch = pack(
        [Document.of([10, 11, 12], [1, 0, 1], 1), Document.of([20, 21], [9, 0.5], 0)], window_plan_tokens=7.0
    )
    assert batch.input_ids_BL.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.seq_idx_BL.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.seq_idx_BL.dtype == torch.int32
    assert batch.positions_T.tolist() == [1, 3]
    assert batch.targets_T.tolist() == [12, 21]
    assert batch.weights_T.tolist() == [1.0, 0.5]
    assert (batch.window_plan_tokens, batch.documents, batch.tokens, batch.plan_tokens) == (7.0, 2, 5, 1)


def test_zero_weight_copy_keeps_shapes() -> None:
    batch = pack(numbered(2), 5.0, counts=False)
    assert batch.weights_T.sum() == 0
    assert len(batch.targets_T) > 0
    assert (batch.documents, batch.plan_tokens) == (0, 0)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12), limit=st.integers(5, 60))
def test_rows_hold_every_document_once(lengths: list[int], limit: int) -> None:
    documents = [Document.of([i + 1] * n, [1.0] * n, n) for i, n in enumerate(lengths)]
    batch = pack(documents, 1.0, max_row_tokens=limit)
    seen = []
    for ids, seq in zip(batch.input_ids_BL.tolist(), batch.seq_idx_BL.tolist(), strict=True):
        runs = [(key, len(list(group))) for key, group in itertools.groupby(zip(seq, ids, strict=True))]
        assert [number for (number, _), _ in runs] == list(range(len(runs)))
        real = [(i, n) for (_, i), n in runs if i > 0]
        assert sum(n for _, n in real) <= limit or len(real) == 1
        seen += real
    assert sorted(seen) == [(i + 1, n) for i, n in enumerate(lengths)]
    flat = batch.input_ids_BL.flatten()
    assert torch.equal(flat[batch.positions_T + 1], batch.targets_T)
    assert torch.equal(flat[batch.positions_T], batch.targets_T)  # the predictor is of the same document


def test_document_refuses_unequal_lists() -> None:
    with pytest.raises(ValueError, match="weight for each"):
        Document.of([1, 2, 3], [1.0, 1.0], 2)


# -- order ----------------------------------------------------------------------------------------------------------


def held(batch) -> list[int]:
    """Which documents a batch counts."""
    ids, seq = batch.input_ids_BL[0].tolist(), batch.seq_idx_BL[0].tolist()
    found = [i for (_, i), _ in itertools.groupby(zip(seq, ids, strict=True))]
    return found if batch.documents else []


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40), batch=st.integers(1, 4), world=st.integers(1, 4), accumulate=st.integers(1, 4),
    epoch=st.integers(0, 2), fill=st.booleans(),
)  # fmt: skip
def test_ranks_share_an_epoch(
    n: int, batch: int, world: int, accumulate: int, epoch: int, fill: bool
) -> None:
    """Every document once an epoch; a window's documents are those of one process with the same product; its weight
    is theirs; all ranks have as many batches."""
    documents = numbered(n)
    loaders = [
        PackedLoader(documents, batch, 5, rank=r, world=world, accumulate=accumulate, fill_last_window=fill)
        for r in range(world)
    ]
    single = PackedLoader(documents, batch * world * accumulate, 5)
    for loader in (*loaders, single):
        loader.set_epoch(epoch)
    ranks = [list(loader) for loader in loaders]
    assert {len(batches) for batches in ranks} == {len(loaders[0])}
    assert not fill or len(loaders[0]) % accumulate == 0
    assert sorted(i for batches in ranks for b in batches for i in held(b)) == list(range(n))
    for window, whole in enumerate(single):
        parts = [b for batches in ranks for b in batches[window * accumulate : (window + 1) * accumulate]]
        assert sorted(i for part in parts for i in held(part)) == sorted(held(whole))
        assert {part.window_plan_tokens for part in parts} == {whole.window_plan_tokens}
        assert sum(float(part.weights_T.sum()) for part in parts) == whole.window_plan_tokens


def test_order_depends_on_seed_and_epoch_alone() -> None:
    one, two = PackedLoader(numbered(30), 4, 1), PackedLoader(numbered(30), 4, 1)
    torch.manual_seed(0)
    first = [held(batch) for batch in one]
    torch.manual_seed(1)
    np.random.seed(1)
    assert [held(batch) for batch in two] == first
    one.set_epoch(1)
    assert [held(batch) for batch in one] != first
    assert [held(b) for b in PackedLoader(numbered(30), 4, 2)] != first
    assert held(next(iter(PackedLoader(numbered(30), 4, 1, shuffle=False)))) == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [0, 1, 4, 7, 8])
def test_a_loader_remembers_its_place(taken: int) -> None:
    loader = PackedLoader(numbered(30), 4, 9)
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = loader.state_dict()
    rest = [held(batch) for batch in batches]
    resumed = PackedLoader(numbered(30), 4, 9)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)  # as Lightning does: the same epoch keeps the place
    if taken < len(loader):
        assert [held(batch) for batch in resumed] == rest
    resumed.set_epoch(3)
    loader.set_epoch(3)
    assert [held(batch) for batch in resumed] == [held(batch) for batch in loader]


def test_another_order_is_refused() -> None:
    state = PackedLoader(numbered(30), 4, 9).state_dict()
    with pytest.raises(ValueError, match=r"batch_size 4 -> 5.*processes 1 -> 2"):
        PackedLoader(numbered(30), 5, 9, world=2).load_state_dict(state)


# -- documents ------------------------------------------------------------------------------------------------------


def test_dialogue_document() -> None:
    """bos, query, plan, query, plan; weight on plan tokens except the traces' own numbers; `[A3]` of a user is text."""
    tokens = tiny().tokens()
    document, kept = encode_dialogue(TURNS, tokens, 4096)
    assert document is not None and kept == 2
    text = tokens.decode(document.ids.tolist())
    assert text == (
        "<|endoftext|>Who sang (A3)?\n[PLAN][TRACE]1[SubQ]Who sang it?[KW]sang[DEP][/TRACE][/PLAN]"
        "And where?\n[PLAN][TRACE]2[SubQ]Where is [A1]?[KW][A1][DEP][1][/TRACE]"
        "[TRACE]3[SubQ]In [A2]?[KW][A2][DEP][2][1][/TRACE][/PLAN]"
    )
    unweighed = tokens.decode(document.ids[document.weights == 0].tolist())
    assert unweighed == "<|endoftext|>Who sang (A3)?\n1And where?\n23"
    assert document.plan_tokens == document.weights.sum() == document.weight
    weighed, _ = encode_dialogue(TURNS, tokens, 4096, loss_on_query=0.5)
    assert weighed is not None
    queries = len(tokens.encode_query("Who sang [A3]?")) + len(tokens.encode_query("And where?"))
    assert weighed.weight == document.weight + 0.5 * queries
    assert weighed.plan_tokens == document.plan_tokens
    counted, _ = encode_dialogue(TURNS, tokens, 4096, loss_on_trace_id=0.25)
    assert counted is not None
    assert counted.weight == document.weight + 0.25 * 3  # the numbers 1, 2 and 3, a token each
    assert counted.plan_tokens == document.plan_tokens + 3
    assert tokens.decode(counted.ids[counted.weights == 0.25].tolist()) == "123"


def test_cut_at_a_turn_border() -> None:
    tokens = tiny().tokens()
    whole, _ = encode_dialogue(TURNS, tokens, 4096)
    first, _ = encode_dialogue(TURNS[:1], tokens, 4096)
    assert whole is not None and first is not None
    for cut, kept in (
        encode_dialogue(TURNS, tokens, 4096, node_limit=2),  # 1 + 2 traces
        encode_dialogue(TURNS, tokens, len(whole) - 1),
    ):
        assert kept == 1 and cut is not None and cut.ids.tolist() == first.ids.tolist()
    assert encode_dialogue(TURNS, tokens, 4096, node_limit=3)[1] == 2
    assert encode_dialogue(TURNS, tokens, len(whole))[1] == 2
    assert encode_dialogue(TURNS, tokens, 10) == (None, 0)


def test_replay_is_a_fifth_of_stage_three() -> None:
    short: list = list(range(3104))
    replay = draw_replay(short, 5045, 0.2, 42)
    assert len(replay) == len(set(replay)) == 1009
    assert replay == draw_replay(short, 5045, 0.2, 42) != draw_replay(short, 5045, 0.2, 43)
    assert len(draw_replay(short[:10], 5045, 0.2, 42)) == 10


def test_spread() -> None:
    assert spread([0, 1, 2, 3, 4, 5], 3) == [0, 2, 4]
    assert spread([1, 2], 5) == spread([1, 2], None) == [1, 2]
    assert repeat([1, 2, 3, 4], 1.5) == [1, 2, 3, 4, 1, 3]
    assert repeat([1, 2], 0) == []


@pytest.mark.parametrize(("stage", "split"), [(1, "stage1"), (2, "short"), (3, "long")])
def test_stages(stage: int, split: str, caplog: pytest.LogCaptureFixture) -> None:
    data = TraceData(stage, str(tiny().world), batch_size=4)
    data.tokens = tiny().tokens()
    with caplog.at_level("INFO", logger="trace_memory.data"):
        data.setup()
    train = read_split(tiny().world, split, "train")
    replayed = round(0.2 * len(train)) if stage == 3 else 0
    assert len(data.train_documents) == len(train) + replayed
    assert len(data.dev_documents) == len(data.dev_turns) == len(read_split(tiny().world, split, "dev"))
    assert f"{split}/train" in caplog.text
    batches = list(data.train_dataloader())
    real = sum(batch.tokens for batch in batches) / sum(batch.input_ids_BL.numel() for batch in batches)
    assert real == 1.0  # the target is 0.95


def test_cut_dialogues_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    data = TraceData(2, str(tiny().world), node_limit=5)
    data.tokens = tiny().tokens()
    with caplog.at_level("INFO", logger="trace_memory.data"):
        data.setup()
    dialogues = read_split(tiny().world, "short", "train")
    over = sum(sum(len(turn.traces) for turn in d.turns) > 5 for d in dialogues)
    assert over > 0
    assert f"; {over:,} cut" in caplog.text
    assert all(sum(len(turn.plan) for turn in turns) <= 5 for turns in data.dev_turns)


def test_limits_are_spread_and_held_out_turns_are_fixed() -> None:
    data = TraceData(2, str(tiny().world), limit_train=5, limit_dev=4)
    data.tokens = tiny().tokens()
    data.setup()
    assert (len(data.train_documents), len(data.dev_documents)) == (5, 4)
    dev = read_split(tiny().world, "short", "dev")
    assert data.dev_turns == [planned_turns(d) for d in spread(dev, 4)]
    assert data.held_out_turns(2) == [data.dev_turns[0], data.dev_turns[2]]
    assert data.held_out_turns(99) == data.dev_turns


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"data\.path .*nowhere is not a directory.*datamodules\.mumu"
    ):
        TraceData(2, str(tmp_path / "nowhere"))
    data = TraceData(2, str(tmp_path))
    data.tokens = tiny().tokens()
    with pytest.raises(FileNotFoundError, match=r"short/dev\.jsonl does not exist"):
        data.setup()
    with pytest.raises(ValueError, match=r"data\.stage is 4"):
        TraceData(4)


def test_nothing_fits() -> None:
    data = TraceData(2, str(tiny().world), max_length=5)
    data.tokens = tiny().tokens()
    with pytest.raises(ValueError, match=r"no dialogue fits within 5 tokens"):
        data.setup()
