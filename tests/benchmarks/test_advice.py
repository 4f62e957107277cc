"""The answers of a page are what the command printed; what is left out is said."""

import advice
import pytest
from advice_text import SHOWN, answer_text

WAYS = [f"  {number} tokens a second" for number in range(9, 1, -1)]


def lines_of(text):
    return [{"name": "7b", "command": "lowtide advise --model m", "text": text}]


def test_ways_beyond_the_first_are_counted_and_the_rest_is_whole():
    text = "\n".join(["m on a device.", *WAYS, "From the first:", "  --chunk-loss  +1 %", "Times may be off."])

    shown = answer_text("7b", lines_of(text)).splitlines()

    assert shown[:3] == ["```text", "$ lowtide advise --model m", "m on a device."]
    assert shown[3 : 3 + SHOWN] == WAYS[:SHOWN] and shown[3 + SHOWN] == f"  ({len(WAYS) - SHOWN} more ways)"
    assert shown[4 + SHOWN :] == ["From the first:", "  --chunk-loss  +1 %", "Times may be off.", "```"]


def test_an_answer_with_few_ways_is_whole():
    text = "\n".join(["m on a device.", "None fits.", "Nearest: bf16", "With one change more:", *WAYS])

    assert text in answer_text("7b", lines_of(text))


def test_a_question_without_an_answer_is_noticed():
    with pytest.raises(ValueError):
        answer_text("70b", lines_of(""))


def test_five_questions_are_asked():
    assert len(advice.QUESTIONS) == 5
