"""`python -m model.data.joined_corpus FOLDER`: make a corpus whose packed rows hold one document each.

One file to train on and one to validate on, the text of the default corpus joined. Rows without document boundaries are
what a lane is at its best on that has kernels of their own for them. Torch-free.
"""

import sys
from pathlib import Path

from model.config import DataConfig
from model.data.corpus import Split, read_documents, split_corpus
from model.errors import DataError

FILES = {"train": "rows.txt", "val": "held_out.txt"}
"""By their names the second one is held out."""
MAX_MIB = 15.0
"""Of the default corpus: both files then fit into a corpus of 16 MiB."""


def join(folder: Path) -> Split:
    """Write the two files into a new or empty folder and return how they are split; raises DataError for another."""
    if not folder.is_absolute():
        raise DataError(f"folder is '{folder}'; allowed: an absolute path, since specs name it so")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"folder {folder} is there and not empty; allowed: a new or an empty folder")
    whole = split_corpus(DataConfig(max_corpus_mib=MAX_MIB))
    folder.mkdir(parents=True, exist_ok=True)
    for name, files in ((FILES["train"], whole.train), (FILES["val"], whole.val)):
        text = "\n".join(text for text in read_documents(files) if text is not None)
        (folder / name).write_text(text, encoding="utf-8")
    return split_corpus(DataConfig(corpus=str(folder)))


def main(arguments: list[str]) -> int:
    """Join the corpus and say what was written."""
    if len(arguments) != 1:
        sys.stderr.write(f"joined_corpus: {len(arguments)} arguments; needed: one, the absolute path of a new folder\n")
        return 2
    try:
        split = join(Path(arguments[0]))
    except (DataError, OSError) as error:
        sys.stderr.write(f"joined_corpus: {error}\n")
        return 2
    for side, files in (("train", split.train), ("validate", split.val)):
        for file in files:
            sys.stdout.write(f"{side:9} {file.path}  {file.size_bytes} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
