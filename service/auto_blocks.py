"""`blocks: auto` in a spec that somebody hands in: the number that the measured noise asks for."""

from collections.abc import Sequence

from experiments.analysis.auto_blocks import with_number
from experiments.design.load import parse_spec
from experiments.records.calibration import Calibration
from service.schemas import SpecBody
from service.store.calibrations import read_calibrations
from service.store.session import Store


def sized(body: SpecBody, known: Sequence[Calibration]) -> SpecBody:
    """Return the spec with its number of blocks, where it leaves that to the noise. Raises SpecError."""
    if not parse_spec(body.content, body.content_type).design.blocks.auto:
        return body
    content, content_type = with_number(body.content, body.content_type, known)
    return SpecBody(content=content, content_type=content_type)


def sized_by(store: Store, body: SpecBody) -> SpecBody:
    """Return the spec with its number of blocks, by the noise that the service knows. Raises SpecError."""
    with store.read() as connection:
        known = read_calibrations(connection)
    return sized(body, known)
