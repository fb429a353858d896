"""`python -m ablate.model.data.joined_corpus FOLDER`: make a corpus whose packed rows hold one document each.

It writes one file for training and one for validation, with the joined text of the default corpus. Rows without
document boundaries are the best case of a lane with special kernels for them. Torch-free.
"""

import sys
from pathlib import Path

from ablate.model.config import DataConfig
from ablate.model.data.corpus import Split, read_documents, split_corpus
from ablate.model.errors import DataError

FILES = {"train": "rows.txt", "val": "held_out.txt"}
"""By its name the second file falls on the validation side."""
MAX_MIB = 15.0
"""Size of the default corpus to read, so that both files fit into a corpus of 16 MiB."""


def join(folder: Path) -> Split:
    """Write both files into a new or empty folder and return their split. Raises DataError for another folder."""
    if not folder.is_absolute():
        raise DataError(f"folder is '{folder}'; allowed: an absolute path, because specs need one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"folder {folder} exists and is not empty; allowed: a new or an empty folder")
    whole = split_corpus(DataConfig(max_corpus_mib=MAX_MIB))
    folder.mkdir(parents=True, exist_ok=True)
    for name, files in ((FILES["train"], whole.train), (FILES["val"], whole.val)):
        text = "\n".join(read_documents(files))
        (folder / name).write_text(text, encoding="utf-8")
    return split_corpus(DataConfig(corpus=str(folder)))


def main(arguments: list[str]) -> int:
    """Join the corpus and print the files."""
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
