"""Bundles on their way in, and what an import did."""

from pydantic import Field, StrictBool

from experiments.outcomes import AblationState
from experiments.records.bundle_archive import MAX_BUNDLE_FILES
from experiments.records.signing import PublicKey
from service.schemas.ablations import Links
from service.schemas.public import Public


class BundleFiles(Public):
    """One bundle, as `ablate exec` wrote it."""

    files: dict[str, str] = Field(
        max_length=MAX_BUNDLE_FILES,
        description="Text of every file by its path below the bundle.",
        examples=[{"manifest.json": "{...}"}],
    )


class ImportRequest(Public):
    """Bundles of one plan; together they are the ablation."""

    bundles: list[BundleFiles] = Field(min_length=1, max_length=100)
    trust: list[PublicKey] = Field(default=[], max_length=100, description="Keys to trust from now on.")
    unsigned: StrictBool = Field(default=False, description="Take files that nobody signed; the verdict will say so.")


class ImportPublic(Public):
    """What an import did."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    changed: bool
    """False when exactly these bundles had been imported before."""
    blocks_imported: int
    block_indices_missing: list[int] = Field(
        description="Indices, from 0, of planned blocks that no bundle holds: missing data."
    )
    remarks: list[str]
    """What does not stop the import but has to be known."""
    links: Links
