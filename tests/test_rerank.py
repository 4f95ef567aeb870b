"""The cross-encoder reranker: the scores of a direct forward, best first, at most ten."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from inference.corpus import Paragraph
from inference.rerank import Reranker
from tests.tiny_encoders import tiny_bert

PARAGRAPHS = [
    Paragraph("Title", "the king of " + "norway " * n + letter) for n, letter in enumerate("abcdefghijklmn")
]


def test_the_best_ten_by_a_direct_forward(tmp_path):
    path = tiny_bert(tmp_path / "ce", labels=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    scores = []
    for paragraph in PARAGRAPHS:
        inputs = tokenizer(
            "the king", f"Title\n{paragraph.text}", truncation=True, max_length=64, return_tensors="pt"
        )
        with torch.no_grad():
            scores.append(
                torch.sigmoid(model(**inputs).logits[0, 0]).item()
            )  # that library's default for one output
    hits = Reranker(path, device="cpu", batch_size=4).rerank("the king", PARAGRAPHS)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:10]
    assert [hit.paragraph_id for hit in hits] == [PARAGRAPHS[i].id for i in order]
    assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in order], abs=1e-5)

    reranker = Reranker(path, keep=2, device="cpu")
    assert (
        reranker.rerank("the king \ud800" + " x" * 500_000, [PARAGRAPHS[0]])[0].paragraph_id
        == PARAGRAPHS[0].id
    )
    assert reranker.rerank("x", []) == [] and len(reranker.rerank("x", PARAGRAPHS)) == 2
    same = [Paragraph("Title", "a"), Paragraph("Title", "a", "again"), Paragraph("Title", "a", "and again")]
    assert [hit.paragraph_id for hit in reranker.rerank("x", same)] == [same[0].id, same[1].id]


def test_what_is_no_reranker_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such cross-encoder directory"):
        Reranker(tmp_path / "none")
    with pytest.raises(ValueError, match="has 3 outputs; a reranker has one"):
        Reranker(tiny_bert(tmp_path / "three", labels=3), device="cpu")
    with pytest.raises(ValueError, match="keep is 0"):
        Reranker(tmp_path, keep=0)
