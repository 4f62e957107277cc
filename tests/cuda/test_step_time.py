"""``lowtide pretend`` says what a step takes: a small transformer with a second stream, as a script."""

import json

import pytest

from lowtide import cli
from lowtide.pretending.calls import pretend
from lowtide.pretending.settings import PretendError, PretendSettings

pytestmark = pytest.mark.usefixtures("standin")
SCRIPT = """
import sys
import torch
from torch import nn

LAYERS, WIDTH, TOKENS = (int(word) for word in sys.argv[1:4])
device, side = torch.device("cuda"), torch.cuda.Stream()
layer = lambda: nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True)
model = nn.ModuleList([nn.Embedding(1000, WIDTH), *(layer() for _ in range(LAYERS))]).to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
host = torch.zeros(4, TOKENS, dtype=torch.int64).pin_memory()
for step in range(20):
    with torch.cuda.stream(side):
        ids = host.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    x = ids
    for part in model:
        x = part(x)
    loss = x.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "read" in sys.argv:
        loss.item()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def report_of(script, *words, layers=2, width=512, tokens=256, **options):
    command = ["python", str(script), str(layers), str(width), str(tokens), *words]
    return pretend(command, **{"device": "a100-80gb", "steps": 2, "history": False, **options})


def test_the_report_says_what_a_step_takes_and_why(script):
    report = report_of(script)
    time = report.time

    assert time is not None and len(report.steps) == 2
    assert time.tokens == 4 * 256 and time.tokens_per_second == pytest.approx(4 * 256 / time.step_ms * 1e3)
    assert 0 < time.busy_ms <= time.step_ms * 1.001
    assert 0 < time.host_ms < report.steps[-1].host_ms
    assert {"matmul", "attention", "memory", "host copies"} <= set(time.by_kind_ms)
    # Products of 2 layers: 12 x width squared for each token, three times; attention is a part of it.
    assert time.model_flops == pytest.approx(3 * 2 * 2 * 12 * 512**2 * 4 * 256, rel=0.2)
    assert not time.is_anchored
    assert f"a step on a100-80gb takes {time.step_ms:,.1f} ms" in str(report)
    assert json.loads(json.dumps(report.to_json()))["time"]["tokens_per_second"] == time.tokens_per_second


def test_a_slower_device_and_more_work_take_longer_and_a_small_step_is_bound_by_its_launches(script):
    small = report_of(script).time
    large = report_of(script, width=4096, tokens=1024).time
    slower = report_of(script, width=4096, tokens=1024, device="l4").time

    assert small.launch_bound > 0.2
    assert large.launch_bound < 0.05
    assert large.step_ms < slower.step_ms / 1.5


def test_with_a_measured_rate_the_step_takes_that(script):
    options = {"width": 4096, "tokens": 1024}
    plain = report_of(script, **options).time
    rate = 0.9 * plain.tokens_per_second

    anchored = report_of(script, measured=f"{rate} tokens/s", **options).time

    assert anchored.tokens_per_second == pytest.approx(rate, rel=0.01)
    assert anchored.is_anchored and anchored.speed < 1 and anchored.error_fraction <= plain.error_fraction


def test_a_number_that_is_read_makes_the_host_wait_for_the_device(script):
    options = {"width": 4096, "tokens": 1024}

    assert report_of(script, "read", **options).time.waited_ms > 0.5 * report_of(script, **options).time.busy_ms


TIMED = SCRIPT.replace(
    "for step in range(20):",
    """import time
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
at = [time.time()]
end.record()
for step in range(20):
    begin, end = end, torch.cuda.Event(enable_timing=True)""",
).replace(
    """    if "read" in sys.argv:""",
    """    end.record()
    torch.cuda.synchronize()
    at.append(time.perf_counter() if "perf" in sys.argv else time.time())
    print(f"step {step} {1e3 * (at[-1] - at[-2]):.3f} ms, events {begin.elapsed_time(end):.3f} ms", flush=True)
    if "read" in sys.argv:""",
)


def test_with_a_clock_the_script_prints_itself_what_a_step_takes(tmp_path):
    script, said = tmp_path / "train.py", tmp_path / "output"
    script.write_text(TIMED)
    with said.open("w") as output:
        report = report_of(script, width=4096, tokens=1024, clock=True, steps=6, output=output)

    lines = said.read_text().splitlines()
    assert [line.split()[1] for line in lines] == [str(step) for step in range(6)]  # of the second run alone
    for word in (2, 5):  # the script's own clock, and its events; a step's print comes somewhere in the next one
        four_steps = sum(float(line.split()[word]) for line in lines[2:])
        assert 3 * report.time.step_ms <= four_steps <= 5 * report.time.step_ms


def test_without_time_the_script_ends_after_its_steps(script):
    assert report_of(script, time=False).time is None


@pytest.mark.parametrize("text", ["fast", "0 ms", "12 parsecs"])
def test_what_was_measured_is_a_rate_or_a_time(text):
    with pytest.raises(PretendError, match="--measured"):
        PretendSettings(measured=text)


def test_options_of_the_command_line(script, capfd):
    command = ["--no-history", "--steps", "1", "--network", "100", "--", "python", str(script), "1", "256", "64"]

    assert (
        cli.main(
            ["pretend", "--device", "h100", "--json", "--tokens", "77", "--measured", "speed 0.9", "--clock", *command]
        )
        == 0
    )
    time = json.loads(capfd.readouterr().out)["time"]
    assert time["tokens"] == 77 and time["speed"] == 0.9

    assert cli.main(["pretend", "--device", "h100", "--json", "--no-time", *command]) == 0
    assert json.loads(capfd.readouterr().out)["time"] is None
