"""Models of images and text get an image in each sequence, or the answer says that they got none."""

import pytest
import torch
import transformers as t

import lowtide
from lowtide.estimation.device_table import device_named
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.training_setup import SetupError, TrainingSetup
from lowtide.graph.step_graph import StepGraph

TEXT = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=700,
)  # fmt: skip
EYE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14
)
TURNED = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
CONFIGS = {
    "llava": lambda: t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**EYE), text_config=t.LlamaConfig(**TEXT), image_token_index=650
    ),
    "qwen2 vl": lambda: t.Qwen2VLConfig(
        text_config=TEXT | TURNED, vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4),
        image_token_id=650, vision_start_token_id=651, vision_end_token_id=652, video_token_id=653,
    ),
    "gemma3": lambda: t.Gemma3Config(
        text_config=TEXT | {"head_dim": 16}, vision_config=EYE, mm_tokens_per_image=4, image_token_index=650
    ),
    "paligemma": lambda: t.PaliGemmaConfig(
        text_config=TEXT | {"head_dim": 16}, vision_config=EYE, image_token_index=650, projection_dim=64
    ),
}  # fmt: skip
TOKENS = {"llava": 16, "qwen2 vl": 256, "gemma3": 4, "paligemma": 16}


def setup(seq_len: int = 280) -> TrainingSetup:
    return TrainingSetup(device_named("h100"), seq_len=seq_len, batch_size=2, precision="fp32")


def patches(graph: StepGraph) -> list[str]:
    return [op.name for op in graph.ops if "convolution" in op.name]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_image_is_looked_at_in_each_sequence(tmp_path, name):
    CONFIGS[name]().save_pretrained(tmp_path)
    subject = subject_named(str(tmp_path))
    graph = subject.trace(setup())

    assert patches(graph) and "pixels in each sequence" in graph.provenance["assumed"]
    with pytest.raises(SetupError, match=f"no room for text beside the {TOKENS[name]} tokens of an image"):
        subject.trace(setup(seq_len=TOKENS[name]))


def test_the_peak_is_that_of_a_real_step(tmp_path):
    CONFIGS["llava"]().save_pretrained(tmp_path)
    subject = subject_named(str(tmp_path))
    foreseen = subject.trace(TrainingSetup(device_named("cpu"), seq_len=64, batch_size=2, precision="fp32"))
    model = t.AutoModelForImageTextToText.from_config(CONFIGS["llava"]()).train()
    ids = torch.zeros(2, 64, dtype=torch.long)
    labels = ids.clone()
    ids[:, :16] = 650
    batch = {"input_ids": ids, "labels": labels, "pixel_values": torch.zeros(2, 3, 56, 56)}
    graph = lowtide.trace(model, batch)

    peaks = [
        lowtide.solve(g, lowtide.Costs((1.0,) * len(g.ops)), method="none").predicted_peak_bytes
        for g in (foreseen, graph)
    ]
    assert peaks[0] == peaks[1]


def test_where_no_form_is_taken_the_answer_says_that_there_is_no_image(tmp_path, monkeypatch):
    CONFIGS["llava"]().save_pretrained(tmp_path)
    monkeypatch.setattr("lowtide.foresight.image_text._forms", lambda *_: iter(()))
    graph = subject_named(str(tmp_path)).trace(setup())

    assert not patches(graph) and "text alone" in graph.provenance["assumed"]
