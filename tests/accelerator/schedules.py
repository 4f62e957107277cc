"""When the work of a stream runs. Apart from the device, so that tests can name schedules before it is built."""

from enum import IntEnum


class Policy(IntEnum):
    """When the work of a stream runs."""

    EARLY = 0  # when it is enqueued
    LATE = 1  # when something waits for it
    RANDOM = 2  # some time between


EARLY, LATE, RANDOM = Policy

# (default streams, other streams). A missing wait needs the right one of the last two to be seen: there one side runs
# ahead of the other. On the first the device is a synchronous one, and nothing is seen.
SCHEDULES = ((EARLY, EARLY), (LATE, LATE), (RANDOM, RANDOM), (LATE, EARLY), (EARLY, LATE))


def schedule_name(schedule: tuple[Policy, Policy]) -> str:
    """For test ids."""
    return "-".join(policy.name.lower() for policy in schedule)
