"""Encoders for tests: one of hashed words that needs no torch, and directories of tiny random BERT models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from inference.corpus import Paragraph
from inference.encoders import METRIC, EncoderIdentity, paragraph_text

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ascii_lowercase, *(f"##{c}" for c in ascii_lowercase),
         "king", "norway", "river", "the", "of", "was", "title", "##s"]  # fmt: skip


class WordEncoder:
    """Each word is a fixed random direction, a text their normalised sum. `calls` counts the texts of each call.

    before: called with the number of paragraph calls so far; what it raises breaks the build there.
    """

    def __init__(self, dim: int = 16, seed: int = 0, before: Callable[[int], None] | None = None):
        sha = hashlib.sha256(f"{dim} {seed}".encode()).hexdigest()
        self.identity = EncoderIdentity(f"words-{seed}", sha, dim, METRIC, True, "mean", 512)
        self.source = ["words"]
        self.seed, self.before, self.calls = seed, before, []

    def encode_queries(self, queries: Sequence[str], advance=None) -> np.ndarray:
        return self._encode(queries)

    def encode_paragraphs(self, paragraphs: Sequence[Paragraph], advance=None) -> np.ndarray:
        if self.before is not None:
            self.before(len(self.calls))
        self.calls.append(len(paragraphs))
        return self._encode([paragraph_text(p) for p in paragraphs])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = [self._vector(text) for text in texts]
        return np.stack(vectors) if vectors else np.empty((0, self.identity.dim), np.float32)

    def _vector(self, text: str) -> np.ndarray:
        total = np.zeros(self.identity.dim)
        for word in re.findall(r"\w+", text.lower()):
            digest = hashlib.sha256(f"{self.seed} {word}".encode()).digest()
            total += np.random.default_rng(int.from_bytes(digest[:8])).normal(size=self.identity.dim)
        return (total / max(np.linalg.norm(total), 1e-9)).astype(np.float32)


def tiny_bert(path: Path, seed: int = 0, dim: int = 32, labels: int | None = None) -> Path:
    """A random BERT (2 layers, 64 positions) with a WordPiece tokenizer; with `labels`, a sequence classifier."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    path.mkdir(parents=True)
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(vocab=str(path / "vocab.txt"), model_max_length=64).save_pretrained(path)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=dim, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3, **({"num_labels": labels} if labels else {}),
    )  # fmt: skip
    model = BertForSequenceClassification(config) if labels else BertModel(config)
    model.save_pretrained(path)
    return path


def sentence_transformer(path: Path, pooling: str = "mean", normalise: bool = True, **settings) -> Path:
    """The same as a sentence-transformers directory. settings: of config_sentence_transformers.json."""
    tiny_bert(path)
    kinds = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *([("Normalize", "2_Normalize")] if normalise else []),
    ]
    modules = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    record = {f"pooling_mode_{name}": key == pooling for key, name in names.items()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **record}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return path
