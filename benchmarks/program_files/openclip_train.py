"""OpenCLIP's own main on its synthetic pairs: a small CLIP, bf16, learned temperature."""

import json
import logging
import re
from pathlib import Path

import open_clip
import open_clip_train.main
from open_clip_train import train
from open_clip_train.main import main
from script_arguments import args, keep, show, timed


class Losses(logging.Handler):
    def emit(self, record):
        if found := re.search(r"Loss: ([\d.]+)", record.getMessage()):
            show(found[1])


Path("tiny-clip.json").write_text(json.dumps({
    "embed_dim": 64, "vision_cfg": {"image_size": 64, "layers": 4, "width": 128, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}))  # fmt: skip
open_clip.add_model_config("tiny-clip.json")
logging.getLogger().addHandler(Losses())
trained = []
one_epoch = train.train_one_epoch


def kept(model, *words, **more):
    trained[:] = [model]
    return one_epoch(model, *words, **more)


open_clip_train.main.train_one_epoch = kept
words = (
    f"--dataset-type synthetic --train-num-samples {16 * args.steps} --model tiny-clip --batch-size 16 --epochs 1 "
    "--precision amp_bf16 --workers 0 --warmup 10 --log-every-n-steps 1 --seed 0 --save-frequency 0 "
    f"--logs {args.output}"
)
with timed():
    main(words.split() + ["--grad-checkpointing"] * args.checkpointing)
keep(trained[0])
