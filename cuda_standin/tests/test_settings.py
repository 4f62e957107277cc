"""The environment variables: what has no meaning is one sentence."""

import pytest

from cuda_standin import settings


def test_what_is_not_set_is_right():
    settings.check({"PATH": "/bin"})
    settings.check({"STANDIN_GPU": "l4", "STANDIN_MEMORY": "4096", "STANDIN_LATE": "side", "STANDIN_VALUES": "0"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("STANDIN_GPU", "h101", "STANDIN_GPU='h101': no such GPU; there are h100, "),
        ("STANDIN_MEMORY", "4GiB", "STANDIN_MEMORY='4GiB': give a whole number."),
        ("STANDIN_VALUES", "no", "STANDIN_VALUES='no': give 0 or 1."),
        ("STANDIN_LATE", "kernels", "STANDIN_LATE='kernels': give copies, side, default or all."),
        ("STANDIN_GPUS", "2", "STANDIN_GPUS: the stand-in has no such variable; it has "),
    ],
)
def test_a_variable_without_meaning_is_one_sentence(name, value, says):
    with pytest.raises(settings.StandinError) as error:
        settings.check({name: value})
    assert str(error.value).startswith(says)


def test_every_variable_of_the_table_is_known_and_every_known_one_is_in_it():
    rows = {line.split("``")[1] for line in settings.__doc__.splitlines() if line.startswith("| ``STANDIN")}
    assert rows == {*settings.NUMBERS, *settings.FLAGS, *settings.OTHERS}


def test_the_gpus_that_people_name_are_there():
    assert {"h100", "a100", "l4", "rtx4090", "v100"} <= set(settings.gpu_names())
