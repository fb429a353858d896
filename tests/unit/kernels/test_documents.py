import torch

from kernels.documents import documents, once_per_batch


def test_documents_are_laid_end_to_end():
    found = documents(torch.tensor([[7, 7, 3, 7], [7, 7, 7, 7]]))
    assert found.offsets.tolist() == [0, 2, 3, 4, 8]
    assert found.longest == 4


def test_documents_of_one_batch_are_found_once():
    ids_BS = torch.tensor([[1, 1, 2]])
    first = once_per_batch(ids_BS, documents)
    assert once_per_batch(ids_BS, documents) is first
    ids_BS[0, 1] = 2
    assert once_per_batch(ids_BS, documents).offsets.tolist() == [0, 1, 3]
