"""torchvision's reference loop of detection: Faster R-CNN on lists of images, boxes in other numbers each time."""

import torch
import torchvision
from script_arguments import args, keep, show, timed

torch.manual_seed(0)
model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights=None, weights_backbone=None, num_classes=4, min_size=224, max_size=256, trainable_backbone_layers=6,
    rpn_pre_nms_top_n_train=100, rpn_post_nms_top_n_train=50, box_batch_size_per_image=32,
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=20)


def target(size: int) -> dict[str, torch.Tensor]:
    corners = torch.randint(0, size // 2, (int(torch.randint(1, 5, ())), 2)).float()
    boxes = torch.cat([corners, corners + torch.randint(8, size // 2, corners.shape)], 1)
    return {"boxes": boxes, "labels": torch.randint(1, 4, (len(boxes),))}


model.train()
with timed():
    for _ in range(args.steps):
        sizes = [224, 192, 224, 208]
        images = [torch.rand(3, size, size) for size in sizes]
        losses = sum(model(images, [target(size) for size in sizes]).values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        warmup.step()
        show(losses)
keep(model)
