import pytest
import torch

from ablate.kernels.documents import documents, once_per_batch, replace_documents, with_documents

HOST = torch.device("cpu")


def test_documents_are_laid_end_to_end():
    packed = documents(torch.tensor([[7, 7, 3, 7], [7, 7, 7, 7]]))
    assert packed.offsets.tolist() == [0, 2, 3, 4, 8]
    assert packed.longest == 4


def test_documents_of_one_batch_are_found_once():
    ids_BS = torch.tensor([[1, 1, 2]])
    first = once_per_batch(ids_BS, documents)
    assert once_per_batch(ids_BS, documents) is first
    ids_BS[0, 1] = 2
    assert once_per_batch(ids_BS, documents).offsets.tolist() == [0, 1, 3]


def drawn(generator, rows, length):
    """Ids of a batch, from one document a row to one a token."""
    share = 10.0 ** -float(3 * torch.rand((), generator=generator))
    return (torch.rand(rows, length, generator=generator) < share).cumsum(1)


def test_a_batch_gets_its_documents_from_the_host_and_later_those_of_other_batches():
    generator = torch.Generator().manual_seed(20261126)
    for _ in range(60):
        rows, length = (int(torch.randint(1, high, (), generator=generator)) for high in (5, 60))
        batches = [drawn(generator, rows, length) for _ in range(4)]
        counts = [len(documents(ids).offsets) - 1 for ids in batches]
        exact = with_documents(batches[0], HOST)
        assert [value.tolist() for value in once_per_batch(exact, documents)[:1]] == [
            documents(batches[0]).offsets.tolist()
        ]
        fixed = with_documents(batches[0], HOST, room=max(counts))
        place = once_per_batch(fixed, documents).offsets.data_ptr()
        for ids, count in zip(batches, counts, strict=True):
            replace_documents(fixed, ids)
            offsets, longest = once_per_batch(fixed, documents)
            assert offsets.data_ptr() == place
            assert torch.equal(fixed, ids)
            assert offsets[: count + 1].tolist() == documents(ids).offsets.tolist()
            assert offsets[count:].unique().tolist() == [rows * length]
            assert longest == length
        if length == 1:
            continue
        with pytest.raises(ValueError, match=rf"a batch has {rows * length} documents; there is room for"):
            replace_documents(
                with_documents(batches[0] * 0, HOST, room=rows), torch.arange(rows * length).view(rows, -1)
            )
