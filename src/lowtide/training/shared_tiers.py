"""The tiers that all plans of one model share: how fast their links are, how full they may get, what is open."""

from collections.abc import Callable

from lowtide.device import values_off
from lowtide.device.names import is_accelerator
from lowtide.errors import TierError
from lowtide.estimation.device_table import device_named
from lowtide.graph.costs import HOST, Link
from lowtide.measurement.links import measured_link
from lowtide.options import Offload
from lowtide.plan import Plan
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tape.offload.tiers import Tier, Tiers

_LATENCY_MS = 0.01  # of a copy on a device that is not there


class SharedTiers:
    """Tiers of one model.

    Attributes:
        capacities: Most bytes of each that plans may use; empty where there are none, or where they failed.
    """

    def __init__(self, device: str, policy: Offload, capacities: dict[str, int], say: Callable[[str], None]) -> None:
        self._device, self._policy, self._say = device, policy, say
        self.capacities = capacities
        self._open: dict[str, Tier] = {}

    def links(self) -> dict[str, Link]:
        """The link to each tier, measured at first and then known. Raises: TierError: one cannot be used."""
        return {tier: self._link(tier) for tier in self.capacities}

    def _link(self, tier: str) -> Link:
        if values_off.times_of and tier == HOST:
            rate = device_named(values_off.times_of).host_link_bytes_per_s
            return Link(rate, rate, _LATENCY_MS)
        return measured_link(tier, self._device, self._policy.scratch_dir)

    def measure_ahead(self) -> None:
        """Measure links that take memory of the device, so that no step has to find room for it.

        Raises: TierError: a tier that somebody asked for cannot be used.
        """
        if not is_accelerator(self._device):
            return
        try:
            self.links()
        except TierError as error:
            self.give_up(error)

    def open_for(self, plan: Plan) -> Tiers:
        """The tiers that ``plan`` offloads to. Raises: TierError: one cannot be used."""
        tiers = open_tiers(plan, self._policy, self.capacities, self._open)
        self._open.update(tiers)
        return tiers

    def give_up(self, error: TierError) -> None:
        """Plan without tiers that failed and that nobody asked for. Raises: TierError: somebody did."""
        if not self._policy.is_automatic or not self.capacities:
            raise error
        self.drop(error)

    def drop(self, error: TierError) -> None:
        """Plan without tiers from now on: one of them failed."""
        self._say(f"planned without other tiers: {str(error).splitlines()[0]}")
        self.capacities.clear()
        self._open.clear()
