"""Work that runs as late as events allow: what forgets to wait reads what was there before."""

import weakref

import pytest

import cuda_standin

torch = pytest.importorskip("torch")


@pytest.fixture
def ones():
    x = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    return x


@pytest.mark.parametrize("which", ["default", "all"])
def test_a_stream_that_does_not_wait_for_the_default_one_reads_old_numbers(which, ones):
    side, into = torch.cuda.Stream(), torch.zeros(256, 256, device="cuda")
    with cuda_standin.run_late(which):
        made = torch.mm(ones, ones, out=into)
        with torch.cuda.stream(side):
            late = made * 1
        side.synchronize()
        assert late.sum().item() == 0
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            right = made * 1
        side.synchronize()
        assert right.sum().item() == 256**3


@pytest.mark.parametrize("which", ["side", "all"])
def test_the_default_stream_that_does_not_wait_for_a_side_stream_reads_old_numbers(which, ones):
    side, into = torch.cuda.Stream(), torch.zeros(256, 256, device="cuda")
    torch.cuda.synchronize()
    with cuda_standin.run_late(which):
        with torch.cuda.stream(side):
            torch.mm(ones, ones, out=into)
        assert (into * 1).sum().item() == 0
        torch.cuda.current_stream().wait_stream(side)
        assert (into * 1).sum().item() == 256**3


def test_memory_that_is_used_again_too_early_has_other_numbers(ones):
    side = torch.cuda.Stream()

    def read_on_the_side(record):
        big = torch.full((1 << 20,), 3.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = big * 1
        if record:
            big.record_stream(side)
        del big
        again = torch.full((1 << 20,), 5.0, device="cuda")  # takes the same block, unless it was recorded
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert again[0].item() == 5
        return copy[0].item()

    with cuda_standin.run_late("side"):
        assert read_on_the_side(record=False) == 5
        assert read_on_the_side(record=True) == 3


def test_a_copy_to_the_host_that_nobody_waits_for_is_not_there(ones):
    pinned = torch.zeros(256, 256, pin_memory=True)
    with cuda_standin.run_late("default"):
        pinned.copy_(ones, non_blocking=True)
        assert pinned.sum() == 0
        torch.cuda.synchronize()
        assert pinned.sum() == 256**2


def test_late_copies_alone_leave_kernels_where_they_are(ones):
    side, into = torch.cuda.Stream(), torch.zeros(256, 256, device="cuda")
    pinned = torch.zeros(256, 256, pin_memory=True)
    torch.cuda.synchronize()
    with cuda_standin.run_late("copies"), torch.cuda.stream(side):
        torch.mm(ones, ones, out=into)
        assert into.view(-1).tolist()[0] == 256
        pinned.copy_(ones, non_blocking=True)
        assert pinned.sum() == 0
        side.synchronize()
        assert pinned.sum() == 256**2


@pytest.mark.parametrize("which", ["copies", "side", "default", "all"])
def test_a_training_step_is_the_same_however_late(which):
    def step():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 32, device="cuda")
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item(), *(p.sum().item() for p in model.parameters())]

    plain = step()
    with cuda_standin.run_late(which):
        assert step() == plain


def test_what_attention_keeps_on_the_host_is_as_at_once_and_goes_when_the_step_lets_go():
    def step():
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 32, 16, device="cuda", requires_grad=True) for _ in range(3))
        made = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.5, False)
        gradients = torch.autograd.grad(made[0].square().sum(), [q, k, v])
        return [made[0].detach().cpu(), *(g.cpu() for g in gradients)]

    at_once = step()
    with cuda_standin.run_late("all"):
        assert all(map(torch.equal, step(), at_once))
        q = torch.ones(1, 1, 8, 8, device="cuda")
        made = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.5, False)
        storages = [weakref.ref(t.untyped_storage()) for t in made]
        del made
        assert [storage() for storage in storages] == [None] * 4


def test_an_operator_whose_result_has_a_size_by_values_waits(ones):
    with cuda_standin.run_late("all"):
        x = torch.zeros(100, device="cuda")
        x[17] = 1
        assert torch.nonzero(x * 2).item() == 17


def test_a_graph_replays_what_was_captured():
    given = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = (given * 3 + 1).relu_()
    given.fill_(2)
    assert made[0].item() != 7
    graph.replay()
    assert made.tolist() == [7.0] * 8
    given.fill_(5)
    graph.replay()
    assert made.tolist() == [16.0] * 8
