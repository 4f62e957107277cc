"""``lowtide.checkpoint``: the plain call's gradients, torch's peak, and none of the traps of running Python again."""

import random
import weakref
from functools import partial

import pytest
import torch
from support.unseen_memory import memory_of
from support.watched_training import Layered, batch_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torchs

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.module_calls import thread_state
from lowtide.step.operators import tensors_in
from lowtide.tape.online import dropping

WIDTH, ROWS = 64, 128


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


torchs = partial(torchs, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.calls = nn.Dropout(0.2), 0

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x():
    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(1), requires_grad=True
    )


def gradients(call, function, *inputs, parameters=(), seed=3):
    """Output and gradients of a step that runs ``function`` by ``call``."""
    leaves = [*(i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad), *parameters]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(seed)
    out = call(function, *inputs)
    out.square().mean().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def equal(a, b):
    assert len(a) == len(b) > 1
    return all((s is t is None) or torch.equal(s, t) for s, t in zip(a, b, strict=True))


def assert_as_plain(function, *inputs, parameters=()):
    expected = gradients(plain, function, *inputs, parameters=parameters)
    assert any(g is not None and g.abs().max() > 0 for g in expected[1:])
    assert equal(gradients(lowtide.checkpoint, function, *inputs, parameters=parameters), expected)


class MadeStorages(TorchDispatchMode):
    """The storages that ops inside have made."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.made[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result


def bytes_that_stay(call, *inputs):
    """What lives of what a call has made, beside its output, while that lives."""
    with MadeStorages() as storages:
        output = call(*inputs)
    del storages.made[output.untyped_storage()._cdata]
    return sum(size for storage, size in storages.made.values() if storage() is not None)


# -- what is promised -----------------------------------------------------------------------------------------


def test_gradients_are_the_plain_calls_bit_by_bit(block, x):
    assert_as_plain(block, x, parameters=list(block.parameters()))


def test_peak_is_that_of_torchs_checkpoint(x):
    blocks = [Block() for _ in range(6)]

    def step(call):
        h = x
        for block in blocks:
            h = call(block, h)
        h.square().mean().backward()

    for call in (plain, torchs, lowtide.checkpoint):
        step(call)  # gradients are there, ops are proven
    peaks = {call: peak_bytes(partial(step, call)) for call in (plain, torchs, lowtide.checkpoint)}

    assert peaks[lowtide.checkpoint] <= 1.02 * peaks[torchs] < 0.6 * peaks[plain]


def test_nothing_made_inside_stays_after_the_call(block, x):
    assert bytes_that_stay(block, x) > 9 * x.nbytes  # 10 where dropout keeps its mask as floats, as on a CPU
    assert bytes_that_stay(partial(lowtide.checkpoint, block), x) == 0


def test_an_output_that_is_kept_pins_nothing():
    big = torch.randn(1000, 1000, requires_grad=True)
    inner = big * 2
    reference = weakref.ref(inner.untyped_storage())
    kept = lowtide.checkpoint(lambda t: torch.tanh(t), inner).detach()
    del inner

    assert reference() is None
    assert kept.shape == (1000, 1000)


def test_each_kind_of_op_is_proven_once_in_a_process(block, x, monkeypatch):
    proofs = []
    gives = dropping.DroppingTape._gives_same_bits_again

    def counted(tape, recipe):
        proofs.append(recipe.name)
        return gives(tape, recipe)

    monkeypatch.setattr(dropping.DroppingTape, "_gives_same_bits_again", counted)
    monkeypatch.setattr(dropping, "_gives_same_bits", {})
    gradients(lowtide.checkpoint, block, x)
    first = len(proofs)
    gradients(lowtide.checkpoint, block, x)

    assert first > 5
    assert len(proofs) == first


def test_an_op_that_gives_other_bits_is_saved(x, monkeypatch):
    monkeypatch.setattr(dropping, "_gives_same_bits", {})
    monkeypatch.setattr(dropping, "same_storage_bits", lambda a, b: False)

    def function(t):
        return (t * 2).tanh().exp()

    assert bytes_that_stay(partial(lowtide.checkpoint, function), x) == bytes_that_stay(function, x) == x.nbytes
    assert_as_plain(function, x)


# -- traps of torch's checkpoint, which runs the function again in backward -----------------------------------


def test_trap_the_function_runs_twice(block, x):
    gradients(torchs, block, x)
    assert block.calls == 2
    block.calls = 0
    fired = []
    block.register_forward_hook(lambda *_: fired.append(1))

    gradients(lowtide.checkpoint, block, x)

    assert (block.calls, len(fired)) == (1, 1)


def test_trap_state_that_changes_before_backward_changes_gradients(x):
    scale = [2.0]

    def function(t):
        return (t * scale[0]).exp()

    expected = gradients(plain, function, x)
    x.grad = None
    out = lowtide.checkpoint(function, x)
    scale[0] = 3.0
    out.square().mean().backward()

    assert torch.equal(x.grad, expected[1])


def test_trap_pythons_generator_takes_another_branch(x):
    def function(t):
        return (t.tanh() if random.random() < 0.5 else t.sigmoid() * 2).exp()

    for seed in range(4):
        random.seed(seed)
        expected = gradients(plain, function, x)
        random.seed(seed)
        assert equal(gradients(lowtide.checkpoint, function, x), expected)


def test_trap_dropout_without_preserve_rng_state(block, x):
    expected = gradients(plain, block, x)

    assert not equal(gradients(partial(torchs, preserve_rng_state=False), block, x), expected)
    assert equal(gradients(partial(lowtide.checkpoint, preserve_rng_state=False), block, x), expected)


def test_random_numbers_after_the_call_and_after_backward_are_the_plain_steps(block, x):
    drawn = []
    for call in (plain, lowtide.checkpoint):
        torch.manual_seed(5)
        out = call(block, x)
        between = torch.rand(3)
        out.sum().backward()
        drawn.append((between, torch.rand(3)))

    assert all(map(torch.equal, *drawn))


def test_trap_batchnorm_statistics_move_twice(x):
    moved = []
    for call in (plain, lowtide.checkpoint, torchs):
        norm = nn.BatchNorm1d(WIDTH)
        found = gradients(call, nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False), norm), x)
        moved.append([norm.running_mean, norm.running_var, norm.num_batches_tracked])
        assert found[1] is not None

    assert moved[0][2] == moved[1][2] == 1
    assert moved[2][2] == 2


def test_batchnorm_is_bitwise_plain(x):
    results = []
    for call in (plain, lowtide.checkpoint):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
        results.append([*gradients(call, net, x, parameters=list(net.parameters())), *net.buffers()])

    assert equal(*results)


def test_trap_a_cache_is_appended_to_twice(x):
    cache = []

    def attend(t):
        cache.append(t * 2)
        keys = torch.cat(cache)
        return torch.softmax(t @ keys.T, -1) @ keys

    with pytest.raises(CheckpointError):
        torchs(attend, x).sum().backward()
    assert len(cache) == 2

    del cache[:]
    expected = gradients(plain, attend, x)
    del cache[:]
    assert equal(gradients(lowtide.checkpoint, attend, x), expected)
    assert len(cache) == 1


def test_trap_a_cache_that_is_written_in_place_gives_other_gradients():
    """Each call writes its rows into one buffer and reads those so far; a second run would find later rows."""

    def run(call):
        torch.manual_seed(0)
        weight = torch.randn(8, 8, requires_grad=True)
        buffer = torch.zeros(4, 8)

        def step(t, at):
            buffer[at] = t.detach().mean(0)
            return (t @ weight + buffer.sum(0)).tanh()

        h = torch.randn(5, 8)
        for at in range(4):
            h = call(step, h, at)
        h.sum().backward()
        return [h.detach(), weight.grad]

    try:
        found = run(lowtide.checkpoint)
    except lowtide.ReplayError as error:
        assert "changed in place afterwards" in str(error)
    else:
        assert equal(found, run(plain))
    assert not equal(run(torchs), run(plain))


def test_trap_what_the_function_closes_over_is_changed_in_place_before_backward(x):
    """Torch computes gradients from the changed tensor and says nothing."""

    def step(call):
        x.grad = None
        h = x * 1
        out = call(lambda: (h * 2).exp())
        h.detach().add_(1)
        out.sum().backward()
        return x.grad

    expected = step(plain)
    assert not torch.equal(step(torchs), expected)
    with pytest.raises(lowtide.ReplayError, match="changed in place afterwards"):
        step(lowtide.checkpoint)


def test_trap_memory_changed_unseen_is_an_error_before_any_number(x, monkeypatch):
    monkeypatch.setattr(dropping, "_SEAL_EVERY", 1)
    out = lowtide.checkpoint(lambda t: (t * 2).exp(), x)
    memory_of(x)[0] += 1
    with pytest.raises(lowtide.ReplayError, match="gives other bits than in the forward pass"):
        out.sum().backward()
    assert x.grad is None


def test_memory_that_is_taken_away_is_an_error():
    source = torch.randn(64, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    out = lowtide.checkpoint(lambda: (source * 2 @ weight).exp())
    source.untyped_storage().resize_(0)
    with pytest.raises(lowtide.ReplayError, match="freed afterwards"):
        out.sum().backward()


def test_trap_reentrant_needs_an_input_that_requires_gradients(block):
    data = torch.randn(ROWS, WIDTH)
    found = gradients(partial(lowtide.checkpoint, use_reentrant=True), block, data, parameters=list(block.parameters()))

    assert equal(found, gradients(plain, block, data, parameters=list(block.parameters())))


def test_trap_autocast_around_backward_or_left_before_it(x):
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def function(t):
        return torch.tanh(t @ weight) @ weight

    results = []
    for call in (plain, lowtide.checkpoint):
        for around_backward in (False, True):
            x.grad = weight.grad = None
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                out = call(function, x)
            with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=around_backward):
                out.float().square().mean().backward()
            results.append([out.detach(), x.grad, weight.grad])
            assert out.dtype == torch.bfloat16

    assert equal(results[0], results[2])
    assert equal(results[1], results[3])


def test_autocast_inside(x):
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def function(t):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return (torch.tanh(t @ weight) @ weight).float()

    assert_as_plain(function, x, parameters=[weight])


def test_trap_an_exception_inside_leaves_nothing_behind(x):
    def fails(t):
        t.exp()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowtide.checkpoint(fails, x)

    assert thread_state.observer is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_as_plain(torch.exp, x)


# -- as torch's own tests have it -----------------------------------------------------------------------------


def test_keyword_arguments_and_outputs_of_any_kind(x):
    class Found:
        def __init__(self, value):
            self.value = value

    def function(t, n, *, scale, extra=None):
        return {"out": (t * scale).exp(), "n": n, "found": Found([t.tanh()]), "none": extra}

    def call(_, t):
        found = lowtide.checkpoint(function, t, 7, scale=2.0)
        assert found["n"] == 7
        assert found["none"] is None
        return found["out"] + found["found"].value[0]

    expected = gradients(lambda _, t: (t * 2.0).exp() + t.tanh(), None, x)
    assert equal(gradients(call, None, x), expected)


def test_part_of_the_outputs_is_used_and_detached_outputs(x):
    def function(t):
        a = (t * 2).exp()
        return a, a.detach() * 3, t.tanh()

    for used in range(3):

        def use(f, t, used=used):
            out = f(t)
            return out[used] + t if used != 1 else out[1] * t

        assert_as_plain(lambda t, use=use: use(function, t), x)
        expected = gradients(use, function, x)
        assert equal(gradients(use, partial(lowtide.checkpoint, function), x), expected)


def test_without_gradients_it_is_the_plain_call(block):
    data = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        assert not lowtide.checkpoint(block, data).requires_grad
    torch.manual_seed(0)
    frozen = Block().requires_grad_(False).eval()
    assert torch.equal(lowtide.checkpoint(frozen, data), frozen(data))


def test_parts_without_gradients_inside(x):
    def function(t):
        with torch.no_grad():
            mask = (t > 0).float() * 2
        return (t * mask).exp()

    assert_as_plain(function, x)


def test_in_place_ops_inside(x):
    def function(t):
        u = t * 2
        v = u.exp()  # stores its result
        u.add_(1)
        w = nn.functional.relu(v + u, inplace=True)
        return w * 3 + torch.zeros_like(w).copy_(v)

    assert_as_plain(function, x)


def replays_of(function, x, monkeypatch):
    """Kernels that run again in a backward."""
    lowtide.checkpoint(function, x)  # proofs
    replayed = []
    run = dropping.Recipe.run
    out = lowtide.checkpoint(function, x)
    monkeypatch.setattr(dropping.Recipe, "run", lambda recipe, made: replayed.append(recipe.name) or run(recipe, made))
    out.sum().backward()
    return replayed


def test_what_cannot_be_made_again_is_held_where_it_is_smaller(x, monkeypatch):
    def function(t):
        row = t.sum(1, keepdim=True) * 1
        row.exp()
        row.add_(1)
        return (row * torch.ones(1, WIDTH)).exp()

    assert bytes_that_stay(partial(lowtide.checkpoint, function), x) < x.nbytes
    assert_as_plain(function, x)
    assert "aten.exp.default" in replays_of(function, x, monkeypatch)


def test_what_would_pin_as_much_as_it_frees_is_saved(x, monkeypatch):
    def function(t):
        whole = t * 2
        whole.exp()
        whole.add_(1)
        return whole.exp()

    assert_as_plain(function, x)
    assert replays_of(function, x, monkeypatch) == []


def test_a_write_that_plain_autograd_refuses_is_refused(x):
    def function(t):
        u = t.exp()
        u.add_(1)
        return u

    for call in (plain, lowtide.checkpoint):
        out = call(function, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_backward_over_a_retained_graph_gives_the_same_again_and_keeps_nothing(x):
    def run(call):
        x.grad = None
        out = call(lambda t: ((t * 2).tanh() * t).exp(), x)
        loss = out.sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        return [out.detach(), x.grad], loss

    expected, _ = run(plain)
    found, loss = run(lowtide.checkpoint)

    assert equal(found, expected)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_after_a_backward_that_retains_the_graph_what_it_made_is_gone(block, x):
    def step(call, t):
        loss = call(block, t).sum()
        loss.backward(retain_graph=True)
        return loss

    for call in (plain, lowtide.checkpoint):
        step(call, x)  # gradients are there
    assert bytes_that_stay(partial(step, plain), x) > 9 * x.nbytes
    assert bytes_that_stay(partial(step, lowtide.checkpoint), x) < 2 * x.nbytes


def test_gradients_of_gradients(x):
    def run(call):
        out = call(lambda t: (t * 2).tanh().exp(), x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), second]

    assert equal(run(lowtide.checkpoint), run(plain))


def test_autograd_grad_inside_the_function(x):
    def function(t):
        u = t * 2
        (inner,) = torch.autograd.grad(u.exp().sum(), u, create_graph=True)
        return inner * t

    assert_as_plain(function, x)


def test_backward_to_some_inputs_only(block, x):
    for call in (plain, lowtide.checkpoint):
        x.grad = None
        torch.manual_seed(0)
        call(block, x).sum().backward(inputs=[x])
        assert all(p.grad is None for p in block.parameters())
    assert x.grad is not None


def test_two_calls_of_one_function_and_one_backward(block, x):
    def twice(call, t):
        return call(block, call(block, t))

    torch.manual_seed(3)
    expected = gradients(lambda _, t: twice(plain, t), None, x, parameters=list(block.parameters()))
    assert equal(
        gradients(lambda _, t: twice(lowtide.checkpoint, t), None, x, parameters=list(block.parameters())), expected
    )


def test_only_what_backward_needs_runs_again(x, monkeypatch):
    """Torch's early stop, for every op and not for the end alone."""

    def function(t):
        u = (t * 2).exp()
        t.sin().cos()  # leads nowhere
        return u + 1

    assert replays_of(function, x, monkeypatch) == ["aten.mul.Tensor", "aten.exp.default"]


def test_nested_calls_have_torchs_nested_peak(x):
    blocks = [Block() for _ in range(8)]

    def inner(call, part, t):
        for block in part:
            t = call(block, t)
        return t

    def step(call):
        h = x
        for at in (0, 4):
            h = call(partial(inner, call, blocks[at : at + 4]), h)
        h.square().mean().backward()

    def outer_alone(call):
        h = x
        for at in (0, 4):
            h = call(partial(inner, plain, blocks[at : at + 4]), h)
        h.square().mean().backward()

    torch.manual_seed(0)
    step(plain)
    expected = [p.grad.clone() for b in blocks for p in b.parameters()]
    for block in blocks:
        block.zero_grad(set_to_none=False)
    torch.manual_seed(0)
    step(lowtide.checkpoint)
    assert equal([p.grad for b in blocks for p in b.parameters()], expected)

    step(torchs)
    peak = peak_bytes(partial(step, lowtide.checkpoint))
    assert peak <= 1.02 * peak_bytes(partial(step, torchs))
    assert peak < 0.6 * peak_bytes(partial(outer_alone, lowtide.checkpoint))


def test_inside_torchs_checkpoint_and_around_it(block, x):
    def ours_inside(t):
        return lowtide.checkpoint(block, t.tanh())

    def theirs_inside(t):
        return torchs(block, t.tanh())

    parameters = list(block.parameters())
    expected = gradients(plain, lambda t: block(t.tanh()), x, parameters=parameters)
    assert equal(gradients(torchs, ours_inside, x, parameters=parameters), expected)
    assert equal(gradients(lowtide.checkpoint, theirs_inside, x, parameters=parameters), expected)


def test_what_a_user_stores_by_hooks_of_his_own(block, x):
    def function(t):
        with torch.autograd.graph.save_on_cpu():
            return block(t)

    assert_as_plain(function, x, parameters=list(block.parameters()))


def test_a_function_of_the_users_own_with_its_backward(x):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t, t * t)
            return t * t * t

        @staticmethod
        def backward(ctx, gradient):
            t, square = ctx.saved_tensors
            return gradient * 3 * square + 0 * t

    assert_as_plain(lambda t: Cube.apply(t * 2).exp(), x)


# -- beside the rest of lowtide -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_inside_a_fitted_model_the_plan_decides(budget, monkeypatch):
    class Checkpointed(Layered):
        def forward(self, x):
            for layer in self.layers:
                x = x + lowtide.checkpoint(layer, x)
            return x

    opened = []
    around = dropping.DroppingTape.around
    monkeypatch.setattr(dropping.DroppingTape, "around", lambda tape: opened.append(1) or around(tape))
    torch.manual_seed(0)
    model = Checkpointed()
    expected = gradients(plain, model, batch_of(), parameters=list(model.parameters()))
    assert opened
    del opened[:]

    with lowtide.fit(model, batch_of(), budget=budget) as fit:
        found = gradients(plain, model, batch_of(), parameters=list(model.parameters()))
        assert fit.status().in_force
    assert opened == []
    assert equal(found, expected)


def test_between_a_watched_call_and_its_backward_the_watch_decides(x, monkeypatch):
    opened = []
    around = dropping.DroppingTape.around
    monkeypatch.setattr(dropping.DroppingTape, "around", lambda tape: opened.append(1) or around(tape))
    model = Layered()
    with lowtide.fit(model, budget="60%") as fit:
        lowtide.checkpoint(torch.tanh, model(batch_of())).square().mean().backward()
        assert fit.status().steps == 1
    assert opened == []


def test_compiled_code_is_called_as_it_is_and_told(x):
    model = nn.Linear(WIDTH, WIDTH)
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="runs compiled code"):
        lowtide.checkpoint(lambda t: model(t), x).sum().backward()


def test_under_torch_func_it_is_the_plain_call(x):
    found = torch.func.grad(lambda t: lowtide.checkpoint(torch.exp, t).sum())(x.detach())

    assert torch.equal(found, x.detach().exp())


def test_other_contexts_are_refused_by_name(x):
    with pytest.raises(ValueError, match="context_fn: backward does not run the function again"):
        lowtide.checkpoint(torch.exp, x, context_fn=lambda: None)


def test_torchs_other_options_make_no_difference(x):
    options = dict(use_reentrant=False, determinism_check="none", debug=True, early_stop=False)

    assert equal(gradients(partial(lowtide.checkpoint, **options), torch.exp, x), gradients(plain, torch.exp, x))


# -- checkpoint_sequential ------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 5, "sqrt"])
@pytest.mark.parametrize("kind", [list, lambda blocks: nn.Sequential(*blocks)], ids=["list", "Sequential"])
def test_a_sequence_in_segments_is_bitwise_plain(segments, kind, x):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(5)]
    parameters = [p for block in blocks for p in block.parameters()]
    expected = gradients(plain, nn.Sequential(*blocks), x, parameters=parameters)
    found = gradients(
        lambda functions, t: lowtide.checkpoint_sequential(functions, segments, t),
        kind(blocks),
        x,
        parameters=parameters,
    )

    assert equal(found, expected)


def test_trap_uneven_segments_leave_most_of_a_sequence_unchecked(monkeypatch, x):
    """Seven functions in four segments: torch stores all of the last four."""
    checkpointed = []
    monkeypatch.setattr(
        "lowtide.training.checkpointed_call.checkpoint",
        lambda run, value: checkpointed.append(len(run.args[0])) or run(value),
    )
    lowtide.checkpoint_sequential([torch.tanh] * 7, 4, x)

    assert checkpointed == [2, 2, 2]


@pytest.mark.parametrize("segments", [0, 8, "all", 2.0])
def test_segments_that_cannot_be(segments, x):
    with pytest.raises(ValueError, match=r"of 7 functions. Ask for 1 to 7"):
        lowtide.checkpoint_sequential([torch.tanh] * 7, segments, x)
