"""Which folders of a node a spec may read as its corpus: those that the node's operator listed, and no others."""

from collections.abc import Sequence
from pathlib import Path

from model.data.corpus import TORCH_HEADERS
from model.errors import DataError


def check_corpus(corpus: str, roots: Sequence[Path] | None) -> None:
    """Raise DataError unless `corpus`, links and `..` followed, lies in one of `roots`; None allows any folder.

    Files below it need no look of their own: a corpus leaves links out (model/data/corpus.py).
    """
    if roots is None or corpus == TORCH_HEADERS:
        return
    folder = Path(corpus).resolve()
    if any(folder.is_relative_to(root.resolve()) for root in roots):
        return
    listed = "".join(f", or a folder below {root}" for root in roots)
    raise DataError(
        f"corpus {corpus!r} is outside of what this node's operator allows to be read; allowed: '{TORCH_HEADERS}'"
        f"{listed} (ABLATE_CORPUS_DIRS)"
    )
