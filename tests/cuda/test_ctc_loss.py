"""A CTC loss whose lengths lie on the host trains on a device as without lowtide."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.step import ctc_lengths

CLASSES, ROWS, STEPS = 32, 8, 64


def trained(device, fits, lengths_on, int32=False):
    """Losses and weights; a plan is in force from the second step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, CLASSES)).to(device)
    batch = torch.randn(STEPS, ROWS, 64, device=device)
    targets = torch.randint(1, CLASSES, (10 * ROWS,), dtype=torch.int32, device="cpu" if int32 else device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = lowtide.fit(model, budget="1GiB", optimizer=optimizer) if fits else None
    losses = []
    for _ in range(4):
        lengths = torch.full((ROWS,), 10) if int32 else torch.randint(5, 10, (ROWS,))
        inputs = torch.full((ROWS,), STEPS)
        scores = model(batch).log_softmax(-1)
        given = targets if int32 else targets.view(ROWS, 10)
        loss = nn.functional.ctc_loss(scores, given, *(t.to(lengths_on) for t in (inputs, lengths)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if fit is not None:
            fit.wait()
    if fit is not None:
        assert fit.status().planned_steps == 3
        fit.remove()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("int32", [False, True], ids=["targets on the device", "targets on the host"])
@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
def test_a_loss_with_lengths_anywhere_has_the_bits_of_the_plain_one(cuda, lengths_on, int32, repeated):
    plain = repeated(lambda: trained(cuda, False, lengths_on, int32))
    assert all(map(torch.equal, plain, trained(cuda, True, lengths_on, int32)))
    assert torch.ctc_loss is ctc_lengths._own


@pytest.mark.parametrize(
    "takes, given", [("numbers", list), ("tensors", torch.Tensor), ("nothing", torch.Tensor), ("", torch.Tensor)]
)
def test_lengths_on_the_device_go_to_the_kernel_that_takes_them_without_a_mode(cuda, monkeypatch, takes, given):
    """cuDNN takes numbers where targets lie on the host, and its bits are not those of PyTorch's own kernel.

    No name: a device that has no such kernel, and does not know the question.
    """

    def uses_cudnn(scores, targets, inputs, lengths, blank):
        if not takes:
            raise NotImplementedError
        return takes == ("tensors" if isinstance(inputs, torch.Tensor) else "numbers")

    found = []
    monkeypatch.setattr(torch, "_use_cudnn_ctc_loss", uses_cudnn)
    monkeypatch.setattr(ctc_lengths, "_own", lambda *args: found.append(args))
    scores, targets = torch.zeros(8, 2, 4, device=cuda), torch.ones(6, dtype=torch.int32)
    lengths = torch.tensor([8, 8], device=cuda), torch.tensor([3, 3], device=cuda)
    with LooksOn():
        ctc_lengths._ctc_loss(scores, targets, *lengths)

    assert [type(length) for length in found[0][2:4]] == [given] * 2


class LooksOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_without_it_lengths_on_the_host_are_refused_by_pytorch(cuda):
    scores, targets = torch.zeros(8, 2, 4, device=cuda), torch.ones(2, 3, dtype=torch.int64, device=cuda)
    inputs, lengths = torch.tensor([8, 8]), torch.tensor([3, 3])
    with LooksOn(), pytest.raises(RuntimeError, match="same device"):
        nn.functional.ctc_loss(scores, targets, inputs, lengths)

    ctc_lengths.put_in_place()
    try:
        with LooksOn():
            assert nn.functional.ctc_loss(scores, targets, inputs, lengths).device == scores.device
    finally:
        ctc_lengths.take_away()


def test_what_cudnn_would_take_it_gets_with_numbers(cuda, monkeypatch):
    """The stand-in has no cuDNN, which takes targets of the host, and other lengths than tensors."""
    seen = []
    monkeypatch.setattr(torch, "_use_cudnn_ctc_loss", lambda *args: True)
    monkeypatch.setattr(ctc_lengths, "_own", lambda *args, **kwargs: seen.append(args))
    monkeypatch.setattr(ctc_lengths, "num_modes", lambda: 1)
    lengths = torch.tensor([4, 5])
    ctc_lengths._ctc_loss(torch.zeros(8, 2, 4, device=cuda), torch.ones(9, dtype=torch.int32), lengths, lengths, 0)

    assert seen[0][2:] == ([4, 5], [4, 5], 0)
