"""Archives of code on a node: fetched once, whole or not at all, never beyond the limits."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ablate.experiments.outcomes import FailureClass
from ablate.workers.blocks import code_cache
from ablate.workers.blocks.code_cache import CodeCache
from ablate.workers.commands.code_copy import archive_path
from ablate.workers.errors import ApiRefused, ApiUnreachable, BlockBroken, BlockStopped, StaleLease
from ablate.workers.lease import Lease, StopReason, boot_time_s


class Source:
    """Yields contents by digest; an exception in `trouble` is raised first, one a call."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = {f"sha256:{hashlib.sha256(content).hexdigest()}": content for content in contents}
        self.trouble: list[Exception] = []
        self.calls = 0

    def __call__(self, _attempt_id: str, digest: str) -> Iterator[bytes]:
        self.calls += 1
        content = self.contents[digest]
        yield content[:2]
        if self.trouble:
            raise self.trouble.pop(0)
        yield content[2:]


def lease() -> Lease:
    return Lease(60.0, sent_at=boot_time_s())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_PAUSES_S", (0.0, 0.0))


def test_an_archive_is_fetched_once_and_again_when_it_was_changed(tmp_path: Path) -> None:
    source = Source(b"content")
    (digest,) = source.contents
    cache, path = CodeCache(tmp_path, source), archive_path(tmp_path, digest)
    for changed in (False, False, True):
        if changed:
            path.write_bytes(b"other")
        cache.need("att_1", digest, lease())
        assert path.read_bytes() == b"content"
    assert source.calls == 2
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_trouble_of_the_connection_is_tried_again_and_then_told(tmp_path: Path) -> None:
    source = Source(b"content")
    (digest,) = source.contents
    source.trouble = [ApiUnreachable("cut"), ApiUnreachable("cut")]
    CodeCache(tmp_path, source).need("att_1", digest, lease())
    assert source.calls == 3
    archive_path(tmp_path, digest).unlink()
    source.trouble = [ApiUnreachable("cut")] * 3
    with pytest.raises(BlockBroken, match="cannot be fetched: cut") as caught:
        CodeCache(tmp_path, source).need("att_1", digest, lease())
    assert (caught.value.failure_class, caught.value.arm) == (FailureClass.INFRA_CONTROL, None)
    assert list(archive_path(tmp_path, digest).parent.iterdir()) == []


def test_other_bytes_than_the_digest_names_are_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(b"content")
    (digest,) = source.contents
    source.contents[digest] = b"forged!"
    with pytest.raises(BlockBroken, match="7 bytes arrived, which are not those that the digest names"):
        CodeCache(tmp_path, source).need("att_1", digest, lease())
    monkeypatch.setattr(code_cache, "MOST_BYTES", 3)
    source.contents[digest] = b"content"
    with pytest.raises(BlockBroken, match="bytes arrived"):
        CodeCache(tmp_path, source).need("att_1", digest, lease())
    assert list(archive_path(tmp_path, digest).parent.iterdir()) == []


def test_a_refusal_is_final_and_a_lost_or_cancelled_block_stops(tmp_path: Path) -> None:
    source = Source(b"content")
    (digest,) = source.contents
    source.trouble = [ApiRefused(404, "no such code")]
    with pytest.raises(BlockBroken, match="no such code"):
        CodeCache(tmp_path, source).need("att_1", digest, lease())
    assert source.calls == 1
    source.trouble = [StaleLease("lost")]
    with pytest.raises(BlockStopped) as stopped:
        CodeCache(tmp_path, source).need("att_1", digest, lease())
    assert stopped.value.reason is StopReason.FENCED
    cancelled = lease()
    cancelled.cancel()
    with pytest.raises(BlockStopped) as stopped:
        CodeCache(tmp_path, source).need("att_1", digest, cancelled)
    assert stopped.value.reason is StopReason.CANCELLED


def test_the_oldest_archives_go_by_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [bytes([number]) * 10 for number in range(6)]
    source = Source(*contents)
    monkeypatch.setattr(code_cache, "KEPT", 4)
    cache, digests = CodeCache(tmp_path, source), list(source.contents)

    def present() -> list[bool]:
        return [archive_path(tmp_path, digest).exists() for digest in digests]

    for number, digest in enumerate(digests):
        cache.need("att_1", digest, lease())
        os.utime(archive_path(tmp_path, digest), (number, number))
    assert present() == [False, False, True, True, True, True]
    cache.need("att_1", digests[2], lease())
    monkeypatch.setattr(code_cache, "KEEP_BYTES", 20)
    cache.need("att_1", digests[0], lease())
    assert present() == [True, False, True, False, False, False]
