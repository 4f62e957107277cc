"""Streams and events of any accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.device.names import check_is_here, index_of, is_accelerator


def why_no_streams(device_type: str) -> str:
    """Why nothing can be copied beside the computation on this kind of device; "" if it can."""
    if not is_accelerator(device_type):
        return "its memory is the host's"
    try:
        check_is_here(device_type)
        new_event(torch.device(device_type)).record(new_stream(torch.device(device_type)))
    except Exception as error:  # whatever a device without them raises
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def new_event(device: torch.device) -> torch.Event:
    return torch.Event(device)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Inside, ``stream`` and its device are the current ones of this thread.

    ``with stream`` would keep the former ones in the stream itself, which other threads may enter meanwhile.
    """
    device_before, before = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device_before)


@contextmanager
def run_in_order_on(stream: torch.Stream | None) -> Iterator[None]:
    """Inside, ``stream`` is the current one; afterwards the former one waits for it. None: a CPU, nothing to do."""
    before = None if stream is None else current_stream(stream.device)
    if stream is None or before == stream:
        yield
        return
    with on_stream(stream):
        yield
    assert before is not None
    before.wait_stream(stream)


def synchronize(device: str | torch.device) -> None:
    """Wait for all that was started on an accelerator; on a CPU nothing is."""
    if is_accelerator(device):
        torch.accelerator.synchronize(index_of(device))


def synchronize_all() -> None:
    """Wait for every accelerator here."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def is_captured(device: torch.device) -> bool:
    """Whether what runs now is captured in a CUDA graph, which runs it again later without its Python code."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
