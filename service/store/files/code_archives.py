"""Archives of code that people sent: stored in pieces, used by ablations, dropped after ABLATE_CODE_DAYS.

The service stores the bytes and checks their digest. It never unpacks them; a page reads small ones in memory. The
bytes are stored once, but they belong to each token that sent them: only these tokens, those with which one of them
shared the code, and operators may use them. To anybody else an archive does not exist.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, text, update

from ablate.experiments.design.program_files import without_archives
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import AttemptState
from ablate.service.errors import CodeStorageFull, NotFound, NotOwner, StaleToken
from ablate.service.principals import Principal, Scope
from ablate.service.store.session import Store
from ablate.service.store.tables import (
    ablations,
    attempts,
    blocks,
    code_archives,
    code_owners,
    code_pieces,
    code_uses,
    db_now,
)

_UPLOAD_LOCK = 0x41424C43
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def user_of(principal: Principal) -> str | None:
    """Return the token whose archives a principal may use; None for an operator, who may use all."""
    return None if principal.scope.includes(Scope.OPERATE) else principal.token_id


def lacking(connection: Connection, digests: Iterable[str], *, user: str | None) -> list[str]:
    """Return which archives `user` cannot use. The others count as used now, so that they stay for a submission."""
    wanted = sorted(set(digests))
    usable = usable_by(connection, wanted, user=user)
    return [digest for digest in wanted if digest not in usable or not _touch(connection, digest)]


def usable_by(connection: Connection, digests: Collection[str], *, user: str | None) -> set[str]:
    """Return which archives `user` may use."""
    if user is None:
        return set(digests)
    own = select(code_owners.c.digest).where(code_owners.c.token_id == user, code_owners.c.digest.in_(digests))
    return set(connection.execute(own).scalars())


def _touch(connection: Connection, digest: str) -> bool:
    """Count an archive as used now; return whether it is stored. Its row stays locked, so that nothing drops it.

    A caller with several archives takes them in sorted order.
    """
    mine = update(code_archives).where(code_archives.c.digest == digest)
    return connection.execute(mine.values(used_at=db_now())).rowcount == 1


def store_archive(
    connection: Connection, digest: str, pieces: Sequence[bytes], *, sender: Principal, most_bytes: int
) -> bool:
    """Store an archive whose digest was checked; return False if this sender had sent it already.

    The answer is the same whether or not somebody else had sent it. Raises CodeStorageFull if all archives together
    would have more than `most_bytes`.
    """
    if connection.dialect.name == "postgresql":  # one upload at a time, or two would share the last free bytes
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_UPLOAD_LOCK})"))
    mine = (code_owners.c.digest == digest, code_owners.c.token_id == sender.token_id)
    owner = connection.execute(select(code_owners.c.shared_by).where(*mine)).first()
    if owner is not None and owner.shared_by is None and _touch(connection, digest):
        return False
    _check_room(connection, sum(map(len, pieces)), most_bytes)
    if not _touch(connection, digest):
        _insert(connection, digest, pieces, sent_by=sender.name)
    connection.execute(delete(code_owners).where(*mine))
    connection.execute(insert(code_owners).values(digest=digest, token_id=sender.token_id))
    return True


def _check_room(connection: Connection, size: int, most_bytes: int) -> None:
    _, stored = totals(connection)
    if stored + size > most_bytes:
        raise CodeStorageFull(
            f"the archive has {size:,} bytes and the stored ones {stored:,}; allowed: {most_bytes:,} "
            "(ABLATE_MAX_CODE_BYTES)"
        )


def _insert(connection: Connection, digest: str, pieces: Sequence[bytes], *, sent_by: str) -> None:
    size = sum(map(len, pieces))
    row = {"digest": digest, "size": size, "sent_by": sent_by, "created_at": db_now(), "used_at": db_now()}
    connection.execute(insert(code_archives).values(**row))
    for number, piece in enumerate(pieces):
        connection.execute(insert(code_pieces).values(digest=digest, number=number, data=piece))


def share(connection: Connection, ablation_id: str, principal: Principal, token_id: str) -> list[str]:
    """Let another token use the code of an ablation; return the digests that it could not use before.

    Raises NotFound if the ablation has no stored code, and NotOwner for code that the principal did not send.
    """
    used = select(code_uses.c.digest).join(code_archives, code_archives.c.digest == code_uses.c.digest)
    digests = sorted(connection.execute(used.where(code_uses.c.ablation_id == ablation_id)).scalars())
    if not digests:
        raise NotFound(f"ablation {ablation_id} has no sent code that is still stored")
    sent = select(code_owners.c.digest).where(code_owners.c.token_id == principal.token_id)
    sent = sent.where(code_owners.c.digest.in_(digests), code_owners.c.shared_by.is_(None))
    if user_of(principal) is not None and set(connection.execute(sent).scalars()) != set(digests):
        raise NotOwner(f"somebody else sent code of ablation {ablation_id} and shared it with '{principal.name}'")
    new = sorted(set(digests) - usable_by(connection, digests, user=token_id))
    if new:
        rows = [{"digest": digest, "token_id": token_id, "shared_by": principal.name} for digest in new]
        connection.execute(insert(code_owners), rows)
    return new


def shown_spec(connection: Connection, text: str, principal: Principal) -> str:
    """Return a spec's text without the digests of archives that the principal may not use."""
    digests = set(_DIGEST.findall(text))
    stored = select(code_uses.c.digest).where(code_uses.c.digest.in_(digests))
    named = digests.intersection(connection.execute(stored).scalars())
    return without_archives(text, named - usable_by(connection, named, user=user_of(principal)))


def totals(connection: Connection) -> tuple[int, int]:
    """Return the number of stored archives and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(code_archives.c.size), 0))
    count, size = connection.execute(query).one()
    return int(count), int(size)


def use_archives(connection: Connection, ablation_id: str, places: Mapping[str, str], *, user: str | None) -> None:
    """Note that an ablation uses archives, by the pointer of each in its spec.

    Raises SpecError for archives that are missing or that `user` may not use, without saying which of both.
    """
    missing = set(lacking(connection, places.values(), user=user))
    if missing:
        hint = "submit the file with its folder again, for example `code: .`, or ask its sender to share it"
        raise SpecError(
            [
                SpecProblem(pointer=where, detail=f"the service has no archive {digest} of yours", hint=hint)
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


def size_for_user(connection: Connection, digest: str, *, user: str | None) -> int:
    """Return the bytes of an archive that `user` may use. Raises NotFound, without saying whether there is one."""
    usable = usable_by(connection, [digest], user=user)
    size = connection.scalar(select(code_archives.c.size).where(code_archives.c.digest.in_(usable)))
    if size is None:
        raise NotFound(f"the service has no archive {digest} of yours; it keeps unused ones for ABLATE_CODE_DAYS")
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


def read_small(connection: Connection, digest: str, *, most_bytes: int) -> bytes | None:
    """Return an archive; None for one that is dropped or larger than `most_bytes`."""
    size = connection.execute(select(code_archives.c.size).where(code_archives.c.digest == digest)).scalar()
    if size is None or size > most_bytes:
        return None
    pieces = select(code_pieces.c.data).where(code_pieces.c.digest == digest).order_by(code_pieces.c.number)
    return b"".join(map(bytes, connection.execute(pieces).scalars()))


def drop_oldest(connection: Connection, *, age_s: float) -> str | None:
    """Drop the archive that is due for the longest time; return its digest, None if none is due.

    It is due when nobody used it for `age_s`, and no ablation that is unfinished or ended since.
    The lock waits for a submission that uses the archive; then its row says "used now", and the archive stays.
    """
    due = select(code_archives.c.digest).where(_is_due(age_s)).order_by(code_archives.c.used_at).limit(1)
    digest: str | None = connection.execute(due.with_for_update()).scalar()
    if digest is not None:
        for part in (code_pieces, code_owners):
            connection.execute(delete(part).where(part.c.digest == digest))
        connection.execute(delete(code_archives).where(code_archives.c.digest == digest))
    return digest


def _is_due(age_s: float) -> ColumnElement[bool]:
    since = db_now() - age_s
    recent = or_(ablations.c.finished_at.is_(None), ablations.c.finished_at > since)
    used = select(code_uses.c.digest).join(ablations, ablations.c.id == code_uses.c.ablation_id)
    used = used.where(code_uses.c.digest == code_archives.c.digest, recent).correlate(code_archives)
    return and_(code_archives.c.used_at < since, ~used.exists())
