"""What a script without values does, and what is seen of it from inside (``cuda_standin/script``)."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from cuda_standin.script.module_names import ModuleNames, Place

import cuda_standin

ENTRY = Path(cuda_standin.__file__).with_name("entry")


def seen(folder):
    reports = [json.loads(path.read_text()) for path in folder.glob("report-*.json")]
    return max(reports, key=lambda report: len(report["steps"]))


def request(folder, **wanted):
    path = folder / "request.json"
    path.write_text(json.dumps(wanted))
    return str(path)


def test_a_package_that_is_looked_for_is_not_imported_and_torch_still_has_its_values(python):
    source = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
import torch
print((torch.ones(3, device="cuda") * 2).tolist())
"""
    assert python(source) == "[2.0, 2.0, 2.0]"


def test_a_folder_on_the_path_is_enough_and_the_environments_own_start_file_runs_too(python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "only_here.py").write_text("x = 7\n")
    source = "import only_here, torch; print(only_here.x, torch.cuda.is_available())"

    printed = python(
        source, PYTHONPATH=f"{ENTRY}:{tmp_path}", STANDIN_PACKAGES=str(tmp_path / "packages"), STANDIN_CUDA="1"
    )

    assert printed.split() == ["mine", "7", "True"]


def test_tokens_go_round_where_no_value_tells_experts_apart(python):
    source = """
import torch
for tokens in (64, 1 << 16):  # computed from zeros; not computed at all
    logits = torch.zeros(tokens, 16, device="cuda")
    assert torch.bincount(logits.topk(2, -1).indices.cpu().flatten(), minlength=16).unique().numel() == 1
    assert torch.bincount(logits.argmax(-1).cpu(), minlength=16).unique().numel() == 1
    assert torch.bincount(logits.max(-1).indices.cpu(), minlength=16).unique().numel() == 1
one = torch.zeros(4, 16, device="cuda")
one[:, 5] = 1
assert one.topk(1, -1).indices.flatten().tolist() == [5] * 4  # values decide where there are some
assert torch.zeros(4, 5000, device="cuda").argmax(-1).tolist() == [0] * 4  # a vocabulary is no choice of experts
"""
    python(source, STANDIN_SKIP_BYTES="65536", STANDIN_STRICT="0")
    python(
        'import torch; assert torch.zeros(64, 16, device="cuda").topk(2, -1).indices.unique().numel() == 2',
        STANDIN_SKIP_BYTES="65536", STANDIN_ROUTING="worst",
    )  # fmt: skip


def test_weights_on_the_host_take_neither_time_nor_memory(python):
    source = """
import torch
def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) << 10
before = resident()
kept = [torch.randn(1 << 27), torch.zeros(1 << 27), torch.nn.Linear(8192, 8192)]
kept += [torch.empty(1 << 27).to(torch.bfloat16)]
kept += [kept[0].clone(), torch.nn.init.trunc_normal_(torch.empty(1 << 26)), torch.ones(1 << 27)]
torch.optim.SGD([torch.nn.Parameter(kept[0])], 0.1, foreach=True)
assert resident() - before < 256 << 20, resident() - before  # of 3 GiB; imports on the way
assert torch.zeros(1 << 20).sum() == 0 and torch.ones(1 << 20).sum() == 1 << 20  # a mask of ones is one
assert torch.arange(1 << 20)[-1] == (1 << 20) - 1 and torch.randn(1000).std() > 0.5
"""
    python(source, STANDIN_SKIP_BYTES=str(1 << 20), STANDIN_STRICT="0")


def test_the_context_is_not_there_for_anybody(python):
    source = """
import torch
free, total = torch.cuda.mem_get_info()
assert total == 1024 << 20 and free == (1024 - 450) << 20
torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print("total capacity of 1024.00 MiB" in str(error) or "1.00 GiB" in str(error))
"""
    assert python(source, STANDIN_MEMORY="1024", STANDIN_CONTEXT="450") == "True"


STOPS = """
import torch
net = torch.nn.Linear(64, 64).cuda()
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    x = torch.ones(8, 64, device="cuda")
    opt.zero_grad()
    loss = net(x).square().mean()
    if loss.item() > 1e9: raise SystemExit(4)
    mask = (x > 0).nonzero()
    torch.cuda.synchronize()
    loss.backward()
    print(loss.tolist())
    opt.step()
raise SystemExit(5)
"""


def test_every_wait_of_the_host_has_its_line(python, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(STOPS)
    source = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"

    python(source, STANDIN_SCRIPT=request(tmp_path, steps=2))

    found = {(stop["line"].rpartition(":")[2], stop["operator"]): stop["count"] for stop in seen(tmp_path)["stops"]}
    assert found == {
        ("9", "_local_scalar_dense"): 1, ("10", "nonzero"): 1, ("11", "cuda.synchronize"): 1, ("13", "copy_"): 1,
    }  # fmt: skip


def test_the_process_ends_after_the_steps_asked_for_and_else_with_its_own_code(python, tmp_path):
    python(STOPS, STANDIN_SCRIPT=request(tmp_path, steps=2))
    assert len(seen(tmp_path)["steps"]) == 2 and seen(tmp_path)["stopped"]
    for path in tmp_path.glob("report-*"):
        path.unlink()

    python(STOPS, fails=True, STANDIN_SCRIPT=request(tmp_path, steps=0))
    assert len(seen(tmp_path)["steps"]) == 5 and "stopped" not in seen(tmp_path)


def test_a_plugin_is_called_and_its_own_optimizer_steps_are_none_of_the_script(python, tmp_path):
    plugin = tmp_path / "plugin" / "plugin.py"
    plugin.parent.mkdir()
    plugin.write_text("""
import os
def start(torch):
    from cuda_standin.script import record
    record.helpers.append(os.path.dirname(__file__) + os.sep)
    def probe():
        p = torch.nn.Parameter(torch.ones(2, device="cuda")); p.grad = torch.ones_like(p)
        torch.optim.SGD([p], 0.1).step()
        record.facts["probed"] = record.facts.get("probed", 0) + 1
    record.before_write.append(lambda: record.step_records and probe())
""")
    python(STOPS, STANDIN_SCRIPT=request(tmp_path, steps=3, plugins=[str(plugin)]))

    assert len(seen(tmp_path)["steps"]) == 3 and seen(tmp_path)["probed"] >= 3


def test_what_the_peak_consists_of_adds_up_and_who_allocated_it_is_named(python, tmp_path):
    script = tmp_path / "wide.py"
    script.write_text("""
import torch
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 256)
    def forward(self, x):
        return self.b(torch.nn.functional.gelu(self.a(x)))
net = torch.nn.Sequential(*(Wide() for _ in range(4))).cuda()
opt = torch.optim.Adam(net.parameters())
for step in range(9):
    opt.zero_grad()
    net(torch.ones(2048, 256, device="cuda")).square().mean().backward()
    opt.step()
""")
    source = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    python(source, STANDIN_SCRIPT=request(tmp_path, steps=2), STANDIN_SKIP_BYTES=str(1 << 20), STANDIN_STRICT="0")

    found = seen(tmp_path)
    weights = 4 * (2 * 256 * 4096 + 4096 + 256) * 4
    assert found["by_kind"]["weights"] == weights and found["by_kind"]["optimizer"] >= 2 * weights
    assert found["by_kind"]["activations"] >= 4 * 2 * 2048 * 4096 * 4
    peak = found["steps"][1]["allocated_bytes"]
    assert 0.99 * peak < sum(found["by_kind"].values()) <= peak
    by_module = found["by_module"][0]
    assert (by_module["module"], by_module["name"], by_module["count"]) == ("Wide", "*", 4)
    assert "wide.py:8" in found["by_line"][0]["line"]
    assert found["peak_at"]["line"].endswith("wide.py:13")  # forward and backward are in one line
    curve = found["curve"]["by_kind"]
    assert max(map(sum, zip(*curve.values()))) == sum(found["by_kind"].values())


def test_modules_have_their_names_in_the_model_and_repeated_layers_share_one(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("""
import torch
class Function(torch.autograd.Function):
    def forward(ctx, x): return x * 3
class Attention(torch.nn.Module):
    def forward(self, x): return x * 2
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.here, self.cross = Attention(), Attention()
    def forward(self, x):
        x = self.here(x)
        return self.cross(x)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(4, 4)
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return self.head(x)
""")
    read: dict = {}
    exec(compile(path.read_text(), path, "exec"), read)
    names = ModuleNames(list(read["Model"]().modules()))
    lines = {text.strip(): Place(str(path), number) for number, text in enumerate(path.read_text().splitlines(), 1)}
    attention, model = lines["def forward(self, x): return x * 2"], lines["return self.head(x)"]
    loop = lines["for layer in self.layers: x = layer(x)"]
    linear = inspect.getsourcefile(torch.nn.Linear)
    forward = Place(linear, inspect.getsourcelines(torch.nn.Linear.forward)[1])

    assert names.of((attention, lines["x = self.here(x)"], loop)) == ("Attention", "layers.*.here", 3)
    assert names.of((attention, lines["return self.cross(x)"], loop)) == ("Attention", "layers.*.cross", 3)
    assert names.of((attention, lines["super().__init__()"], loop)) == ("Attention", "layers.*.cross|here", 6)
    assert names.of((lines["x = self.here(x)"], loop)) == ("Layer", "layers.*", 3)
    function = lines["def forward(ctx, x): return x * 3"]  # no module: the one that calls it
    assert names.of((function, lines["x = self.here(x)"], loop)) == ("Layer", "layers.*", 3)
    assert names.of((forward, model)) == ("Linear", "head", 1)  # the model alone would say nothing
    assert names.of((loop,)) == ("Model", "", 1)
    assert names.of((Place(__file__, 1),)).name == ""
    wrapped = torch.nn.ModuleDict({"_fsdp_wrapped_module": read["Model"]()})
    assert ModuleNames(list(wrapped.modules())).of((lines["x = self.here(x)"], loop)).name == "layers.*"


def test_the_share_of_a_weight_that_zero_3_keeps_is_a_weight(python, tmp_path):
    source = """
import torch
weight = torch.nn.Parameter(torch.empty(0, device="cuda"))
weight.ds_tensor = torch.ones(1 << 22, device="cuda")
other = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = weight, other
    def forward(self):
        return self.other * 2
net = Half()
opt = torch.optim.SGD([other], 0.1)
for step in range(3):
    net().sum().backward()
    opt.step()
"""
    python(source, STANDIN_SCRIPT=request(tmp_path, steps=2), STANDIN_SKIP_BYTES=str(1 << 20), STANDIN_STRICT="0")

    assert seen(tmp_path)["by_kind"]["weights"] == 20 << 20


def test_buckets_of_gradients_are_gradients_before_and_after_they_are_put_in_order(python, tmp_path):
    source = """
import torch
from cuda_standin import process_group
process_group.install(world_size=2, rank=0)
torch.distributed.init_process_group("nccl")
layers = (torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.GELU()) for _ in range(4))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    opt.zero_grad()
    net(torch.ones(8192, 512, device="cuda")).square().mean().backward()
    opt.step()
"""
    for steps in (1, 3):
        wanted = {"STANDIN_SCRIPT": request(tmp_path, steps=steps), "STANDIN_DEVICES": "2", "STANDIN_STRICT": "0"}
        python(source, **wanted, STANDIN_SKIP_BYTES=str(1 << 20))
        parts = {part["part"]: part["bytes"] for part in seen(tmp_path)["by_part"]}
        assert parts["buckets of gradients"] == parts["weights"] == 4 * 512 * 512 * 4, (steps, parts)


def test_folders_without_weights_give_weights_that_take_nothing(python, tmp_path):
    source = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM, AutoModelForCausalLM
config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16)
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained({str(tmp_path / "model")!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, dtype=torch.bfloat16).cuda()
assert model.dtype == torch.bfloat16 and model.lm_head.weight.shape == (32000, 2048)
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
assert peak < 2 << 30, peak
from cuda_standin.script import weights
weights._OF_A_FILE = 1 << 27  # several files
parts = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, dtype=torch.bfloat16)
assert len(list(weights.request().folder.glob("weights-*/model-*.safetensors"))) > 3
assert not any(p.count_nonzero() for p in parts.parameters() if p.numel() < 1 << 16)
"""
    python(
        source, STANDIN_SCRIPT=request(tmp_path, no_weights=True), STANDIN_SKIP_BYTES=str(1 << 20), STANDIN_STRICT="0"
    )
    assert sorted(path.name for path in (tmp_path / "model").iterdir())[0] == "config.json"
    assert not list((tmp_path / "model").glob("*.safetensors"))


def test_only_what_the_configuration_ties_is_left_out_of_a_file_of_zeros(python, tmp_path):
    source = f"""
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM
from transformers import BertConfig, LlamaConfig, T5Config
small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
for config, kind in (
    (LlamaConfig(**small), AutoModelForCausalLM),
    (LlamaConfig(tie_word_embeddings=True, **small), AutoModelForCausalLM),
    (BertConfig(**small), AutoModelForMaskedLM),
    (T5Config(d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2), AutoModelForSeq2SeqLM),
):
    config.save_pretrained({str(tmp_path / "model")!r})
    model, found = kind.from_pretrained({str(tmp_path / "model")!r}, output_loading_info=True)
    assert not found["missing_keys"], found
    assert not any(parameter.count_nonzero() for parameter in model.parameters())
"""
    python(source, STANDIN_SCRIPT=request(tmp_path, no_weights=True))


def test_a_head_that_no_checkpoint_has_is_not_in_a_file_of_zeros(python, tmp_path):
    source = f"""
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaConfig
small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
LlamaConfig(architectures=["LlamaForCausalLM"], **small).save_pretrained({str(tmp_path / "model")!r})
_, found = AutoModelForSequenceClassification.from_pretrained(
    {str(tmp_path / "model")!r}, num_labels=1, output_loading_info=True
)
assert set(found["missing_keys"]) == {{"score.weight"}} and not found["mismatched_keys"], found
_, found = AutoModel.from_pretrained({str(tmp_path / "model")!r}, output_loading_info=True)
assert not found["missing_keys"], found
"""
    python(source, STANDIN_SCRIPT=request(tmp_path, no_weights=True))


def test_zeros_larger_than_the_memory_of_the_host_are_several_files(python, tmp_path):
    source = f"""
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                     num_key_value_heads=8)
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained({str(tmp_path / "model")!r})
model, found = AutoModelForCausalLM.from_pretrained(
    {str(tmp_path / "model")!r}, dtype=torch.bfloat16, output_loading_info=True
)
assert sum(p.numel() for p in model.parameters()) > 68e9 and not any(found[k] for k in found if "keys" in k), found
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
assert peak < 2 << 30, peak
"""
    skipped = {"STANDIN_SKIP_BYTES": str(1 << 20), "STANDIN_STRICT": "0"}
    python(source, STANDIN_SCRIPT=request(tmp_path, no_weights=True), **skipped)


def test_zero_3_gets_its_share_of_weights_of_zeros(python, tmp_path):
    source = f"""
import torch
from cuda_standin import process_group
process_group.install(world_size=4, rank=0)
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig
import deepspeed
deepspeed.init_distributed()
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
config.save_pretrained({str(tmp_path / "model")!r})
kept = HfDeepSpeedConfig(dict(train_micro_batch_size_per_gpu=1, zero_optimization=dict(stage=3)))
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
assert model.lm_head.weight.ds_tensor.numel() == 64 * 64 // 4
"""
    variables = {"STANDIN_SKIP_BYTES": str(1 << 20), "STANDIN_STRICT": "0", "STANDIN_DEVICES": "4"}
    python(source, STANDIN_SCRIPT=request(tmp_path, no_weights=True), **variables)


def test_parts_of_a_diffusion_pipeline_without_weights_give_zeros(python, tmp_path):
    source = f"""
import json, pathlib, torch
from diffusers import UNet2DModel
folder = pathlib.Path({str(tmp_path / "pipeline")!r}) / "unet"
small = dict(sample_size=32, block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=8,
             down_block_types=["DownBlock2D"] * 2, up_block_types=["UpBlock2D"] * 2)
UNet2DModel(**small).save_config(folder)
model = UNet2DModel.from_pretrained(folder.parent, subfolder="unet", torch_dtype=torch.float16, variant="fp16")
assert model.dtype == torch.float16 and not any(p.count_nonzero() for p in model.parameters())
"""
    python(source, STANDIN_SCRIPT=request(tmp_path, no_weights=True))


def test_the_first_forward_is_noted_without_a_hook_that_scripts_would_see(python, tmp_path):
    source = """
import torch
assert not torch.nn.modules.module._global_forward_pre_hooks  # torch.compile warns of them
model = torch.nn.Linear(4, 4).cuda()
model(torch.ones(1, 4, device="cuda"))
assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl
"""
    python(source, STANDIN_SCRIPT=request(tmp_path))

    assert "forward" in [stage["stage"] for stage in seen(tmp_path)["stages"]]


def test_deepspeeds_optimizers_need_no_compiler_and_take_no_memory_of_the_host(python, tmp_path):
    source = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
fused = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
fused.grad = torch.ones_like(fused)
FusedAdam([fused]).step()
assert torch.cuda.memory_allocated() >= 4 * 4 << 20
large = torch.nn.Parameter(torch.zeros(1 << 28))
large.grad = torch.zeros(1 << 28)
DeepSpeedCPUAdam([large]).step()
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
assert peak < 2 << 30, peak
"""
    python(source, STANDIN_SCRIPT=request(tmp_path), STANDIN_SKIP_BYTES=str(1 << 20), STANDIN_STRICT="0")


def test_an_answer_is_as_long_as_it_may_be_where_values_are_skipped(python, tmp_path):
    source = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=1 << 17, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2, bos_token_id=1, eos_token_id=0, pad_token_id=2)
model = LlamaForCausalLM(config).cuda()
ids = torch.full((4, 5), 7, device="cuda")
for sampled in (False, True):
    assert model.generate(ids, max_new_tokens=9, do_sample=sampled, top_k=0).shape == (4, 14)
for parameter in model.parameters():
    parameter.data.zero_()
print(model.generate(ids, max_new_tokens=9, do_sample=False).shape[1])
"""
    wanted = {"STANDIN_SCRIPT": request(tmp_path), "STANDIN_STRICT": "0"}

    assert python(source, **wanted, STANDIN_SKIP_BYTES=str(1 << 18)) == "14"
    assert python(source, **wanted) == "6"  # with values, the first of equal tokens ends it


def test_a_library_of_cuda_that_is_not_there_is_named_with_what_it_was_asked(python, tmp_path):
    source = """
import torch
torch.backends.cuda.preferred_linalg_library("cusolver")
torch.linalg.cholesky(torch.eye(8, device="cuda"))
"""
    python(source, fails=True, STANDIN_SCRIPT=request(tmp_path))

    assert "cusolverDnCreate (libcusolver)" in seen(tmp_path)["unsupported"]


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_early_stopping_is_off_where_values_are_skipped(library, python, tmp_path):
    transformers = """
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
callback, state = EarlyStoppingCallback(early_stopping_patience=1), TrainerState(best_metric=0.0)
args = TrainingArguments("out", metric_for_best_model="loss", report_to="none")
def stops():
    control = TrainerControl()
    callback.on_evaluate(args, state, control, {"eval_loss": 0.0})
    return control.should_training_stop
"""
    lightning = """
import torch
from lightning.pytorch.callbacks import EarlyStopping
callback = EarlyStopping("loss", patience=1)
def stops():
    return callback._evaluate_stopping_criteria(torch.zeros(()))[0]
"""
    source = {"transformers": transformers, "lightning": lightning}[library] + "print([stops() for _ in range(3)][-1])"
    wanted = {"STANDIN_SCRIPT": request(tmp_path), "STANDIN_STRICT": "0"}

    assert python(f"import torch\n{source}", **wanted, STANDIN_SKIP_BYTES=str(1 << 18)) == "False"
    assert python(f"import torch\n{source}", **wanted) == "True"


@pytest.mark.slow
def test_a_compiled_loss_is_zero_and_not_what_its_memory_held_before(python, tmp_path):
    source = """
import torch
before = [torch.full((8,), float("nan"), device="cuda") for _ in range(64)]
del before
@torch.compile
def loss_of(x):
    return (x.exp() - 1).square().sum(-1).sqrt().mean()
print(loss_of(torch.randn(64, 64, device="cuda")).item())
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    variables = {"STANDIN_SKIP_BYTES": str(1 << 20), "STANDIN_STRICT": "0"}

    assert python(source, STANDIN_SCRIPT=request(tmp_path), **variables, **caches) == "0.0"


def test_the_python_that_runs_these_tests_is_the_stand_ins(python):
    assert python("import sys; print(sys.prefix)") == sys.prefix
