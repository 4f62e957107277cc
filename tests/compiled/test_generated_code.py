"""Peaks are read from generated code as Python would run it: by references, in the order of its lines."""

import pytest
import torch

from lowtide.compiled.generated_code import BufferSpec, InputMemory, Prices, UnreadableCodeError, read_code

KIB = BufferSpec((256,), (1,), torch.float32)
HEAD = """
class Runner:
    def call(self, args):
        x, y = args
        args.clear()
"""


def read(body, *, x_bytes=0, y_bytes=0, same_memory=False):
    inputs = {"x": InputMemory(KIB, "x", x_bytes), "y": InputMemory(KIB, "x" if same_memory else "y", y_bytes)}
    return read_code(HEAD + "".join(f"        {line}\n" for line in body), inputs)


def test_a_buffer_counts_from_its_allocation_to_its_deletion():
    memory = read(
        [
            "buf0 = empty_strided_cpu((1024, ), (1, ), torch.float32)",
            "buf1 = empty_strided_cpu((256, ), (1, ), torch.float32)",
            "cpp_fused_add_0(x, buf0, buf1)",
            "del buf0",
            "buf2 = empty_strided_cpu((512, ), (1, ), torch.bfloat16)",
            "return (buf2, buf1, x, )",
        ]
    )

    assert memory.peak_bytes == 4096 + 1024
    assert memory.end_bytes == 1024 + 1024
    assert [memory.block_bytes[b] for b in memory.returned[:2]] == [1024, 1024]
    assert memory.returned[2] == "x"


def test_a_buffer_that_another_takes_over_counts_once():
    memory = read(
        [
            "buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)",
            "buf1 = reinterpret_tensor(buf0, (16, 16), (16, 1), 0); del buf0  # reuse",
            "return (buf1, )",
        ]
    )

    assert memory.peak_bytes == memory.end_bytes == 1024


def test_sizes_are_computed_as_python_does():
    """Where sizes change, code computes them, and kernels' grids from them."""
    memory = read(
        [
            "xnumel = max(1, math.ceil(256 / 3)) * min(4, abs(-8))",
            "buf0 = empty_strided_cpu((int(xnumel), ), (1, ), torch.float32)",
            "return (buf0, )",
        ]
    )

    assert memory.peak_bytes == 86 * 4 * 4


def test_an_accelerators_buffers_are_blocks_and_its_kernels_are_run():
    body = [
        "with torch.xpu._DeviceGuard(0):",
        "    torch.xpu.set_device(0)",
        "    x = copy_if_misaligned(x)",
        "    buf0 = empty_strided_xpu((100, ), (1, ), torch.float32)",
        "    workspace_0 = empty_strided_xpu((1000, ), (1, ), torch.uint8)",
        "    workspace_0.zero_()",
        "    raw_stream0 = get_raw_stream(0)",
        "    triton_poi_fused_add_0.run(x, workspace_0, buf0, 100, stream=raw_stream0)",
        "    del workspace_0",
        "    buf1 = torch.ops.aten.full.default([10], 1.0, dtype=torch.float32, device=device(type='xpu', index=0))",
        "return (buf0, buf1, )",
    ]
    inputs = {"x": InputMemory(KIB, "x", 0), "y": InputMemory(KIB, "y", 0)}
    memory = read_code(HEAD + "".join(f"        {line}\n" for line in body), inputs, device_type="xpu")

    assert (memory.peak_bytes, memory.end_bytes) == (512 + 1024, 512 + 512)
    with pytest.raises(UnreadableCodeError, match=r"torch\.xpu"):
        read(body)  # code of another device than the layer's


def test_a_number_is_copied_from_the_host():
    """As Inductor writes it where a layer takes a tensor on the CPU, such as the window of gpt-oss."""
    body = ["buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)", "buf0.copy_(x, False)", "return (buf0, )"]
    source = HEAD + "".join(f"        {line}\n" for line in body)
    inputs = {"x": InputMemory(KIB, "x"), "y": InputMemory(KIB, "y")}
    memory = read_code(source, inputs, prices=Prices(float, lambda *call: 0.0))

    assert (memory.peak_bytes, memory.end_bytes, memory.ms) == (1024, 1024, 2048.0)


def test_an_input_goes_when_the_code_lets_go_of_it_and_not_before():
    late = ["buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)", "del x", "return (buf0, )"]
    early = ["del x", "buf0 = empty_strided_cpu((256, ), (1, ), torch.float32)", "return (buf0, )"]

    assert read(late, x_bytes=1024).peak_bytes == 1024
    assert read(early, x_bytes=1024).peak_bytes == 0
    assert read(early, x_bytes=1024).end_bytes == 0
    assert read(early, x_bytes=1024, same_memory=True).peak_bytes == 1024  # ``y`` still shows that memory


def test_the_tuple_of_a_call_holds_all_its_results():
    call = "buf0 = torch.ops.aten.var_mean.correction(x, [0], correction=0, keepdim=False)"
    parts = [call, "buf1 = buf0[0]", "buf2 = buf0[1]", "del buf2"]

    assert read([*parts, "return (buf1, buf0[1], )"]).end_bytes == 8
    assert read([*parts, "del buf0", "return (buf1, )"]).end_bytes == 4


def test_partial_sums_that_a_kernel_leaves_in_its_workspace_are_added_up():
    """As Inductor writes it for the weights of norms, where one kernel makes sums of both orders."""
    rows = "workspace_0[1 * (64) * (256) : (1 + 1) * (64) * (256)]"
    body = [
        "workspace_0 = empty_strided_cpu((32768, ), (1, ), torch.float32)",
        "triton_per_fused_sum_4.run(x, y, workspace_0, 2, 256)",
        f"buf0 = {rows}.view(64, 256).sum(dim=0).view([1, 1, 256]).to(torch.bfloat16)",
        "buf1 = workspace_0[0:512].view(2, 256).sum(dim=0).to(torch.float32)",
        "del workspace_0",
        "return (buf0, buf1, )",
    ]
    memory = read(body)

    assert memory.peak_bytes == 4 * 32768 + 1024 + 512, "the sum in float32, which is then rounded"
    assert memory.end_bytes == 512 + 1024 and [memory.block_bytes[b] for b in memory.returned] == [512, 1024]


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = alloc_from_pool(pool, 0, torch.float32, (256,), (1,))",
        "buf0 = torch.empty(256)",
        "buf0 = x.cumsum(0)",
        "buf0 = y[7][1][1]",
        "buf0 = torch.ops.aten.no_such_operator.default(x)",
    ],
)
def test_a_line_of_unknown_memory_is_refused_by_name(line):
    with pytest.raises(
        UnreadableCodeError,
        match=r"alloc_from_pool|torch\.empty|no_such_operator|Tensor\.cumsum|form that is not known",
    ):
        read([line, "return (buf0, )"])


def test_a_number_among_the_inputs_is_refused():
    with pytest.raises(UnreadableCodeError, match="takes the number 'y', which is no size"):
        read_code(HEAD + "        return (x, )\n", {"x": InputMemory(KIB, "x"), "y": InputMemory(None, "y")})


def test_workspace_of_a_call_counts_for_a_moment():
    source = HEAD + "        buf0 = torch.ops.aten.exp.default(x)\n        return (buf0, )\n"

    memory = read_code(source, {"x": InputMemory(KIB, "x"), "y": InputMemory(KIB, "y")}, lambda *call: 500)

    assert (memory.peak_bytes, memory.end_bytes) == (1524, 1024)


def test_kernels_cost_by_the_bytes_of_their_buffers_and_calls_by_what_they_are_and_make():
    body = [
        "buf0 = empty_strided_xpu((512, ), (1, ), torch.float32)",
        "triton_poi_fused_add_0.run(x, x, buf0, 512, stream=0)",  # 1 KiB read, 2 KiB written
        "buf1 = empty_strided_xpu((1, 1), (1, 1), torch.float32)",
        "extern_kernels.mm(reinterpret_tensor(x, (1, 256), (256, 1), 0), reinterpret_tensor(y, (256, 1), (1, 1), 0), "
        "out=buf1)",
        "buf2 = torch.ops.aten.exp.default(buf0)",
        "return (buf1, buf2, )",
    ]
    called = []

    def call_ms(target, args, kwargs, made_bytes):
        called.append((target.__name__, made_bytes))
        return 1000.0

    inputs = {"x": InputMemory(KIB, "x", 0), "y": InputMemory(KIB, "y", 0)}
    source = HEAD + "".join(f"        {line}\n" for line in body)
    memory = read_code(source, inputs, device_type="xpu", prices=Prices(float, call_ms))

    assert memory.ms == 3 * 1024 + 2 * 1000.0
    assert called == [("mm", 4), ("exp.default", 2048)]
    assert read_code(source, inputs, device_type="xpu").ms == 0.0
    two = source.replace("out=buf1)", "out=(buf1, buf1))")
    assert read_code(two, inputs, device_type="xpu").peak_bytes == memory.peak_bytes, "a call may write several"
