"""What lowtide patches and reads of PyTorch that PyTorch does not promise, and the versions it was checked on.

A feature that patches them says so once, in one line, under a version that nobody has checked, and does without.
``tests/test_pytorch_internals.py`` reads the sources: a private name that is not listed here fails, and so does one
that is listed and not used, or that the installed PyTorch does not have.

To take on a version: run the whole suite on it (CONTRIBUTING.md), mend what fails, and add it to ``CHECKED``.
"""

import logging
from typing import NamedTuple

import torch

from lowtide.errors import UnsupportedPyTorchError

logger = logging.getLogger("lowtide")

CHECKED = ("2.11", "2.13", "2.14", "2.15")
VERSION: str = torch.__version__


class Feature(NamedTuple):
    """What users call, and what of PyTorch's own parts it rests on.

    Attributes:
        without: What is done under a version that was not checked, as a sentence.
        patched: Replaced while the feature is in use.
        read: Called or read. A name stands for all that lies in it.
        attributes: Read or set, of PyTorch's objects.
        checked: Major and minor number of the versions it was checked on.
    """

    name: str
    without: str
    patched: tuple[str, ...]
    read: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    checked: tuple[str, ...] = CHECKED


STEPS = Feature(
    "lowtide.fit",
    "What custom autograd Functions make is saved; all else is planned, and Fit.verify() compares such a step with the "
    "plain one bit by bit",
    patched=(
        "torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward",  # every backward, outermost
        "torch.autograd.function._SingleLevelFunction.apply",  # up to 2.13: every call of a custom Function
        "torch.autograd.Function.apply",  # from 2.14 on, where the other is C
        # Where ``torch.func`` forbids saved-tensor hooks.
        "torch._functorch.eager_transforms._vjp_with_argnums", "torch._functorch.eager_transforms.grad_and_value_impl",
        "torch.autograd.forward_ad.enter_dual_level", "torch.autograd.forward_ad.exit_dual_level",  # ours is away
        "torch.ctc_loss",  # which goes another way where a mode looks on
        "torch.autograd.profiler._run_on_profiler_start",  # a profiler starts: what counts leaves it the slot
        # And in C++ the table through which PyTorch calls Python: src/lowtide/device/csrc/planned_ops.cpp.
    ),
    read=(
        # The step: which backward runs, what autograd stores, on which thread.
        "torch._C._current_graph_task_id", "torch._C._current_autograd_node",
        "torch._C._autograd._get_current_graph_task_keep_graph", "torch._C._autograd._get_sequence_nr",
        "torch._C._autograd._top_saved_tensors_default_hooks", "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._C._autograd._pop_saved_tensors_default_hooks", "torch._C._autograd._saved_tensors_hooks_is_enabled",
        "torch.autograd.Variable._execution_engine", "torch._C._stash_obj_in_tls", "torch._C._get_obj_in_tls",
        "torch.autograd.function._SingleLevelFunction",
        # The dispatcher: the mode that sees ops, what lies around it, and calls that it must not see.
        "torch.utils._python_dispatch", "torch.utils._pytree", "torch._C._len_torch_dispatch_stack",
        "torch._C._get_dispatch_stack_at", "torch._C._push_on_torch_dispatch_stack",
        "torch._C._pop_torch_dispatch_stack", "torch._C._get_dispatch_mode", "torch._C._TorchDispatchModeKey",
        "torch._C._DisableTorchDispatch", "torch._C._disabled_torch_dispatch_impl", "torch._C.DispatchKey",
        "torch._C._dispatch_tls_is_dispatch_key_excluded", "torch._C._dispatch_tls_set_dispatch_key_excluded",
        "torch._C._dispatch_tls_local_include_set", "torch._C._dispatch_tls_local_exclude_set",
        "torch._C._ForceDispatchKeyGuard", "torch._C._AutoDispatchBelowADInplaceOrView", "torch._C._functorch",
        "torch.autograd.forward_ad._current_level",
        "torch._C._are_functorch_transforms_active", "torch._functorch.eager_transforms", "torch._ops",
        "torch._use_cudnn_ctc_loss", "torch._subclasses.fake_tensor", "torch._C._accelerator_getDeviceStats",
        "torch._C._accelerator_isAllocatorInitialized",
        # Replays: the state that an op ran under, and memory that nobody else holds.
        "torch._C._DisableAutocast", "torch._C._is_any_autocast_enabled", "torch._C._RestorePythonTLSSnapshot",
        "torch._C._get_cudnn_benchmark", "torch._C._get_cudnn_deterministic", "torch._C._get_deterministic_algorithms",
        "torch._C._get_deterministic_algorithms_warn_only",
        "torch._C._get_fp32_precision_getter", "torch._C._set_fp32_precision_setter",
        "torch._C._get_cublas_allow_fp16_reduced_precision_reduction",
        "torch._C._get_cublas_allow_bf16_reduced_precision_reduction",
        "torch._C._get_cublas_allow_fp16_accumulation",
        "torch._C._storage_Use_Count", "torch._C._autograd._unsafe_set_version_counter", "torch._conj",
        "torch._neg_view", "torch.autograd.grad_mode._unsafe_preserve_version_counter", "torch.ops.aten._unsafe_view",
        # Code that Dynamo must leave alone.
        "torch._C._dynamo.eval_frame",
        # What the CPU's allocator hands out.
        "torch._C._autograd._ProfilerDisableOptions", "torch._C._autograd._disable_profiler_legacy",
        "torch._C._autograd._enable_profiler_legacy", "torch._C._autograd._profiler_enabled", "torch._C._profiler",
        # DDP.
        "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    ),
    attributes=(
        "_compiled_call_impl", "_call_impl", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",  # of modules
        "_c",  # of scripted ones
        "_backward_cls", "_materialize_non_diff_grads", "_sequence_nr",  # of Functions and nodes
        # Of tensors and storages.
        "_cdata", "_is_view", "_is_zerotensor", "_version", "_post_accumulate_grad_hooks", "_local_tensor",
        # Of FSDP2's states, units and parameters.
        "_fsdp_param_groups", "_get_module_fsdp_state", "_is_root", "_reset_iter_state", "_reshard_after_forward",
        "_post_forward_indices", "_all_gather_result", "_partial_reduce_output", "_partial_reduce_output_layout",
        "_post_backward_pending", "_module_info", "_param_fqn", "_sharded_local_tensor", "_sharded_param_data",
        "_unsharded_param",
    ),
)  # fmt: skip
COMPILED = Feature(
    "lowtide.compile",
    "Its layers are compiled as torch.compile does, without a plan: no budget is kept",
    patched=(
        "torch._inductor.config.custom_partitioner_fn", "torch._functorch.partitioners.choose_saved_values_set",
        "torch._inductor.async_compile.AsyncCompile.cpp_pybinding", "torch._inductor.async_compile.AsyncCompile.triton",
        "torch._functorch._aot_autograd.graph_compile.aot_dispatch_autograd_graph",
    ),
    read=(
        "torch._functorch.partitioners", "torch._functorch.config", "torch._guards", "torch._inductor", "torch._dynamo",
        "torch.fx.experimental._config", "torch._functorch._aot_autograd",
        "torch._library.fake_class_registry.FakeScriptObject",
        "torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals",
    ),
    attributes=("_codegen", "_input_metadata", "_saved_result", "_use_count", "_schema", "_update_version_counter"),
    # On 2.11 compiled backward holds more than a plan foresees: a step of a small decoder was 2 % over its budget.
    checked=tuple(version for version in CHECKED if version != "2.11"),
)  # fmt: skip
DIAGNOSIS = Feature(
    "lowtide.diagnose",
    "Nothing is looked at",
    patched=(
        "torch.utils.checkpoint.CheckpointFunction",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",  # up to 2.13
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",  # from 2.14 on
    ),
    read=(
        "torch.utils.checkpoint._CachingTorchDispatchMode", "torch.utils.checkpoint._checkpoint_debug_enabled",
        "torch._functorch.config",
    ),
    attributes=("_checkpoint_wrapped_module",),
)  # fmt: skip
FORECASTS = Feature(
    "lowtide plan without a device",
    "Kernels and their workspaces are those of the last version that was",
    patched=(
        "torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward",
        "torch.amp.autocast_mode.autocast.__init__", "torch.accelerator.current_accelerator",
    ),
    read=(
        "torch._C._construct_storage_from_data_pointer", "torch._C._ExcludeDispatchKeyGuard", "torch._C.DispatchKeySet",
        "torch.testing._internal.distributed.fake_pg", "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    ),
    attributes=("_destroy",),  # of a library of operators
)  # fmt: skip
FEATURES = (STEPS, COMPILED, DIAGNOSIS, FORECASTS)
# Names that not every version in ``CHECKED`` has.
NOT_IN_ALL = frozenset({
    "torch.autograd.function._SingleLevelFunction.apply",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
})  # fmt: skip

_said: set[tuple[str, str]] = set()  # feature and version


def why_unchecked(feature: Feature) -> str:
    """One line about the installed version, "" where ``feature`` was checked on it."""
    if ".".join(VERSION.split("+")[0].split(".")[:2]) in feature.checked:
        return ""
    return f"PyTorch {VERSION} was not checked with {feature.name} ({_told(feature.checked)} were). {feature.without}."


def is_unchecked(feature: Feature) -> bool:
    """Whether ``feature`` has to be done without; the first time, the log says why."""
    line = why_unchecked(feature)
    if line and (feature.name, VERSION) not in _said:
        _said.add((feature.name, VERSION))
        logger.warning("lowtide: %s", line)
    return bool(line)


def explained(error: Exception) -> UnsupportedPyTorchError:
    """Of a part of PyTorch that was not there when lowtide was imported."""
    return UnsupportedPyTorchError(
        f"PyTorch {VERSION} lacks a part of its own that lowtide needs: {error}.\n"
        f"Install one that has it: {_told(CHECKED)} do."
    )


def _told(versions: tuple[str, ...]) -> str:
    return f"{', '.join(versions[:-1])} and {versions[-1]}"
