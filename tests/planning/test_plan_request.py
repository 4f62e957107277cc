"""Requests and answers are the same after a trip through JSON."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.case_graphs import load_case
from support.plan_requests import decoder_request, solved
from support.strategies import linked_decoder

from lowtide.errors import BudgetInfeasibleError, GraphFormatError, LowtideError, PlannerFailedError
from lowtide.planning.plan_request import Answer, PlanRequest

GRAPH, COSTS = linked_decoder(0.5)
REQUESTS = {
    "bytes": decoder_request(2**20),
    "without a budget": decoder_request(None, method="full"),
    "options": decoder_request("50%", options={"gap": 0.0, "node_limit": 7}),
    "published": decoder_request(None, method="every_n", options={"n": 3}),
    "cached": decoder_request(cache_dir=Path("/somewhere")),
    "tiers": PlanRequest(GRAPH, COSTS, "50%", offload={"disk": "1GiB"}),
    "traced": PlanRequest(*load_case("toy"), "50%"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_comes_back_as_it_was(name):
    request = REQUESTS[name]

    back = PlanRequest.from_json(request.to_json())

    assert back == request and back.to_json() == request.to_json()
    assert back.graph.fingerprint == request.graph.fingerprint


def test_a_damaged_graph_is_refused_when_it_arrives():
    request = decoder_request()
    damaged = replace(request, graph=replace(request.graph, events=request.graph.events[1:]))

    with pytest.raises(GraphFormatError, match="ops run once"):
        PlanRequest.from_json(damaged.to_json())


def test_a_plan_comes_back_byte_for_byte():
    plan = solved(REQUESTS["tiers"])
    answer = Answer(plan, final=False, cached=True, reason="why")

    back = Answer.from_json(answer.to_json())

    assert back == answer and isinstance(back.result, type(plan))
    assert back.result.to_json() == plan.to_json()


def test_errors_come_back_with_their_type_and_fields():
    infeasible = BudgetInfeasibleError("too little", budget_bytes=1, least_bytes=3, proven_bytes=2)

    back = Answer.from_json(Answer(infeasible).to_json()).result
    failed = Answer.from_json(Answer(PlannerFailedError("it broke")).to_json()).result

    assert isinstance(back, BudgetInfeasibleError) and vars(back) == vars(infeasible) and str(back) == "too little"
    assert isinstance(failed, PlannerFailedError) and isinstance(failed, LowtideError) and str(failed) == "it broke"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"plan":1}', '{"plan":"{}"}', '{"failed":"x","more":1}']
)
def test_what_is_no_answer_raises_what_is_expected_of_garbage(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Answer.from_json(text)
