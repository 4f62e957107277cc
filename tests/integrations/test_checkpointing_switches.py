"""Checkpointing of diffusers, timm and MONAI, as their users switch it on: off while the model is fitted."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.existing_checkpointing import ExistingCheckpointing

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]
Loss = Callable[[nn.Module], torch.Tensor]


def diffusers_unet(*, checkpointed: bool) -> tuple[nn.Module, Loss]:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    ).train()  # fmt: skip
    if checkpointed:
        model.enable_gradient_checkpointing()
    noisy, times, text = torch.randn(4, 4, 8, 8), torch.randint(0, 1000, (4,)), torch.randn(4, 7, 16)
    return model, lambda model: model(noisy, times, text).sample.square().mean()


def timm_vit(*, checkpointed: bool) -> tuple[nn.Module, Loss]:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=10).train()
    model.set_grad_checkpointing(checkpointed)
    images = torch.randn(8, 3, 32, 32)
    return model, lambda model: model(images).square().mean()


def monai_swin(*, checkpointed: bool) -> tuple[nn.Module, Loss]:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    model = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, use_checkpoint=checkpointed, spatial_dims=2)
    images = torch.randn(1, 1, 64, 64)
    return model.train(), lambda model: model(images).square().mean()


def steps(model: nn.Module, loss_of: Loss, fit: lowtide.Fit | None = None) -> tuple[list[float], list, list[int]]:
    """Losses, trained weights, and each step's peak beyond what was there."""
    optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=1e-2), [], []

    def step() -> None:
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())

    for number in range(4):
        peaks.append(peak_bytes(step))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None and number:
            fit.wait()
    return losses, [p.detach().clone() for p in model.parameters()], peaks


@pytest.mark.parametrize("make", [diffusers_unet, timm_vit, monai_swin], ids=lambda make: make.__name__)
def test_no_step_before_the_plan_takes_more_than_the_checkpointed_one(make):
    plain = steps(*make(checkpointed=False))
    users = steps(*make(checkpointed=True))
    model, loss_of = make(checkpointed=True)

    with lowtide.fit(model, budget="60%") as fit:
        losses, weights, peaks = steps(model, loss_of, fit)
        assert fit.status().planned_steps == 2
        assert not ExistingCheckpointing(model).told

    assert ExistingCheckpointing(model).told
    assert losses == plain[0] == users[0] and all(map(torch.equal, weights, plain[1]))
    assert peaks[0] <= 1.001 * users[2][0]
    assert peaks[1] <= 1.15 * users[2][0]  # what letting go of activations cannot reach: workspaces of convolutions
    assert max(peaks[2:]) < plain[2][0]
