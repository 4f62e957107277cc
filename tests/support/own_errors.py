"""Errors of lowtide's own end no training: the step goes on without it. A test in which one came fails all the same."""

import traceback
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.errors import LowtideError
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.training.lifecycle import Lifecycle


class OwnErrors:
    """Unless the test brings one about (``own_errors``)."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        found: list[str] = []  # no exceptions: these would hold what their frames do

        def noted(caught: Any) -> Any:
            def catch(self: Any, error: Exception) -> None:
                if not (isinstance(error, LowtideError) or is_out_of_memory(error)):
                    found.append("".join(traceback.format_exception(error)))
                caught(self, error)

            return catch

        with (
            patch.object(Lifecycle, "fail", noted(Lifecycle.fail)),
            patch.object(OnlineTape, "give_up", noted(OnlineTape.give_up)),
        ):
            result = yield
        if found and item.get_closest_marker("own_errors") is None:
            pytest.fail(f"an error of lowtide's own ended a step's plan or watch:\n{found[0]}")
        return result
