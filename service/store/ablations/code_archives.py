"""Archives of code that people sent: stored in pieces, used by ablations, dropped after ABLATE_CODE_DAYS.

The service stores the bytes and checks their digest. It never unpacks them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, text, update

from experiments.errors import SpecError, SpecProblem
from experiments.outcomes import AttemptState
from service.errors import CodeStorageFull, NotFound, StaleToken
from service.store.session import Store
from service.store.tables import ablations, attempts, blocks, code_archives, code_pieces, code_uses, db_now

_UPLOAD_LOCK = 0x41424C43


def lacking(connection: Connection, digests: Iterable[str]) -> list[str]:
    """Return which archives are not stored. The stored ones count as used now, so that they stay for a submission."""
    return [digest for digest in sorted(set(digests)) if not _touch(connection, digest)]


def _touch(connection: Connection, digest: str) -> bool:
    """Count an archive as used now; return whether it is stored. Its row stays locked, so that nothing drops it.

    A caller with several archives takes them in sorted order.
    """
    mine = update(code_archives).where(code_archives.c.digest == digest)
    return connection.execute(mine.values(used_at=db_now())).rowcount == 1


def store_archive(
    connection: Connection, digest: str, pieces: Sequence[bytes], *, sent_by: str, most_bytes: int
) -> bool:
    """Store an archive whose digest was checked; return False if it is stored already.

    Raises CodeStorageFull if all archives together would have more than `most_bytes`.
    """
    if connection.dialect.name == "postgresql":  # one upload at a time, or two would share the last free bytes
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_UPLOAD_LOCK})"))
    if _touch(connection, digest):
        return False
    size, (_, stored) = sum(map(len, pieces)), totals(connection)
    if stored + size > most_bytes:
        raise CodeStorageFull(
            f"the archive has {size:,} bytes and the stored ones {stored:,}; allowed: {most_bytes:,} "
            "(ABLATE_MAX_CODE_BYTES)"
        )
    row = {"digest": digest, "size": size, "sent_by": sent_by, "created_at": db_now(), "used_at": db_now()}
    connection.execute(insert(code_archives).values(**row))
    for number, piece in enumerate(pieces):
        connection.execute(insert(code_pieces).values(digest=digest, number=number, data=piece))
    return True


def totals(connection: Connection) -> tuple[int, int]:
    """Return the number of stored archives and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(code_archives.c.size), 0))
    count, size = connection.execute(query).one()
    return int(count), int(size)


def use_archives(connection: Connection, ablation_id: str, places: Mapping[str, str]) -> None:
    """Note that an ablation uses archives, by the pointer of each in its spec. Raises SpecError for missing ones."""
    missing = set(lacking(connection, places.values()))
    if missing:
        hint = "submit the file with its folder again, for example `code: .`"
        raise SpecError(
            [
                SpecProblem(pointer=where, detail=f"the service has no archive {digest}", hint=hint)
                for where, digest in places.items()
                if digest in missing
            ]
        )
    rows = [{"ablation_id": ablation_id, "digest": digest} for digest in sorted(set(places.values()))]
    if rows:
        connection.execute(insert(code_uses), rows)


def size_for_attempt(connection: Connection, attempt_id: str, digest: str) -> int:
    """Return the bytes of an archive that the ablation of a running attempt uses. Raises NotFound, StaleToken."""
    state = connection.execute(select(attempts.c.state).where(attempts.c.id == attempt_id)).scalar()
    if state != AttemptState.RUNNING:
        raise StaleToken
    own = select(code_archives.c.size).join(code_uses, code_uses.c.digest == code_archives.c.digest)
    own = own.join(blocks, blocks.c.ablation_id == code_uses.c.ablation_id)
    own = own.join(attempts, attempts.c.block_id == blocks.c.id)
    size = connection.execute(own.where(attempts.c.id == attempt_id, code_archives.c.digest == digest)).scalar()
    if size is None:
        raise NotFound(f"the ablation of attempt {attempt_id!r} uses no stored code {digest!r}")
    return int(size)


def read_pieces(store: Store, digest: str) -> Iterator[bytes]:
    """Yield the pieces of an archive, each read by itself, so that a slow reader holds no connection."""
    number = 0
    while True:
        with store.read() as connection:
            query = select(code_pieces.c.data).where(code_pieces.c.digest == digest, code_pieces.c.number == number)
            piece = connection.execute(query).scalar()
        if piece is None:
            return
        yield bytes(piece)
        number += 1


def drop_oldest(connection: Connection, *, age_s: float) -> str | None:
    """Drop the archive that is due for the longest time; return its digest, None if none is due.

    It is due when nobody used it for `age_s`, and no ablation that is unfinished or ended since.
    The lock waits for a submission that uses the archive; then its row says "used now", and the archive stays.
    """
    due = select(code_archives.c.digest).where(_is_due(age_s)).order_by(code_archives.c.used_at).limit(1)
    digest: str | None = connection.execute(due.with_for_update()).scalar()
    if digest is not None:
        connection.execute(delete(code_pieces).where(code_pieces.c.digest == digest))
        connection.execute(delete(code_archives).where(code_archives.c.digest == digest))
    return digest


def _is_due(age_s: float) -> ColumnElement[bool]:
    since = db_now() - age_s
    recent = or_(ablations.c.finished_at.is_(None), ablations.c.finished_at > since)
    used = select(code_uses.c.digest).join(ablations, ablations.c.id == code_uses.c.ablation_id)
    used = used.where(code_uses.c.digest == code_archives.c.digest, recent).correlate(code_archives)
    return and_(code_archives.c.used_at < since, ~used.exists())
