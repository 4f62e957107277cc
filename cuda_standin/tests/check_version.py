"""Whether the installed PyTorch runs on the stand-in: a line for each check. The README's table of versions is made so.

    python cuda_standin/tests/check_version.py             in an environment where the stand-in is enabled
    python cuda_standin/tests/check_version.py memory      the checks of that name, in this process, on STANDIN_GPU

It uses only what PyTorch 2.0 has, or asks whether it is there. A line begins with ``ok``, with ``-`` where this PyTorch
has no such thing, or with ``FAIL``, and then the exit status is 1.
"""

import contextlib
import copy
import inspect
import itertools
import math
import os
import subprocess
import sys
import warnings

import torch
import torch.nn.functional as F

import cuda_standin

GPUS = ("h100", "a100", "v100")
KERNELS = ("flash", "efficient", "math")
# A kernel that one of these GPUs must have in every PyTorch from 2.0 on (V100: not in bf16); others may be refused.
ALWAYS = {("flash", "a100"), *itertools.product(("efficient", "math"), GPUS)}
FLOAT32, BF16 = dict(rtol=1e-5, atol=1e-5), dict(rtol=3e-2, atol=3e-2)
checks = {}


class Absent(Exception):
    """This PyTorch has no such thing; the message says what."""


def check(function):
    checks[function.__name__] = function
    return function


def same(made, expected, **tolerance):
    for a, b in zip(made, expected):
        torch.testing.assert_close(a.detach().cpu().to(b.dtype), b.detach(), **tolerance)


# ---- the device ----
@check
def memory():
    held = torch.empty(1, device="cuda")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved() >> 20) == (512, 2)
    middle = torch.empty(3 << 18, device="cuda")  # 3 MiB: of a segment of 20
    assert (torch.cuda.memory_allocated() - 512 >> 20, torch.cuda.memory_reserved() >> 20) == (3, 22)
    del middle, held
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_allocated() == (3 << 20) + 512
    assert cuda_standin.counters().used_bytes[0] == total - free == 22 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == cuda_standin.counters().used_bytes[0] == 0


@check
def out_of_memory():
    total = torch.cuda.mem_get_info()[1]
    cuda_standin.set_capacity(100)
    try:
        held = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            assert "Tried to allocate 50.00 MiB" in str(error), error
        else:
            raise AssertionError("110 of 100 MiB were handed out")
        del held
        assert torch.empty(90 << 20, dtype=torch.uint8, device="cuda").numel() == 90 << 20
    finally:
        cuda_standin.set_capacity(total >> 20)


@check
def two_streams():
    ones, into, side = torch.ones(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with cuda_standin.run_late("all"):
        torch.mm(ones, ones, out=into)
        with torch.cuda.stream(side):
            early = into * 1
        side.synchronize()
        assert early.sum().item() == 0, "a stream that did not wait has the other's numbers"
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            right = into * 1
        torch.cuda.current_stream().wait_stream(side)
        assert right.sum().item() == 64**3


@check
def events():
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    pinned, ones = torch.zeros(1000, pin_memory=True), torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with cuda_standin.run_late("all"):
        first.record()
        pinned.copy_(ones, non_blocking=True)
        last.record()
        assert pinned.sum() == 0, "a copy that nobody waited for is there"
        last.synchronize()
        assert pinned.sum() == 1000
    assert last.query() and first.elapsed_time(last) >= 0


# ---- values ----
@check
def operators():
    torch.manual_seed(0)
    x, square, image = torch.randn(6, 8), torch.randn(8, 8), torch.randn(2, 4, 9, 9)
    ids, kernel = torch.randint(0, 6, (12,)), torch.randn(4, 4, 3, 3)
    calls = {
        "matrix products": lambda x, w, i, n, k: [x @ w, torch.addmm(w, w, w), torch.bmm(n[:, 0], n[:, 1])],
        "indices": lambda x, w, i, n, k: [F.embedding(i, x), x[i], x.index_add(0, i, x[i]), x.gather(0, i[None, :8])],
        "orders": lambda x, w, i, n, k: [x.sort(1)[0], x.topk(3)[1], x.cumsum(1), x.argmax(1), x.median(1)[0]],
        "sums": lambda x, w, i, n, k: [x.sum(0), x.mean(1), x.var(1), x.norm(), n.amax((2, 3)), x.logsumexp(1)],
        "sizes by values": lambda x, w, i, n, k: [(x > 0).nonzero(), x[x > 0], i.unique(), i.bincount()],
        "norms": lambda x, w, i, n, k: [F.layer_norm(x, (8,)), F.group_norm(n, 2), F.softmax(x, 1)],
        "convolutions": lambda x, w, i, n, k: [F.conv2d(n, k, padding=1), F.conv2d(n, k[:, :1], groups=4)],
        "images": lambda x, w, i, n, k: [F.max_pool2d(n, 3), F.avg_pool2d(n, 2), F.interpolate(n, scale_factor=2.0)],
        "losses": lambda x, w, i, n, k: [F.cross_entropy(x, i[:6]), F.mse_loss(x, x * 2), F.gelu(x), F.silu(x)],
        "shapes": lambda x, w, i, n, k: [torch.cat([x, w]), x.where(x > 0, 1.0), x.repeat(2, 2), w.tril(), n.flip(2)],
        "lists": lambda x, w, i, n, k: torch._foreach_mul([x, w], 2.0) + torch._foreach_sqrt([x.abs(), w.abs()]),
    }  # fmt: skip
    given = (x, square, ids, image, kernel)
    for name, call in calls.items():
        try:
            same(call(*(t.cuda() for t in given)), call(*given), **FLOAT32)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    largest = {getattr(torch, n): 2**w - 1 for n, w in (("uint8", 8), ("uint64", 64)) if hasattr(torch, n)}
    for dtype, number in (largest | {torch.int64: -(2**63)}).items():
        assert torch.tensor([number], dtype=dtype).cuda().item() == number, f"item() of {dtype}"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(11, 32), torch.nn.LayerNorm(32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 11))

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = (t.unflatten(2, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.mlp(x)


def step(model, ids, autocast=None):
    with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
        out = model(ids[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), ids[:, 1:].flatten())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))], out.dtype


def model_and_ids():
    torch.manual_seed(0)
    return Block(), torch.randint(0, 11, (3, 10))


@check
def model_in_float32():
    model, ids = model_and_ids()
    expected, _ = step(model, ids)
    same(step(model.cuda(), ids.cuda())[0], expected, **FLOAT32)


@check
def model_in_bf16():
    model, ids = model_and_ids()
    expected, _ = step(model, ids)
    try:
        made, dtype = step(model.cuda().bfloat16(), ids.cuda())
    except RuntimeError as error:
        if os.environ.get("STANDIN_GPU") != "v100" or "no kernel found to launch" not in str(error):
            raise
        raise Absent("PyTorch chooses a kernel of attention that it does not have for v100") from error
    assert dtype == torch.bfloat16
    same(made, expected, **BF16)


@check
def autocast():
    model, ids = model_and_ids()
    expected, _ = step(model, ids)
    made, dtype = step(model.cuda(), ids.cuda(), torch.float16)
    assert dtype == torch.float16 and all(t.dtype == torch.float32 for t in made)
    same(made, expected, **BF16)


def forced(kernel):
    """PyTorch may use this kernel of attention only; it raises where it cannot."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.backends.cuda.sdp_kernel(**{
                f"enable_{name}": name[:4] == kernel[:4] for name in ("flash", "mem_efficient", "math")
            } | {"enable_mem_efficient": kernel == "efficient"})  # fmt: skip
    return sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
                        "math": SDPBackend.MATH}[kernel])  # fmt: skip


def definition(q, k, v, causal):
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -math.inf)
    return scores.softmax(3) @ v


def attention(kernel, dtype):
    gpu = os.environ.get("STANDIN_GPU", "h100")
    if kernel == "flash" and dtype == torch.float32:
        raise Absent("flash attention is for half types")
    for causal, width in itertools.product([False, True], [16, 64]):
        torch.manual_seed(0)
        leaves = [torch.randn(2, 3, 17, width).to(dtype).requires_grad_() for _ in range(3)]
        grad = torch.randn(2, 3, 17, width).to(dtype)
        wide = [t.detach().float().requires_grad_() for t in leaves]
        out = definition(*wide, causal)
        expected = [out, *torch.autograd.grad(out, wide, grad.float())]
        here = [t.detach().cuda().requires_grad_() for t in leaves]
        name = f"aten::_{kernel}_attention_forward"
        before = cuda_standin.report().calls.get(name, 0)
        with forced(kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why it refuses a kernel
            try:
                out = F.scaled_dot_product_attention(*here, is_causal=causal)
            except RuntimeError as error:
                always = (kernel, gpu) in ALWAYS and not (gpu == "v100" and dtype == torch.bfloat16)
                if always or "kernel" not in str(error):
                    raise
                raise Absent(f"PyTorch has no such kernel for {gpu}") from error
        assert cuda_standin.report().calls.get(name, 0) == before + (kernel != "math"), "another kernel ran"
        same([out, *torch.autograd.grad(out, here, grad.cuda())], expected,
             **(FLOAT32 if dtype == torch.float32 else BF16))  # fmt: skip


for _kernel, _dtype in itertools.product(KERNELS, (torch.float32, torch.float16, torch.bfloat16)):
    checks[f"attention_{_kernel}_{str(_dtype)[6:]}"] = lambda k=_kernel, d=_dtype: attention(k, d)


@check
def dropout():
    x = torch.ones(1000, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second) and 400 < (first > 0).sum().item() < 600
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, F.dropout(x, 0.5)), "the same state draws another mask"
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], first.detach()), "backward has another mask"


def attention_with_dropout(kernel):
    torch.cuda.manual_seed(0)
    q = torch.randn(2, 2, 8, 16, device="cuda", dtype=torch.float16)
    v = torch.eye(8, 16, device="cuda", dtype=torch.float16).expand(2, 2, 8, 16).clone().requires_grad_()
    with forced(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            raise Absent("PyTorch has no dropout in this kernel here") from error
    weights = out.detach()[..., :8]  # of each query, since the values are unit vectors
    grad = torch.autograd.grad(out.sum(), v)[0]
    assert 0.2 < (weights == 0).float().mean().item() < 0.8
    same([grad[..., 0]], [weights.float().sum(2).cpu()], **BF16)


for _kernel in KERNELS:
    checks[f"attention_{_kernel}_dropout"] = lambda k=_kernel: attention_with_dropout(k)


def optimizer(**options):
    if not options.keys() <= inspect.signature(torch.optim.AdamW).parameters.keys():
        raise Absent(f"AdamW has no {', '.join(options)} here")
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    there, x = copy.deepcopy(here).cuda(), torch.randn(5, 8)
    for model, given, chosen in ((here, x, {}), (there, x.cuda(), options)):
        made = torch.optim.AdamW(model.parameters(), lr=0.1, **chosen)
        for _ in range(3):
            made.zero_grad()
            model(given).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            made.step()
    same(there.parameters(), list(here.parameters()), rtol=1e-4, atol=1e-5)


for _options in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"foreach": True, "capturable": True}):
    checks["_".join(["adamw", *(f"{k}_{v}" for k, v in _options.items())])] = lambda o=_options: optimizer(**o)


@check
def gradient_scaler():
    weight = torch.ones(8, device="cuda", requires_grad=True)
    made, scaler = torch.optim.SGD([weight], lr=1.0), torch.cuda.amp.GradScaler(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(made)
    scaler.update()
    assert weight.tolist() == [0.0] * 8
    weight.grad = torch.full_like(weight, math.inf)
    scaler.scale(weight.sum())
    scaler.step(made)
    scaler.update()
    assert weight.tolist() == [0.0] * 8 and scaler.get_scale() == 2.0


@check
def graph():
    given, captured = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        made = (given * 3 + 1).relu_()
    for value in (2.0, 5.0):
        given.fill_(value)
        assert made[0].item() != 3 * value + 1, "a captured kernel ran without a replay"
        captured.replay()
        assert made.tolist() == [3 * value + 1] * 8


@check
def training_step_in_a_graph():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4).cuda(), torch.randn(5, 8, device="cuda")
    expected = [g.cpu() for g in torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # a capture wants kernels that have run before
        model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        model(x).square().sum().backward()
    captured.replay()
    same([p.grad for p in model.parameters()], expected, **FLOAT32)


@check
def expandable_segments():
    try:
        torch.cuda.init()
        a = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        if "Unrecognized" not in str(error):
            raise
        raise Absent("the allocator has no such setting") from error
    assert torch.cuda.memory_reserved() >> 20 == 40
    held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    del a
    c = torch.empty(31 << 20, dtype=torch.uint8, device="cuda").fill_(7)
    assert torch.cuda.memory_reserved() >> 20 == 100 and c.sum().item() == 7 * (31 << 20)
    del held


@check
def device():
    properties = torch.cuda.get_device_properties(0)
    expected = {"h100": (9, 0, 132, 81079), "a100": (8, 0, 108, 81153), "v100": (7, 0, 80, 16160)}
    made = (properties.major, properties.minor, properties.multi_processor_count, properties.total_memory >> 20)
    assert made == expected[os.environ.get("STANDIN_GPU", "h100")], made


@check
def every_operator_had_values():
    without = cuda_standin.report().without_values
    assert not without, without


def run(names):
    """Runs these checks in this process; returns how many failed."""
    failed = 0
    label = " ".join(filter(None, [os.environ.get("STANDIN_GPU"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF")]))
    for name in names:
        line = f"{name}{f' ({label})' if label else ''}"
        try:
            checks[name]()
        except Absent as reason:
            print(f"-     {line}: {reason}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {line}: {type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
        else:
            print(f"ok    {line}", flush=True)
    return failed


def elsewhere(names, **variables):
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, env=os.environ | variables, text=True, stdout=subprocess.PIPE)
    print(done.stdout, end="", flush=True)
    if len(done.stdout.splitlines()) != len(names):
        print(f"FAIL  {' '.join(names)} {variables}: the process ended with {done.returncode}", flush=True)
        return 1
    return done.stdout.count("FAIL  ")


def main(names):
    warnings.filterwarnings("ignore", message=".*is not compatible with the current PyTorch.*", category=UserWarning)
    if names:
        return min(run(names), 1)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    of_gpu = [name for name in checks if name.startswith(("attention_", "model_"))]
    alone = [*of_gpu, "device", "expandable_segments", "every_operator_had_values"]
    failed = run([name for name in checks if name not in alone] + ["every_operator_had_values"])
    failed += elsewhere(["expandable_segments"], PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    for gpu in GPUS:
        failed += elsewhere(["device", *of_gpu, "every_operator_had_values"], STANDIN_GPU=gpu)
    print(f"{failed} failed", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
