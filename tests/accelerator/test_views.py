"""Views share memory, in-place ops write it, and what cannot be known before runs at once."""

import io

import pytest
import torch

from accelerator.schedules import LATE


@pytest.fixture(autouse=True)
def late(device):
    with device.schedule(LATE, LATE):
        yield


def changed(x):
    """In place, through views."""
    x[0].mul_(2)
    x.transpose(0, 1)[1].add_(1)
    x[:, 1, ::2] = 7
    x.view(-1)[3:5].zero_()
    return x


OPS = {
    "in place": changed,
    "strided": lambda x: torch.as_strided(x, (3,), (2,), 1),
    "windows": lambda x: x.unfold(2, 2, 1),
    "another type": lambda x: x.view(torch.int32),
    "chosen by mask": lambda x: x[x > 5],
    "chosen by index": lambda x: x[:, torch.tensor([0, 2])],
    "nonzero": lambda x: torch.nonzero(x > 3),
    "unique": lambda x: torch.unique(x % 3),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "list of results": lambda x: torch.cat(torch.split(x, 1)),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "resized": lambda x: x.clone().resize_(2, 2),
    "conjugate": lambda x: torch.view_as_real((torch.complex(x, x).conj() * 1j).resolve_conj()),
    "strided result": lambda x: torch.empty_like(x.transpose(0, 2)).copy_(x.transpose(0, 2)),
    "fallen apart": lambda x: torch.stack(torch.unbind(x, 1)),
    "sorted": lambda x: torch.sort(x, descending=True)[0],
    "inference": torch.inference_mode()(lambda x: x.clone().view(-1).add_(1)),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_result_is_that_of_the_cpu(op):
    x = torch.arange(24.0).reshape(2, 3, 4)
    there = x.to("standin")

    result = op(there)

    expected = op(x)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    assert result.cpu().equal(expected)
    assert there.cpu().equal(x)


def test_a_tensor_can_be_saved():
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="standin:1"), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == torch.device("standin", 1) and loaded.sum() == 3
