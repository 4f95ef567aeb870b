"""An optional second look at the passages of a turn: a cross-encoder, by name, keeps the best ten (paper Table 4).

In:  a query and the paragraphs that were retrieved or recovered. Out: at most `keep` of them, rescored, best first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from inference.corpus import Paragraph
from inference.encoders import clean, paragraph_text
from inference.retrieval import Hit

KEEP = 10


class Reranker:
    """A sentence-transformers CrossEncoder directory. Safe to share between threads (calls take turns).

    Raises FileNotFoundError where there is no such directory, ValueError where it holds no cross-encoder.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = KEEP,
        device: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ):
        if not Path(directory).is_dir():
            raise FileNotFoundError(
                f"{directory}: no such cross-encoder directory; models are local directories, download it first"
            )
        if keep < 1:
            raise ValueError(f"keep is {keep}: keep at least one passage")
        from sentence_transformers import CrossEncoder

        try:
            self._model = CrossEncoder(
                str(directory), device=device, max_length=max_length, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: cannot be loaded as a cross-encoder: {error}") from error
        if self._model.config.num_labels != 1:
            raise ValueError(
                f"{directory}: has {self._model.config.num_labels} outputs; a reranker has one, the relevance"
            )
        self.name, self.keep, self.batch_size = Path(directory).name, keep, batch_size
        # A longer text is never seen; cut here, it costs the tokenizer no time.
        self._characters = 64 * (max_length or self._model.max_seq_length or 512)
        self._lock = threading.Lock()

    def rerank(self, query: str, paragraphs: Sequence[Paragraph]) -> list[Hit]:
        """The `keep` best paragraphs with the model's scores, best first; of equal ones the earlier comes first."""
        if not paragraphs:
            return []
        texts = [clean(paragraph_text(p)[: self._characters]) for p in paragraphs]
        pairs = [(clean(query[: self._characters]), text) for text in texts]
        with self._lock:
            scores = self._model.predict(pairs, batch_size=self.batch_size, show_progress_bar=False)
        order = sorted(range(len(paragraphs)), key=lambda i: (-float(scores[i]), i))[: self.keep]
        return [Hit(paragraphs[i].id, float(scores[i])) for i in order]
