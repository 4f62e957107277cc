"""Ultralytics: YOLOv8n for detection from its YAML, with its augmentation and EMA."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from script_arguments import args, keep, show, timed
from ultralytics import YOLO

generator = np.random.default_rng(0)
place = Path("boxes").absolute()
for n in range(32):
    image, label = place / f"images/train/{n}.jpg", place / f"labels/train/{n}.txt"
    for folder in (image.parent, label.parent):
        folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(image)
    label.write_text("".join(f"{k} {x:.3f} {y:.3f} 0.3 0.4\n" for k, (x, y) in enumerate(generator.random((2, 2)))))
Path("boxes.yaml").write_text(f"path: {place}\ntrain: images/train\nval: images/train\nnames: {{0: a, 1: b}}\n")
model = YOLO("yolov8n.yaml")
model.add_callback("on_train_batch_end", lambda trainer: show(trainer.loss))
model.add_callback("on_train_end", lambda trainer: keep(trainer.ema.ema))
with timed():
    model.train(
        data="boxes.yaml", epochs=args.steps // 4, batch=8, imgsz=64, device="cpu", workers=0, val=False, plots=False,
        save=False, seed=0, project=str(args.output), amp=False, verbose=False, warmup_epochs=1,
    )  # fmt: skip
sys.stdout.flush()
