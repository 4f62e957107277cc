"""Changes of a command that can be made from outside."""

import pytest

from lowtide.pretending.advice import half_the_batch


@pytest.mark.parametrize(
    ("command", "smaller"),
    [
        ("python t.py --batch_size 8", "python t.py --batch_size 4"),
        ("python t.py --batch_size=12 --lr=8", "python t.py --batch_size=6 --lr=8"),
        ("t --per_device_train_batch_size 8 --gradient_accumulation_steps 2",
         "t --per_device_train_batch_size 4 --gradient_accumulation_steps 4"),
        ("t --training.local_batch_size 2", "t --training.local_batch_size 1"),
        ("t --micro-batch-size 4", "t --micro-batch-size 2"),
        ("t train.batch_size=4", "t train.batch_size=2"),
        ("t --batch-size 1 --gradient-accumulation-steps 2", None),
        ("t --batch-size lots", None),
        ("t --eval_batches 8", None),
        ("t 8", None),
    ],
)  # fmt: skip
def test_half_the_batch_is_found_where_the_command_says_it_as_a_number(command, smaller):
    found = half_the_batch(command.split())

    assert (found and " ".join(found)) == smaller
