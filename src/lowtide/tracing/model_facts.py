"""What a model is, as far as tracing and fitting ask: its device, what is compiled, sharded or wrapped."""

from functools import cached_property

import torch
from torch import nn

from lowtide.errors import LowtideError, StepError, UnsupportedModelError
from lowtide.step import module_calls
from lowtide.step.data_parallel import ddp_wrapper_of
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.sharding.units import why_not_supported
from lowtide.step.sharding.zero3 import coordinators_of
from lowtide.step.subclasses import plain_tensors, wrapped_parameters
from lowtide.step.whole_modules import is_scripted

_WRAPPERS = frozenset({"DataParallel", "FullyShardedDataParallel", "ReplicateModule", "DeepSpeedEngine"})


class ModelFacts:
    """One model as it is fitted or traced; each fact is found once, when first asked for.

    Later it may be moved or compiled: what runs in its steps asks the model itself.

    Raises:
        TypeError: ``model`` is no module.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}, not an nn.Module. Pass the module, and step= for the rest."
            )
        self.model = model

    @cached_property
    def device(self) -> torch.device:
        """As ``device_of``."""
        return device_of(self.model)

    @cached_property
    def compiled(self) -> list[str]:
        """Paths of the outermost compiled modules; "" is the model itself."""
        return module_calls.compiled_parts(self.model)

    def parts_called_whole(self) -> dict[str, list[str]]:
        """Paths of compiled modules inside the model, by what they are called."""
        found: dict[str, list[str]] = {}
        for path in filter(None, self.compiled):
            is_script = is_scripted(self.model.get_submodule(path))
            found.setdefault("scripted code (TorchScript)" if is_script else "compiled code", []).append(path)
        return found

    @cached_property
    def is_wrapped(self) -> bool:
        """Some parameters are DTensors, or others that wrap plain ones."""
        return bool(wrapped_parameters(self.model))

    @cached_property
    def is_partitioned(self) -> bool:
        """By DeepSpeed's ZeRO-3."""
        return is_partitioned(self.model.parameters())

    def check_supported(self) -> None:
        """Refuse by name what the tape would not carry out exactly.

        Raises:
            UnsupportedModelError: wrapped or sharded. StepError: it has no trainable parameter.
        """
        for path, module in self.model.named_modules():
            if found := {c.__name__ for c in type(module).__mro__} & _WRAPPERS:
                raise UnsupportedModelError(
                    f"{path or 'the model'} is a {sorted(found)[0]}, which the tape does not carry out yet.\n"
                    "Fit the module inside it, or train without lowtide."
                )
            if module_calls.is_lowtide_call(module._compiled_call_impl):
                raise LowtideError(
                    f"{path or 'the model'} is already fitted: two plans cannot drive one module.\n"
                    "Call fit.remove() (or leave lowtide.apply) first."
                )
        if self.is_partitioned and not coordinators_of(self.model):
            raise UnsupportedModelError(
                "the model is partitioned by DeepSpeed's ZeRO-3, and no engine gathers its parameters.\n"
                "Call fit after deepspeed.initialize."
            )
        if reason := why_not_supported(self.model):
            raise UnsupportedModelError(f"{reason}, which the tape does not carry out yet.\nTrain without lowtide.")
        if self.is_wrapped and ddp_wrapper_of(self.model) is not None:
            raise UnsupportedModelError(
                "DistributedDataParallel around DTensor parameters is not carried out: ranks that rehearse together "
                "would be two groups.\nUse fully_shard on a mesh of two dimensions, or train without lowtide."
            )
        for name, parameter in self.model.named_parameters():
            inner = [type(t.data) for t in plain_tensors(parameter)]
            if unknown := [kind for kind in inner if kind is not torch.Tensor]:
                raise UnsupportedModelError(
                    f"parameter {name} is a {unknown[0].__name__}, a tensor subclass that does not say which plain "
                    "tensors it wraps\n(__tensor_flatten__, __tensor_unflatten__): such are not taped.\n"
                    "Use weights that do, as DTensor and torchao have them, or train without lowtide."
                )
        if not any(p.requires_grad for p in self.model.parameters()):
            raise StepError("the model has no trainable parameter.\nSet requires_grad=True on what you want to train.")


def device_of(model: nn.Module) -> torch.device:
    """The one device of the model's parameters."""
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model's parameters are on {sorted(map(str, devices))}: a plan is for one device.\n"
            "Put the model on one device."
        )
    device = devices.pop()
    if device.type == "meta":
        raise UnsupportedModelError(
            "the model is on the meta device: it has shapes and no numbers, and cannot be rehearsed yet.\n"
            "Put it on the device where it trains (model.to_empty(device=...), then load its weights)."
        )
    return device
