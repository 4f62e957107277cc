"""Links are measured once a machine; whatever is wrong with the file, they are measured again."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from lowtide.graph.costs import Link
from lowtide.measurement import link_cache, links
from lowtide.measurement.link_cache import VALID_S, key_of, path, recall, remember
from lowtide.measurement.links import measured_link

SLOW = Link(1e8, 2e8, 0.25)


@pytest.fixture
def measured(monkeypatch):
    """How often a link was measured, in what counts as a new process."""
    times = []

    def measure(directory):
        times.append(directory)
        return Link(1e8 * len(times), 2e8)

    monkeypatch.setattr(links, "_disk", measure)
    monkeypatch.setattr(links, "_known", {})
    return times


def as_in_a_new_process():
    links._known.clear()


def test_a_link_is_measured_once_a_machine_and_not_once_a_process(measured, tmp_path):
    first = measured_link("disk", "cpu", tmp_path)
    as_in_a_new_process()

    assert measured_link("disk", "cpu", tmp_path) == first and len(measured) == 1
    as_in_a_new_process()
    beside = tmp_path / "beside"
    beside.mkdir()
    assert measured_link("disk", "cpu", beside) == first and len(measured) == 1  # the same file system


def test_refresh_measures_again_and_stores_the_result(measured, tmp_path):
    measured_link("disk", "cpu", tmp_path)

    again = measured_link("disk", "cpu", tmp_path, refresh=True)
    as_in_a_new_process()

    assert len(measured) == 2 and measured_link("disk", "cpu", tmp_path) == again == Link(2e8, 2e8)


def test_what_was_measured_long_ago_or_in_the_future_is_measured_again(measured, tmp_path, monkeypatch):
    measured_link("disk", "cpu", tmp_path)
    now = time.time()

    for then in (now + VALID_S + 60, now - 60):
        as_in_a_new_process()
        monkeypatch.setattr(link_cache.time, "time", lambda then=then: then)
        measured_link("disk", "cpu", tmp_path)
    assert len(measured) == 3


@pytest.mark.parametrize("changed", ["node", "torch", "file system"])
def test_another_host_torch_or_file_system_has_links_of_its_own(measured, tmp_path, monkeypatch, changed):
    measured_link("disk", "cpu", tmp_path)
    as_in_a_new_process()
    other = SimpleNamespace(st_dev=os.stat(tmp_path).st_dev + 1)

    if changed == "node":
        monkeypatch.setattr(link_cache.platform, "node", lambda: "elsewhere")
    elif changed == "torch":
        monkeypatch.setattr(link_cache.torch, "__version__", "99.0")
    else:
        monkeypatch.setattr(link_cache, "os", SimpleNamespace(**{**vars(os), "stat": lambda _: other}))
    measured_link("disk", "cpu", tmp_path)

    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"version": 2, "links": {}}', '{"version": 1, "links": []}',
        '{"version": 1, "links": {"KEY": 3}}', '{"version": 1, "links": {"KEY": [1, 2]}}',
        '{"version": 1, "links": {"KEY": ["a", 2, 3, 4]}}',
        '{"version": 1, "links": {"KEY": [-1, 1, 0, NOW]}}', '{"version": 1, "links": {"KEY": [1, 0, 0, NOW]}}',
        '{"version": 1, "links": {"KEY": [Infinity, 1, 0, NOW]}}', '{"version": 1, "links": {"KEY": [NaN, 1, 0, NOW]}}',
        '{"version": 1, "links": {"KEY": [1, 1, -1, NOW]}}', "\x00" * 100, "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_over(measured, tmp_path, content):
    key = key_of("disk", "cpu", tmp_path)
    path().parent.mkdir(parents=True)
    path().write_text(content.replace("KEY", key).replace("NOW", str(time.time())))

    found = measured_link("disk", "cpu", tmp_path)

    assert len(measured) == 1 and recall(key) == found


@pytest.mark.parametrize("where", ["/proc/self/nothing", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_done_without(measured, tmp_path, monkeypatch, where):
    monkeypatch.setenv("XDG_CACHE_HOME", where)

    assert measured_link("disk", "cpu", tmp_path) == Link(1e8, 2e8)
    as_in_a_new_process()
    measured_link("disk", "cpu", tmp_path)
    assert len(measured) == 2


def test_others_entries_stay_up_to_a_limit_and_nothing_else_is_left_in_the_directory():
    for i in range(100):
        remember(f"key {i}", SLOW)

    assert recall("key 99") == recall("key 40") == SLOW and recall("key 0") is None
    assert [p.name for p in path().parent.iterdir()] == ["links.json"]
    assert len(json.loads(path().read_text())["links"]) == 64


def test_a_cache_directory_that_is_not_absolute_is_not_used(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somebody")

    assert str(path()) == "/somebody/.cache/lowtide/links.json"
