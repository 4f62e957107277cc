"""Models of timm and diffusers by name: sizes of their own, and the peak of the real step."""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from typing import ClassVar

import pytest
import torch
from support.quick import thorough_but
from torch import nn

import lowtide
from lowtide.cli import main
from lowtide.estimation.device_table import device_named
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.training_setup import SetupError, TrainingSetup

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [32, 64], "norm_num_groups": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 8,
}  # fmt: skip
KINDS = {
    "unet": {
        "_class_name": "UNet2DModel", "sample_size": 8, "block_out_channels": [32, 64], "norm_num_groups": 8,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 1,
    },
    "unet of text": UNET,
    "sdxl": UNET | {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
    },
    "dit": {
        "_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
        "sample_size": 8, "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 10,
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel", "sample_size": 8, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 64,
        "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8,
    },
    "autoencoder": {
        "_class_name": "AutoencoderKL", "sample_size": 32, "block_out_channels": [16, 32], "norm_num_groups": 8,
        "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
}  # fmt: skip


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def setup(**options):
    return TrainingSetup(device_named("rtx4090"), seq_len=1, batch_size=3, **options)


def plain_peak(graph):
    """Of the step: what a process holds on a device counts in a real one."""
    of_the_process = sum(graph.resident.get(part, 0) for part in ("other", "workspaces"))
    plain = lowtide.solve(graph, lowtide.Costs((1.0,) * len(graph.ops)), method="none")
    return plain.predicted_peak_bytes - of_the_process


@pytest.fixture
def timm(monkeypatch):
    """A library with timm's face and one classifier."""
    made = types.ModuleType("timm")
    made.__spec__ = ModuleSpec("timm", None)  # other libraries ask whether there is one

    class Classifier(nn.Module):
        default_cfg: ClassVar = {"input_size": (3, 8, 8)}

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(192, 10)

        def forward(self, pixels):
            return self.head(pixels.flatten(1))

    made.is_model = {"tiny_net"}.__contains__
    made.list_models = lambda: ["tiny_net"]
    made.create_model = lambda name, pretrained: Classifier()
    monkeypatch.setitem(sys.modules, "timm", made)


@pytest.mark.parametrize("kind", thorough_but(("unet of text", "dit"), KINDS))
def test_the_step_of_a_diffusers_config_has_the_real_peak(tmp_path, kind):
    subject = subject_named(written(tmp_path, KINDS[kind]))
    real = subject.model().train()
    batch = {
        name: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x
        for name, x in subject.batch(real, 3, torch.float32).items()
    }
    here = torch.get_default_device().type
    foreseen = lowtide.trace(real.to("meta"), subject.batch(real, 3, torch.float32), step=subject.loss, device=here)
    graph = lowtide.trace(subject.model().train(), batch, step=subject.loss)

    assert plain_peak(foreseen) == plain_peak(graph)
    elements = sum(p.elements for p in subject.facts(setup(precision="fp32")).parameters)
    assert elements == sum(p.numel() for p in real.parameters())


def test_autocast_leaves_parameters_and_16_bits_change_them(tmp_path):
    subject = subject_named(written(tmp_path, UNET))
    sizes = {p: {x.itemsize for x in subject.facts(setup(precision=p)).parameters} for p in ("bf16-mixed", "bf16")}
    assert sizes == {"bf16-mixed": {4}, "bf16": {2}}
    mixed, plain = (subject.trace(setup(precision=p)) for p in ("bf16-mixed", "fp32"))
    assert plain_peak(mixed) != plain_peak(plain)


def test_a_name_of_timm_counts_images(timm, capsys):
    code = main(["plan", "--model", "timm/tiny_net", "--device", "t4", "--batch-size", "4", "--precision", "fp32",
                 "--json"])  # fmt: skip
    body = json.loads(capsys.readouterr().out)

    assert code == 0 and body["unit"] == "images"
    assert body["max_seq_len"] is None and body["max_batch_size"] > 4
    assert main(["plan", "--model", "timm/tiny_net", "--device", "t4", "--precision", "fp32", "--no-limits"]) == 0
    said = capsys.readouterr().out
    assert "timm/tiny_net on NVIDIA T4, 1 images: fits" in said and "images a second" in said
    assert "for each image: pixels of 3 x 8 x 8" in said


@pytest.mark.parametrize("verb", ["plan", "advise"])
def test_images_have_no_length(timm, capsys, verb):
    assert main([verb, "--model", "timm/tiny_net", "--device", "t4", "--seq-len", "4"]) == 2
    assert "--seq-len 4: timm/tiny_net takes images, not sequences" in capsys.readouterr().err


def test_what_is_not_there_is_named(timm, tmp_path, monkeypatch):
    with pytest.raises(lowtide.LowtideError, match="timm has no model 'tiny_ned'. Did you mean 'tiny_net'"):
        subject_named("timm/tiny_ned")
    with pytest.raises(lowtide.LowtideError, match="no class NoSuchModel"):
        subject_named(written(tmp_path, {"_class_name": "NoSuchModel"}))
    with pytest.raises(lowtide.LowtideError, match="a VQModel. How that is called in training is not known"):
        subject_named(written(tmp_path, {"_class_name": "VQModel"}))
    with pytest.raises(SetupError, match="--lora is for models of transformers"):
        subject_named("timm/tiny_net").check(setup(lora_rank=4))
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(lowtide.LowtideError, match="timm/tiny_net is a model of timm, which cannot be imported"):
        subject_named("timm/tiny_net")
