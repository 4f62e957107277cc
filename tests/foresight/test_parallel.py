"""Ranks that divide layers, tokens, experts or stages: what each holds, and what cannot be divided."""

import json
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import distributed as dist

import lowtide
from lowtide import cli
from lowtide.errors import UnsupportedModelError
from lowtide.estimation.device_table import device_named
from lowtide.foresight import parallel_model
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.pipeline import layers_of, waiting_bytes
from lowtide.foresight.rank_memory import rank_memory
from lowtide.foresight.step_time import collective_bytes
from lowtide.foresight.training_setup import SetupError, TrainingSetup
from lowtide.graph.gradients import with_gradients_before
from lowtide.hollow.memory import UNKNOWN, origin_of
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.ranks import fake_ranks

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 5,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8}
H100 = device_named("h100")
ATTENTION, MLP, EMBEDDING = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 192, 1000 * 64
HIDDEN_BYTES = 2 * 64 * 64  # of one sequence of 64 tokens in bfloat16

divides = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers before 5.23 divides no model as lowtide expects: refused by name",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return subject_named(written(tmp_path_factory.mktemp("llama"), LLAMA))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return subject_named(written(tmp_path_factory.mktemp("mixtral"), MIXTRAL))


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def setup(**options):
    return TrainingSetup(H100, seq_len=64, **options)


def collectives(graph):
    names = [
        op.name.split(".")[1].rstrip("_") for op in graph.ops if op.name.split(".")[0] in ("c10d", "_c10d_functional")
    ]
    return {name: names.count(name) for name in names if name not in ("wait_tensor", "_wrap_tensor_autograd")}


def peak_of_plain_step(graph):
    costs = lowtide.estimate(graph, device=H100)
    later = with_gradients_before(graph)
    return lowtide.solve(later, costs, method="none").predicted_peak_bytes - graph.resident_bytes


@divides
def test_a_tensor_parallel_rank_holds_what_the_plan_of_transformers_leaves_it(llama):
    half = llama.facts(setup(tensor_parallel=2))

    norms = 11 * 64
    assert sum(p.elements for p in half.parameters) == (5 * (ATTENTION + MLP) + 2 * EMBEDDING) // 2 + norms
    # DTensor leaves the gradient of the embedding whole.
    (embedding,) = [p for p in half.parameters if "embed_tokens" in p.name]
    assert embedding.elements == EMBEDDING // 2 and embedding.gradient_bytes == 2 * EMBEDDING
    graph = llama.trace(setup(tensor_parallel=2))
    # Sums after embedding, attention and MLP, and of gradients before attention (q, k, v), MLP (gate, up) and head.
    assert collectives(graph) == {"all_reduce": 1 + 5 * 2 + 5 * (3 + 2) + 1, "all_gather_into_tensor": 1}
    assert peak_of_plain_step(graph) < peak_of_plain_step(llama.trace(setup()))


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"chunk_loss": True}])
@divides
def test_an_embedding_that_is_the_head_is_divided_once(tmp_path, options):
    subject = subject_named(written(tmp_path, LLAMA | {"tie_word_embeddings": True, "num_hidden_layers": 1}))
    facts = subject.facts(setup(tensor_parallel=2, **options))

    part = EMBEDDING if "chunk_loss" in options else EMBEDDING // 2
    assert sum(p.elements for p in facts.parameters) == (ATTENTION + MLP) // 2 + part + 3 * 64
    assert subject.trace(setup(tensor_parallel=2, **options)).ops


@divides
def test_sequence_parallel_ranks_keep_a_part_of_the_tokens_between_layers(llama):
    tensor, tokens = (
        llama.trace(setup(tensor_parallel=2, sequence_parallel=divides, batch_size=4)) for divides in (False, True)
    )

    # Gathered before attention, MLP and head, scattered after embedding, attention and MLP; each once more in backward.
    found = collectives(tokens)
    assert found["reduce_scatter_tensor"] == 22 and found["all_gather_into_tensor"] == 22 + 1
    assert found["all_reduce"] == 11  # gradients of the norms
    stored = [sum(graph.storages[s].bytes for s in graph.stored) for graph in (tensor, tokens)]
    # At least one residual of each of the ten halves of a layer is half as large.
    assert stored[0] - stored[1] >= 10 * 4 * HIDDEN_BYTES // 2


@divides
def test_expert_parallel_ranks_hold_whole_experts_and_exchange_tokens(mixtral):
    whole = mixtral.facts(setup())
    divided = setup(expert_parallel=4, data_parallel=4)
    part = mixtral.facts(divided)

    experts = 2 * 8 * MLP
    assert sum(p.elements for p in whole.parameters) - sum(p.elements for p in part.parameters) == experts * 3 // 4
    assert sum(p.elements for p in part.parameters if p.expert) == experts // 4
    graph = mixtral.trace(divided)
    assert collectives(graph)["all_to_all_single"] == 2 * 2 * 2  # there and back, forward and backward, two layers
    assert "each sends as this one does" in graph.provenance["assumed"]
    # Two tokens in eight choose each expert, wherever they are: as many rows as one rank alone has.
    rows = [s for s in graph.signatures if s["op"] == "_c10d_functional.all_to_all_single.default"]
    assert {tuple(s["args"][0]["t"]) for s in rows} == {(2 * 64, 64)}


@divides
def test_fully_sharded_experts_have_fewer_replicas_than_the_rest(mixtral):
    divided = setup(expert_parallel=2, data_parallel=4, sharding="fsdp")
    facts = mixtral.facts(divided)

    rest = sum(p.elements for p in facts.parameters if not p.expert)
    experts = sum(p.elements for p in facts.parameters if p.expert)
    assert rank_memory(facts, divided).parameters == pytest.approx(2 * (rest / 4 + experts / 2), rel=0.01)


@divides
def test_fully_sharded_experts_of_one_rank_are_copied_and_nothing_of_them_is_on_its_way(mixtral):
    """A copy and two gradients: what the allocator counts of FSDP2 blocks on a process group of one rank."""
    shared, alone = (setup(expert_parallel=n, data_parallel=4, sharding="fsdp") for n in (2, 4))
    of_two, of_one = mixtral.facts(shared), mixtral.facts(alone)
    layer = 2 * 8 * MLP  # bytes of all experts of a layer

    rest = rank_memory(of_two, shared).gathered - 4 * layer // 2
    assert rank_memory(of_one, alone).gathered - rest == 3 * layer // 4


@divides
def test_what_only_one_rank_has_is_neither_reduced_nor_divided_among_replicas(mixtral):
    divided = setup(expert_parallel=4, data_parallel=4)
    facts = mixtral.facts(divided)

    rest = sum(p.elements for p in facts.parameters if not p.expert)
    experts = sum(p.elements for p in facts.parameters if p.expert)
    assert rank_memory(facts, divided).gathered == 2 * rest
    zero1, zero2 = (rank_memory(facts, replace(divided, sharding=kind)) for kind in ("zero1", "zero2"))
    state = 2 * 2 * (rest / 4 + experts)
    assert state <= zero1.optimizer <= state + 4 * 512 and "of experts by 1" in zero1.rule
    assert zero2.gradients == pytest.approx(2 * (rest / 4 + experts), abs=2)


# Of five layers: transformers gives what is left to the last stage up to 5.23, and to the first from 5.24 on.
FIRST, LAST = ((0, 1), (2, 4)) if Version(transformers.__version__) < Version("5.24") else ((0, 2), (3, 4))


@divides
def test_stages_of_a_pipeline_make_up_the_model_and_the_first_holds_most_micro_batches(llama):
    divided = setup(pipeline_parallel=2, accumulate=4)
    stages = [llama.facts(replace(divided, stage=stage)) for stage in (0, 1)]

    sizes = [sum(p.elements for p in facts.parameters) for facts in stages]
    layer = ATTENTION + MLP + 2 * 64
    first, last = (end - start + 1 for start, end in (FIRST, LAST))
    assert sizes == [first * layer + EMBEDDING, last * layer + 64 + EMBEDDING]
    forecast = Forecaster(llama).forecast(divided)
    assert [stage.layers for stage in forecast.stages] == [FIRST, LAST]
    assert [stage.micro_batches for stage in forecast.stages] == [2, 1]
    assert forecast.peak_bytes == max((s.peak_bytes for s in forecast.stages), key=lambda peak: peak.expected)


@divides
def test_each_micro_batch_that_waits_adds_what_its_forward_leaves(llama):
    one, two, more = (
        Forecaster(llama).forecast(setup(pipeline_parallel=2, stage=0, accumulate=count), budget=None)
        for count in (1, 2, 8)
    )

    graph = llama.trace(setup(pipeline_parallel=2, stage=0))
    costs = lowtide.estimate(graph, device=H100)
    left = waiting_bytes(graph, lowtide.simulate(graph, costs, {}).live_bytes)
    saved = sum(graph.storages[s].bytes for s in graph.stored)
    # What autograd stores, what backward begins at, and the tokens.
    assert saved + HIDDEN_BYTES + 512 <= left < saved + HIDDEN_BYTES + 4096
    assert two.peak_bytes.low - one.peak_bytes.low == left == two.by_part["micro_batches_that_wait"]
    assert more.peak_bytes == two.peak_bytes  # no more than two are on their way through two stages


@divides
def test_a_pipeline_with_little_memory_recomputes_where_micro_batches_wait(llama):
    divided = TrainingSetup(H100, seq_len=256, batch_size=8, pipeline_parallel=5, accumulate=8)
    plain = Forecaster(llama).forecast(replace(divided, stage=0), budget=None)
    beside = H100.usable_bytes - plain.by_part["micro_batches_that_wait"] // 2
    tight = replace(divided, device=replace(H100, usable_bytes=plain.peak_bytes.high - (H100.usable_bytes - beside)))
    forecast = Forecaster(llama).forecast(replace(tight, stage=0))

    assert forecast.fits and forecast.plan.counts["recompute"] > 0
    assert forecast.by_part["micro_batches_that_wait"] < plain.by_part["micro_batches_that_wait"]


@divides
def test_a_stage_that_is_tensor_parallel_leaves_out_what_others_have(llama, monkeypatch):
    divided = setup(pipeline_parallel=2, tensor_parallel=2, sequence_parallel=True)
    for stage in (0, 1):
        assert llama.trace(replace(divided, stage=stage)).ops

    monkeypatch.setattr(parallel_model, "_of_this_stage", lambda model, plan: plan)
    with pytest.raises(SetupError, match="has no `out_features`"):  # transformers divides identities as well
        llama.facts(replace(divided, stage=0, precision="fp32"))


@divides
def test_pipelines_wait_while_they_fill_and_drain(llama):
    few, many = (
        Forecaster(llama).forecast(setup(pipeline_parallel=2, accumulate=count, optimizer="none"), budget=None)
        for count in (1, 9)
    )

    assert many.step_ms.expected == pytest.approx(few.step_ms.expected * (9 + 1) / (1 + 1))


@divides
def test_what_ranks_send_is_counted_by_kind(llama):
    graph = llama.trace(setup(tensor_parallel=2))
    sent = collective_bytes(graph, setup(tensor_parallel=2))

    assert sent.count(HIDDEN_BYTES) == 37  # all-reduce of n ranks: 2 (n - 1) / n
    assert max(sent) == 64 * 1000 * 2 / 2  # logits, gathered


@divides
def test_a_crash_of_transformers_names_model_and_degrees(llama, monkeypatch):
    from transformers.distributed import tensor_parallel

    def crash(*_):
        raise AssertionError("no such mesh")

    monkeypatch.setattr(tensor_parallel, "apply_tensor_parallelism", crash)
    divided = setup(tensor_parallel=2, pipeline_parallel=2, stage=0, precision="fp32")
    with pytest.raises(SetupError) as caught:
        llama.facts(divided)

    assert str(caught.value) == (
        f"transformers {transformers.__version__} and torch {torch.__version__} cannot run {llama.name} with "
        "--tensor-parallel 2 --pipeline-parallel 2: AssertionError: no such mesh\nPass other degrees, or none."
    )
    assert isinstance(caught.value.__cause__, AssertionError) and not dist.is_initialized()


def test_a_transformers_that_divides_no_models_is_refused_by_name(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)  # as before 5.23

    with pytest.raises(SetupError, match=r"does not divide models as lowtide expects\. Install 5\.23 or 5\.24"):
        llama.facts(setup(tensor_parallel=2, precision="fp32"))


def test_counts_that_other_ranks_send_are_those_that_this_one_keeps():
    with fake_ranks(2, rank=1), HollowMode():
        sent, received = torch.tensor([[1, 2], [3, 4]]), torch.empty(2, 2, dtype=torch.int64)
        dist.all_to_all_single(received, sent)

    assert received.tolist() == [[3, 4], [3, 4]] and origin_of(received) == UNKNOWN


def test_a_process_that_is_a_rank_already_stands_for_no_other():
    with fake_ranks(2):
        with pytest.raises(UnsupportedModelError, match="process of its own"), fake_ranks(2):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        (LLAMA, ("--gpus", "8", "--tensor-parallel", "2", "--pipeline-parallel", "3"), "--gpus 8 is not --data-par"),
        (LLAMA, ("--tensor-parallel", "4"), "does not divide the 2 key_value_heads"),
        (LLAMA, ("--pipeline-parallel", "6"), "more stages than the 5 layers"),
        (LLAMA, ("--expert-parallel", "2", "--data-parallel", "2"), "no plan to divide experts"),
        (LLAMA, ("--sequence-parallel",), "Pass --tensor-parallel N"),
        (LLAMA, ("--sequence-parallel", "--tensor-parallel", "2", "--seq-len", "63"), "does not divide --seq-len 63"),
        (LLAMA, ("--pipeline-parallel", "2", "--data-parallel", "2", "--sharding", "fsdp"), "Use zero1 or none"),
        (LLAMA, ("--pipeline-parallel", "2", "--lora", "4"), "--lora with --pipeline-parallel"),
        (LLAMA, ("--pipeline-parallel", "2", "--chunk-loss"), "--chunk-loss with --pipeline-parallel"),
        (MIXTRAL, ("--expert-parallel", "4"), "divide --data-parallel 1 x --tensor-parallel 1"),
        (MIXTRAL, ("--expert-parallel", "3", "--data-parallel", "3"), "does not divide the 8 experts"),
        (LLAMA | {"model_type": "gpt2"}, ("--pipeline-parallel", "2"), "no plan to cut"),
    ],
)
def test_sizes_that_contradict_are_named(capsys, tmp_path, config, args, words):
    code = cli.main(["plan", "--json", "--model", written(tmp_path, config), "--device", "h100", *args])
    body = json.loads(capsys.readouterr().out)

    assert code == 2 and body["status"] == "bad_usage" and words in body["error"]


@divides
def test_the_answer_names_the_worst_rank_and_every_stage(capsys, tmp_path):
    args = ["plan", "--model", written(tmp_path, LLAMA), "--device", "h100", "--seq-len", "64", "--no-limits",
            "--tensor-parallel", "2", "--pipeline-parallel", "2", "--accumulate", "4"]  # fmt: skip
    assert cli.main([*args, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)

    worst, layers = (0, FIRST) if FIRST[1] - FIRST[0] > LAST[1] - LAST[0] else (1, LAST)
    assert body["worst_rank"] == f"stage {worst} of 0 to 1 (layers {layers[0]} to {layers[1]}), its first"
    assert len(body["stages"]) == 2
    assert body["parameters"] == 5 * (ATTENTION + MLP + 2 * 64) + 64 + 2 * EMBEDDING
    assert cli.main(args) == 0
    assert f"layers 0 to {FIRST[1]}, 2 micro-batches at a time, fits" in capsys.readouterr().out


def test_layers_of_a_stage_are_those_that_transformers_gives_it(monkeypatch):
    from transformers.distributed.pipeline_parallel import PipelineStage

    assert [list(layers_of(stage, 2, 5)) for stage in (0, 1)] == [list(range(a, b + 1)) for a, b in (FIRST, LAST)]
    monkeypatch.setattr(PipelineStage, "layer_range_for_rank", lambda self, rank, layers: (rank, self.pp_size + layers))
    assert layers_of(1, 2, 5) == range(1, 7)
