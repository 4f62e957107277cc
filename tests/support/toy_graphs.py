"""Handmade step graphs: small enough to check by hand, or shaped like a real model."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, Frame, Op, StepGraph, Storage


@dataclass
class Step:
    """Builds a graph from forward ops alone; backward follows from what each of them stores.

    Each forward op gets one backward op that unpacks what the op stored, makes a gradient for every activation it
    read (as large as that activation) and then lets go of everything. Python drops a storage after its last reader.
    """

    resident: int = 0
    bytes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    fixed: dict[int, str] = field(default_factory=dict)
    ops: list[dict] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)

    def parameter(self, count: int = 0, fixed: str = "") -> int:
        self.bytes.append(count)
        self.kinds.append("parameter")
        if fixed:
            self.fixed[len(self.bytes) - 1] = fixed
        return len(self.bytes) - 1

    def op(self, *reads, makes=(8,), saves="reads", path="", name="op", workspace=0, rng=0, fixed=""):
        """One forward op. ``saves``: ``reads``, ``makes``, ``nothing``, or storage ids. Returns its outputs."""
        outputs = []
        for count in makes:
            self.bytes.append(count)
            self.kinds.append("activation")
            outputs.append(len(self.bytes) - 1)
            self.makers[outputs[-1]] = len(self.ops)
            if fixed:
                self.fixed[outputs[-1]] = fixed
        stored = {"reads": tuple(reads), "makes": tuple(outputs), "nothing": ()}.get(saves, saves)
        if callable(stored):
            stored = stored(outputs)
        self.ops.append(
            {"reads": tuple(reads), "makes": tuple(outputs), "saves": tuple(stored), "path": path, "name": name,
             "workspace": workspace, "rng": rng}
        )  # fmt: skip
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def graph(self, keep_output: bool = False, backward_workspace: int = 0) -> StepGraph:
        sizes, kinds = list(self.bytes), list(self.kinds)
        makers = dict(self.makers)
        frames, ids = [Frame(-1, "", 0)], {"": 0}

        def frame(path: str) -> int:
            if path not in ids:
                parent = frame(path.rpartition(".")[0])
                ids[path] = len(frames)
                frames.append(Frame(parent, path, 0))
            return ids[path]

        last_reader = {s: i for i, op in enumerate(self.ops) for s in (*op["makes"], *op["reads"])}
        ops, events, saved, handles = [], [], [], []
        for i, op in enumerate(self.ops):
            ops.append(Op(i, f"aten.{op['name']}.default", frame(op["path"]), False, op["reads"], op["makes"],
                          workspace_bytes=op["workspace"], rng_bytes=op["rng"]))  # fmt: skip
            events.append((RUN, i))
            mine = []
            for storage in op["saves"]:
                mine.append(len(saved))
                saved.append(storage)
                events.append((PACK, mine[-1]))
            handles.append(mine)
            output = op["makes"] if keep_output and i == len(self.ops) - 1 else ()
            dead = sorted({s for s in (*op["reads"], *op["makes"]) if last_reader[s] == i and s in makers})
            events += [(FREE, s) for s in dead if s not in output]
        gradient: dict[int, int] = {}
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            events += [(UNPACK, h) for h in handles[i]]
            made = []
            for storage in dict.fromkeys(op["reads"]):
                if storage in makers and makers[storage] < len(self.ops) and storage not in gradient:
                    sizes.append(sizes[storage])
                    kinds.append("backward")
                    gradient[storage] = len(sizes) - 1
                    made.append(gradient[storage])
            number = len(ops)
            grads = tuple(gradient[s] for s in op["makes"] if s in gradient)
            reads = (*grads, *(saved[h] for h in handles[i]))
            ops.append(Op(number, f"aten.{op['name']}_backward.default", frame(op["path"]), True, reads, tuple(made),
                          workspace_bytes=backward_workspace))  # fmt: skip
            makers.update(dict.fromkeys(made, number))
            events.append((RUN, number))
            events += [(DROP, h) for h in handles[i]] + [(RELEASE, h) for h in handles[i]]
            events += [(FREE, g) for g in grads]
        storages = []
        outputs = {s: place for op in ops for place, s in enumerate(op.makes)}
        for s, count in enumerate(sizes):
            storages.append(Storage(s, count, kinds[s], makers.get(s), outputs.get(s, 0), self.fixed.get(s, "")))
        return StepGraph("cpu", "toy", {"parameters": self.resident}, (), tuple(frames), tuple(storages), tuple(ops),
                         tuple(saved), tuple(events))  # fmt: skip


def unit_costs(graph: StepGraph, **extra: float) -> Costs:
    """One millisecond an op."""
    return Costs(op_ms=(1.0,) * len(graph.ops), **extra)


def chain(length: int = 4, size: int = 8) -> StepGraph:
    """x1 = f(w), x2 = f(x1), ...: each op stores what it reads."""
    step = Step()
    x = step.parameter()
    for _ in range(length):
        x = step.op(x, makes=(size,))
    return step.graph()


def linear_tanh(depth: int = 48, size: int = 64) -> StepGraph:
    """``depth`` times (Linear, Tanh) in one flat Sequential: the linear's own output is not stored."""
    step = Step()
    x = step.parameter()
    for i in range(depth):
        h = step.op(x, makes=(size,), path=f"{2 * i}", name="addmm")
        x = step.op(h, makes=(size,), saves="makes", path=f"{2 * i + 1}", name="tanh")
    step.op(x, makes=(1,), saves="nothing", name="sum")
    return step.graph()


def decoder(layers: int = 4, hidden: int = 64, inner: int = 176, tokens: int = 32, vocabulary: int = 128) -> StepGraph:
    """A pre-norm decoder with attention and a gated MLP, one op a kernel, stored as autograd stores it."""
    unit = tokens * 4
    step = Step(resident=1000)
    weight, ids = step.parameter(), step.parameter()
    x = step.op(weight, ids, makes=(unit * hidden,), saves=(ids,), path="model.embed", name="embedding")
    for i in range(layers):
        at = f"model.layers.{i}"
        n, _ = step.op(x, weight, makes=(unit * hidden, unit), path=f"{at}.norm1", name="rms_norm",
                       saves=lambda out, x=x: (x, out[1]))  # fmt: skip
        q, k, v = (step.op(n, weight, makes=(unit * hidden,), path=f"{at}.attn", name="mm") for _ in range(3))
        q, k = (step.op(t, makes=(unit * hidden,), saves="nothing", path=f"{at}.attn", name="rope") for t in (q, k))
        a, _ = step.op(q, k, v, makes=(unit * hidden, unit), path=f"{at}.attn", name="_scaled_dot_product_attention",
                       saves=lambda out, qkv=(q, k, v): (*qkv, *out), rng=16)  # fmt: skip
        o = step.op(a, weight, makes=(unit * hidden,), path=f"{at}.attn", name="mm")
        x = step.op(x, o, makes=(unit * hidden,), saves="nothing", path=at, name="add")
        n, _ = step.op(x, weight, makes=(unit * hidden, unit), path=f"{at}.norm2", name="rms_norm",
                       saves=lambda out, x=x: (x, out[1]))  # fmt: skip
        gate, up = (step.op(n, weight, makes=(unit * inner,), path=f"{at}.mlp", name="mm") for _ in range(2))
        s = step.op(gate, makes=(unit * inner,), path=f"{at}.mlp", name="silu")
        m = step.op(s, up, makes=(unit * inner,), path=f"{at}.mlp", name="mul")
        d = step.op(m, weight, makes=(unit * hidden,), path=f"{at}.mlp", name="mm")
        x = step.op(x, d, makes=(unit * hidden,), saves="nothing", path=at, name="add")
    logits = step.op(x, weight, makes=(unit * vocabulary,), path="lm_head", name="mm")
    logp = step.op(logits, makes=(unit * vocabulary,), saves="makes", name="log_softmax")
    step.op(logp, makes=(4,), saves=(), name="nll_loss")
    return step.graph(keep_output=True)


def decoder_costs(graph: StepGraph) -> Costs:
    """Matrix products by their bytes times 60, the rest by its bytes: no two layers exactly alike is not assumed."""
    heavy = ("mm", "attention")
    return Costs(
        op_ms=tuple(
            1e-6 * sum(graph.storages[s].bytes for s in op.makes) * (60 if any(h in op.name for h in heavy) else 2)
            for op in graph.ops
        ),
        dispatch_us=0.5, record_us=0.2, replay_us=0.3,
    )  # fmt: skip
