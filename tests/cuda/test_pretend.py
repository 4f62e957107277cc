"""Scripts as people write them, run unmodified on a GPU that is not there (``lowtide pretend``)."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import lowtide
from lowtide.hollow.kept_workspaces import are_given_back

pytest.importorskip("cuda_standin", reason="cuda_standin is not here: make test-cuda")

MODEL = """
import torch
torch.manual_seed(0)
LAYERS, WIDTH, ROWS = 8, 2048, 4096
def model():
    layers = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS))
    return torch.nn.Sequential(*layers)
"""
LOOP = """
net = model().cuda()
opt = torch.optim.AdamW(net.parameters())
for step in range(12):
    x = torch.randn(ROWS, WIDTH, device="cuda")
    opt.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    opt.step()
    print(step, loss.item(), torch.cuda.max_memory_allocated())
"""
WEIGHTS = 8 * (2048 * 2048 + 2048) * 4
SAVED = 8 * 2 * 4096 * 2048 * 4  # each layer's input and its product


def script(folder: Path, source: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def line_of(path: str, text: str) -> int:
    return next(number for number, line in enumerate(Path(path).read_text().splitlines(), 1) if text in line)


@pytest.fixture
def quiet(tmp_path):
    """Where the script's own output goes."""
    with (tmp_path / "output.txt").open("w+") as file:
        yield file


def test_a_loop_is_stopped_after_three_steps_and_its_memory_is_told(tmp_path, quiet):
    path = script(tmp_path, MODEL + LOOP)

    report = lowtide.pretend(["python", path], "a100", output=quiet, time=False)

    assert report.fits and report.verdict == "fits" and report.exit_code == 0
    assert report.device == "a100-80gb" and len(report.steps) == 3
    assert [stage["stage"] for stage in report.stages][:5] == [
        "import torch", "the device", "forward", "backward", "optimizer step 1",
    ]  # fmt: skip
    first, second, third = report.steps
    assert second.allocated_bytes == third.allocated_bytes  # two states came after the first
    assert second.allocated_bytes - first.allocated_bytes == pytest.approx(2 * WEIGHTS, rel=0.05)
    assert report.peak_allocated_bytes == third.allocated_bytes <= report.peak_reserved_bytes < 80 * 2**30
    assert (
        report.peak_at["line"]
        == f"{path}:{line_of(path, 'backward()' if report.peak_at['is_backward'] else 'opt.step')}"
    )
    assert report.by_kind["weights"] == pytest.approx(WEIGHTS, rel=0.01)
    assert report.by_kind["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert report.by_kind["activations"] >= SAVED - 2**20
    assert sum(report.by_kind.values()) == pytest.approx(report.peak_allocated_bytes, rel=0.01)
    assert third.launches > 2 * 8 * 2  # two kernels of each layer, forward and backward
    # The host waits once a step, for the loss that is printed after the step.
    assert [(stop["line"], stop["count"]) for stop in report.stops] == [(f"{path}:{line_of(path, 'loss.item')}", 1)]
    assert first.waits == 2 * 8 and third.waits == 1  # parameters come from pageable memory
    # What the script reads of its own peak is not reset by the watching.
    quiet.seek(0)
    printed = [int(line.split()[2]) for line in quiet.read().splitlines()]
    assert printed == [first.allocated_bytes, second.allocated_bytes]


@pytest.mark.parametrize("said", [None, "2"])
def test_one_thread_computes_small_values_unless_somebody_says_otherwise(said, tmp_path, quiet, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    path = script(tmp_path, "import torch; print(torch.get_num_threads())")

    lowtide.pretend(["python", path], "h100", output=quiet)

    quiet.seek(0)
    assert quiet.read().split() == [said or "1"]


def test_memory_that_runs_out_is_told_with_its_line_and_pytorchs_words(tmp_path, quiet):
    path = script(tmp_path, MODEL + LOOP)

    report = lowtide.pretend(["python", path], "a100", memory="1GiB", output=quiet)

    assert not report.fits and report.verdict == "does not fit" and report.exit_code == 1
    found = report.out_of_memory
    assert found is not None and not found.was_caught
    assert found.step == len(report.steps) + 1
    assert found.line == f"{path}:{line_of(path, 'net(x)')}"
    assert "CUDA out of memory. Tried to allocate" in found.message
    assert found.allocated_bytes + found.asked_bytes > 2**30 - report.context_bytes - 64 * 2**20


def test_an_error_of_memory_that_the_script_catches_is_told_and_it_goes_on(tmp_path, quiet):
    source = """
    net = model().cuda()
    opt = torch.optim.SGD(net.parameters(), 0.1)
    rows = 1 << 20
    for step in range(3):
        while True:
            try:
                net(torch.randn(rows, WIDTH, device="cuda")).square().mean().backward()
                break
            except torch.cuda.OutOfMemoryError:
                rows //= 2
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))

    report = lowtide.pretend(["python", path], "h100", output=quiet)

    assert report.fits and report.out_of_memory is not None and report.out_of_memory.was_caught
    assert "The script caught an out-of-memory error and went on." in report.notes


def test_rank_3_of_64_is_one_process_whatever_the_launcher_starts(tmp_path, quiet):
    source = """
    import os
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = model().cuda()
    for layer in net: fully_shard(layer)
    fully_shard(net)
    opt = torch.optim.AdamW(net.parameters())
    for step in range(9):
        net(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
        opt.step(); opt.zero_grad()
        print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))
    command = ["torchrun", "--nproc-per-node", "8", path]

    report = lowtide.pretend(command, "h100", ranks=64, rank=3, time=False, output=quiet)

    assert report.fits and (report.ranks, report.rank) == (64, 3)
    quiet.seek(0)
    assert quiet.read().split("\n")[:-1] == ["rank 3 of 64"] * 2
    assert report.by_kind["optimizer"] == pytest.approx(2 * WEIGHTS / 64, rel=0.1)
    assert "Rank 3 of 64 ran; every other rank is taken to hold what it holds." in report.assumptions


def test_gathered_weights_of_the_older_sharding_are_not_taken_for_the_activations_inside_it(tmp_path, quiet):
    source = """
    import os
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    policy = ModuleWrapPolicy({torch.nn.Linear})
    net = FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=torch.cuda.current_device())
    opt = torch.optim.AdamW(net.parameters())
    for step in range(9):
        net(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))

    report = lowtide.pretend(["torchrun", "--nproc-per-node", "8", path], "h100", time=False, output=quiet)

    layer, parts = WEIGHTS / 8, {part["part"]: part["bytes"] for part in report.by_part}
    assert report.fits and report.ranks == 8
    assert report.by_kind["optimizer"] == pytest.approx(2 * WEIGHTS / 8, rel=0.1)
    assert parts.get("gathered weights", 0) < 3 * layer  # one layer's, and that of the one that comes next
    assert report.by_kind["activations"] >= SAVED - 2**20


REPLICAS = {
    "newer sharding": "for layer in [*net, net]: fully_shard(layer, mesh=mesh)",
    "older sharding": """
net = FullyShardedDataParallel(
    net, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_mesh=mesh,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", REPLICAS)
def test_replicas_of_shards_hold_the_share_of_their_own_group(sharding, tmp_path, quiet):
    source = """
    import os
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("replicas", "shards"))
    net = model().cuda()
    """
    training = """
    opt = torch.optim.AdamW(net.parameters())
    for step in range(9):
        net(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source) + REPLICAS[sharding] + textwrap.dedent(training))
    command = ["torchrun", "--nproc-per-node", "8", path]

    report = lowtide.pretend(command, "h100", ranks=32, time=False, output=quiet)

    assert report.fits and report.ranks == 32
    assert report.by_kind["optimizer"] == pytest.approx(2 * WEIGHTS / 4, rel=0.1)
    assert report.by_kind["activations"] >= SAVED - 2**20


@pytest.mark.slow
def test_ranks_that_share_a_sequence_hold_their_part_of_it(tmp_path, quiet):
    source = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("context",))
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(1024, 3 * 1024)
        def forward(self, x):
            q, k, v = (t.unflatten(2, (8, 128)).transpose(1, 2) for t in self.inner(x).chunk(3, 2))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).flatten(2)
    net = torch.nn.Sequential(*(Attention() for _ in range(4))).cuda().bfloat16()
    opt = torch.optim.AdamW(net.parameters())
    for step in range(9):
        x = torch.randn(1, 65536, 1024, device="cuda", dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            net(x).square().mean().backward()
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, source)
    peaks = {}
    for ranks in (4, 8):
        report = lowtide.pretend(["torchrun", "--nproc-per-node", str(ranks), path], "h100", time=False, output=quiet)
        assert report.fits and report.ranks == ranks
        peaks[ranks] = report.by_kind["activations"]

    saved = 4 * 4 * 65536 * 1024 * 2  # of each layer: q, k, v and what attention makes
    assert peaks[4] >= saved / 4
    assert peaks[8] == pytest.approx(peaks[4] / 2, rel=0.1)


def test_stages_of_a_pipeline_run_one_after_another_and_the_largest_is_named(tmp_path, quiet):
    source = """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4 if rank == 1 else 2)]
    if rank == world - 1: layers.append(torch.nn.Linear(WIDTH, 3))
    part = torch.nn.Sequential(*layers).cuda()
    stage = PipelineStage(part, rank, world, torch.device("cuda", rank))
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda out, target: (out - target).square().mean())
    opt = torch.optim.AdamW(part.parameters())
    for step in range(9):
        if rank == 0: schedule.step(torch.randn(ROWS, WIDTH, device="cuda"))
        elif rank == world - 1: schedule.step(target=torch.randn(ROWS, 3, device="cuda"), losses=[])
        else: schedule.step()
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))
    command = ["torchrun", "--nproc-per-node", "3", path]

    report = lowtide.pretend(command, "h100", ranks=3, rank=(1, 2), time=False, output=quiet)

    layer = (2048 * 2048 + 2048) * 4
    assert report.rank == 1 and [(one.rank, one.verdict) for one in report.by_rank] == [(1, "fits"), (2, "fits")]
    assert report.by_kind["optimizer"] + report.by_kind["weights"] >= 3 * 4 * layer
    assert report.by_rank[1].peak_allocated_bytes < report.peak_allocated_bytes
    assert "Ranks that ran before it, for what they send: 0." in report.notes
    assert "rank 1 takes most of those that ran" in str(report)


def test_steps_of_deepspeed_are_its_engines(tmp_path, quiet):
    pytest.importorskip("deepspeed")
    source = """
    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {}}}  # its optimizer takes a step when it is made
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    for batch in range(30):
        engine.backward(engine(torch.randn(ROWS, WIDTH, device="cuda").bfloat16()).square().mean())
        engine.step()
        print(batch, flush=True)
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))

    report = lowtide.pretend(["deepspeed", "--num_gpus", "8", path], "h100", time=False, output=quiet)

    assert report.fits and report.ranks == 8 and len(report.steps) == 3
    quiet.seek(0)
    assert [line for line in quiet.read().splitlines() if line.isdecimal()] == ["0", "1", "2", "3", "4"]
    assert all(step.launches > 8 * 2 * 2 for step in report.steps)
    assert report.by_kind["optimizer"] >= 2 * WEIGHTS


def test_each_stage_of_deepspeeds_pipeline_runs(tmp_path, quiet):
    """Its batches are steps, and a stage gets its inputs' shapes from the one before it, which runs first."""
    pytest.importorskip("deepspeed")
    source = """
    import deepspeed, torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    deepspeed.init_distributed()
    layers = [LayerSpec(torch.nn.Linear, 64, 64) for _ in range(6)]
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {}}}
    config["optimizer"]["params"]["lr"] = 0.1
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=data, config=config)
    for _ in range(30):
        engine.train_batch()
    """
    path = script(tmp_path, textwrap.dedent(source))

    command = ["deepspeed", "--num_gpus", "2", path]
    report = lowtide.pretend(command, "h100", ranks=2, rank=[0, 1], steps=2, time=False, output=quiet)

    assert report.fits and [run.rank for run in report.by_rank] == [0, 1] and len(report.steps) == 2


def test_a_script_that_fails_keeps_its_own_error(tmp_path, quiet):
    report = lowtide.pretend(["python", script(tmp_path, "import torch\nraise KeyError('mine')")], output=quiet)

    assert report.verdict == "failed" and report.exit_code == 1 and "KeyError: 'mine'" in report.last_words


def test_a_command_that_trains_nothing_says_so(tmp_path, quiet):
    report = lowtide.pretend(["python", "-c", "print(1)"], output=quiet)

    assert not report.fits and report.verdict == "trained nothing"
    assert str(report).startswith("The command trained nothing")


def test_a_script_that_never_steps_is_ended_with_all_of_its_processes(tmp_path, quiet):
    source = """
    import os, subprocess, sys, time
    import torch
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    torch.zeros(1, device="cuda")
    time.sleep(600)
    """
    first = "import torch; torch.zeros(1, device='cuda')"
    starts_s = lowtide.pretend(["python", script(tmp_path, first, "first.py")], output=quiet).seconds  # machines differ
    patience_s = 8 + 2 * starts_s

    report = lowtide.pretend(["python", script(tmp_path, source)], output=quiet, patience_s=patience_s)

    assert report.verdict == "did not end"
    assert any(f"no step for {patience_s:.0f} s" in note and "the device" in note for note in report.notes)
    quiet.seek(0)
    child = int(quiet.read())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE  # nobody reaps it


def test_lowtide_inside_keeps_its_budget_and_says_what_is_in_force(tmp_path, quiet):
    plain = lowtide.pretend(["python", script(tmp_path, MODEL + LOOP)], "h100", output=quiet)
    budget = int(WEIGHTS * 4 + SAVED * 0.6)

    report = lowtide.pretend(["python", script(tmp_path, MODEL + LOOP)], "h100", budget=budget, output=quiet)

    assert report.lowtide["in_force"] and report.lowtide["planned_steps"] >= 3
    assert report.lowtide["budget_bytes"] == budget < plain.peak_allocated_bytes
    assert all(step.allocated_bytes <= budget for step in report.steps), [
        s.allocated_bytes / budget for s in report.steps
    ]
    assert report.steps[-1].allocated_bytes == pytest.approx(report.lowtide["predicted_peak_bytes"], rel=0.001)
    assert not any("more" in reason for reason in report.lowtide["reasons"])
    assert 0 < report.lowtide["predicted_overhead"] < 1
    assert any("proofs of values are off" in reason for reason in report.lowtide["reasons"])


def test_the_command_line_gives_one_object_of_json_and_a_page(tmp_path):
    path = script(tmp_path, MODEL + LOOP)
    page, snapshot = tmp_path / "report.html", tmp_path / "snapshot.pickle"
    lowtide_command = str(Path(sys.executable).with_name("lowtide"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}

    done = subprocess.run(
        [lowtide_command, "pretend", "--device", "l4", "--json", "--report", page, "--snapshot", snapshot, "--",
         "python", path],
        capture_output=True, text=True, env=clean,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    for name in ("fits", "exit_code", "peak_allocated_bytes", "peak_reserved_bytes", "peak_by_step", "by_kind",
                 "out_of_memory", "host_ms_per_step", "launches_per_step", "stops", "snapshot", "lowtide",
                 "assumptions"):  # fmt: skip
        assert name in body
    assert body["out_of_memory"] is None and body["lowtide"] is None and body["snapshot"] == str(snapshot)
    assert set(body["by_kind"]) == {"weights", "gradients", "optimizer", "activations", "workspaces", "other"}
    assert snapshot.stat().st_size > 10_000 and "It fits" in page.read_text()


def test_what_would_make_it_fit_is_measured_by_running_it_again(tmp_path):
    source = """
    import sys
    rows = int(sys.argv[2])
    net = model().cuda()
    opt = torch.optim.AdamW(net.parameters())
    for step in range(9):
        net(torch.randn(rows, WIDTH, device="cuda")).square().mean().backward()
        opt.step(); opt.zero_grad()
    """
    path = script(tmp_path, MODEL + textwrap.dedent(source))
    command = str(Path(sys.executable).with_name("lowtide"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}

    done = subprocess.run(
        [command, "pretend", "--memory", "1700MiB", "--advise", "--json", "--", "python", path, "--batch-size", "8192"],
        capture_output=True, text=True, env=clean,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    changes = {change["change"]: change for change in json.loads(done.stdout)["changes"]}
    assert changes["half the batch"]["fits"] and changes["half the batch"]["how"] == "4096"
    need = next(change for name, change in changes.items() if name.startswith("a device with"))
    assert need["how"] == "--device t4" and need["peak_reserved_bytes"] > 1700 * 2**20
    assert "gradient checkpointing" not in changes  # this model has no such switch


def test_the_example_of_the_pages_takes_what_they_say(quiet, monkeypatch):
    if are_given_back():
        pytest.skip("the pages' numbers are of a PyTorch whose products keep their workspaces")
    root = Path(__file__).parents[2]
    shown = json.loads((root / "benchmarks" / "results" / "pretend_example.json").read_text())["devices"]["h100"]
    monkeypatch.chdir(root)

    report = lowtide.pretend(["python", "examples/pretend/llama_1b.py"], "h100", time=False, output=quiet)

    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "by_kind", "launches_per_step", "waits_per_step"):
        assert report.to_json()[name] == shown[name], name


COMPILED = """
import json, sys, torch, transformers
import lowtide
config = transformers.LlamaConfig(
    hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=4096,
    vocab_size=1024, use_cache=False,
)
with torch.device("cuda"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
compiled = lowtide.compile(model, budget="70%", optimizer=optimizer)
ids = torch.randint(0, 1024, (1, 8192), device="cuda")
for _ in range(5):
    compiled(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    status, plan = compiled.status(), compiled.plan
    open(sys.argv[1], "w").write(json.dumps({
        "in_force": status.in_force, "counted": status.last_peak_bytes, "predicted": plan.predicted_peak_bytes,
        "overhead": plan.predicted_overhead, "reasons": status.reasons,
    }))
"""


@pytest.mark.slow
def test_a_script_that_has_lowtide_in_its_compiled_layers_is_planned_by_the_devices_times(tmp_path, quiet):
    """Norms of so many rows leave partial sums, which the generated code adds up."""
    told = tmp_path / "told.json"
    command = ["python", script(tmp_path, COMPILED), str(told)]
    report = lowtide.pretend(command, "h100", steps=4, output=quiet)
    found = json.loads(told.read_text())

    assert report.fits, report.last_words
    assert found["in_force"] and any("LOWTIDE_WITHOUT_VALUES" in reason for reason in found["reasons"])
    assert abs(found["counted"] - found["predicted"]) < 1 << 20
    assert 0 < found["overhead"] < 0.4, "not of kernels that do nothing"
