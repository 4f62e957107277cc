"""A training without a line of lowtide in it, within a budget by `lowtide run`. This file starts itself twice."""

import json
import subprocess
import sys

import torch
from torch import nn


def train() -> None:
    """As in any script. It prints its seconds and its last loss."""
    import time

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 128), nn.TransformerEncoder(layer, num_layers=4), nn.Linear(128, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    for i in range(80):
        tokens = torch.randint(0, 100, (16, 64), generator=torch.Generator().manual_seed(i))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{time.perf_counter() - start:.2f} {loss.item().hex()}", file=sys.stderr)


def within(budget: str) -> tuple[float, str, str]:
    """Peak in MiB, seconds and last loss of `lowtide run --budget BUDGET -- python run_untouched.py --train`."""
    command = [sys.executable, "-m", "lowtide.cli", "run", "--json", "--budget", budget, "--"]
    ran = subprocess.run([*command, sys.executable, __file__, "--train"], capture_output=True, text=True, check=True)
    print(*(line for line in ran.stderr.splitlines() if line.startswith("lowtide: ")), sep="\n")
    seconds, loss = next(line for line in ran.stderr.splitlines() if line[0].isdigit()).split()
    return json.loads(ran.stdout)["lowtide"]["observed_peak_bytes"] / 2**20, seconds, loss


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    else:
        plain_mib, plain_s, plain_loss = within("1TiB")
        mib, seconds, loss = within(f"{0.85 * plain_mib:.2f}MiB")
        assert loss == plain_loss, "the bits are the same"
        print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s} s -> {seconds} s, last loss identical")
