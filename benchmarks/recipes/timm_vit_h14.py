"""timm's ViT-H/14 under bf16 autocast: four images, Adam (https://github.com/pytorch/ao/pull/478)."""

import timm
import torch
from torch.nn import functional


def main() -> None:
    with torch.device("cuda"):
        model = timm.create_model("vit_huge_patch14_224", num_classes=102)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    while True:
        images, labels = torch.randn(4, 3, 224, 224, device="cuda"), torch.randint(0, 102, (4,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
