"""Ranks one after another: who has to run before whom. No process."""

from types import SimpleNamespace

import pytest

from lowtide.pretending.rank_runs import RankRuns, ranks_of
from lowtide.pretending.settings import PretendError, PretendSettings


class Pipeline:
    """Ranks that have ``stages`` each, of which every stage asks the one before it, which is of another rank."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.order = [(stage, stage % ranks) for stage in range(ranks * stages)]
        self.ran: list[int] = []

    def __call__(self, settings, sent):
        self.ran.append(settings.rank)
        counts: dict = {}
        for stage, rank in self.order:
            if rank != settings.rank:
                continue
            if stage:
                source = self.order[stage - 1][1]
                counts[source, rank] = counts.get((source, rank), 0) + 1
                if not (sent.folder / f"{source}-{rank}-{counts[source, rank]}").exists():
                    return SimpleNamespace(seen={"needs": {"rank": source, "count": counts[source, rank]}})
            if stage + 1 < len(self.order):
                to = self.order[stage + 1][1]
                counts[rank, to] = counts.get((rank, to), 0) + 1
                (sent.folder / f"{rank}-{to}-{counts[rank, to]}").write_text("")
                if sent.to == (to, counts[rank, to]):
                    break
        return SimpleNamespace(seen={"steps": 3})


@pytest.mark.parametrize(("ranks", "stages", "wanted"), [(1, 1, 0), (4, 1, 3), (3, 2, 0), (3, 2, 1), (4, 3, 2)])
def test_whoever_is_asked_runs_before(ranks, stages, wanted):
    pipeline = Pipeline(ranks, stages)

    with RankRuns(pipeline) as runs:
        found = runs.of(PretendSettings(ranks=ranks, rank=wanted))

    assert found.seen == {"steps": 3}
    assert len(pipeline.ran) <= (2 * ranks * stages) ** 2


def test_what_one_rank_has_sent_is_there_for_the_next():
    pipeline = Pipeline(4, 1)

    with RankRuns(pipeline) as runs:
        for rank in range(4):
            runs.of(PretendSettings(ranks=4, rank=rank))

    assert pipeline.ran == [0, 1, 2, 3] and not runs.ran_before


def test_what_nobody_sends_ends_the_run_with_its_own_error():
    asked: list = []

    def run(settings, sent):
        asked.append(settings.rank)
        return SimpleNamespace(seen={"needs": {"rank": 1 - settings.rank, "count": 1}})

    with RankRuns(run) as runs:
        assert runs.of(PretendSettings(ranks=2, rank=0)).seen["needs"]["rank"] == 1

    assert asked == [0, 1, 0]  # each waits for the other


@pytest.mark.parametrize(("text", "ranks"), [("3", (3,)), ("0,4,8", (0, 4, 8)), ("0-2,2,7", (0, 1, 2, 7))])
def test_ranks_are_written_as_numbers_and_ranges(text, ranks):
    assert ranks_of(text) == ranks


@pytest.mark.parametrize("text", ["all", "", "3-1", "-1"])
def test_what_is_no_rank_is_refused(text):
    with pytest.raises(PretendError, match="write a rank, several as 0,4,8, or a range as 0-7"):
        ranks_of(text)
