"""The order of second derivatives: autograd's thread of a device counts its nodes apart from the script's thread."""

import json
import subprocess
import sys

import pytest

# In a process of its own, where both threads begin at 0: in the first step their nodes mix, later no more.
SCRIPT = """
import json
import torch
import lowtide

torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)) for _ in range(4)]
critic = torch.nn.Sequential(*blocks).to("cuda")
optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)

def step():
    real, fake = (torch.randn(2048, 128, device="cuda") for _ in range(2))
    mixed = (0.5 * (real + fake)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    loss = critic(fake).mean() - critic(real).mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

fit = lowtide.fit(critic, budget="60%", optimizer=optimizer)
why_not = []
for _ in range(2):
    step()
    fit.wait(60)
    why_not.append(fit.status().why_not)
step()
step()
status = fit.status()
print(json.dumps({
    "why_not": why_not, "planned": status.planned_steps, "counted": status.last_peak_bytes,
    "predicted": fit.plan.measurable_peak_bytes,
}))
"""


def test_a_plan_is_of_the_order_that_second_derivatives_keep(cuda):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    assert "in another order than those of later ones" in found["why_not"][0] and found["planned"] == 2
    assert found["counted"] == pytest.approx(found["predicted"], rel=1e-4)
