"""How the coordinator believes and forgets."""

from __future__ import annotations

from dataclasses import dataclass

from hexrepro.serving.ranges import check_numbers


@dataclass(frozen=True)
class Options:
    """The part `coordinator` of the gateway's settings.

    slo_s         SLO of a query that brings none, seconds from its arrival to its end
    window        finished calls of a stage whose median length is believed; 0 = the beliefs it started with stay
    plan_window   finished queries from which is learned what follows a stage; 0 = as above
    output_tokens belief about a stage before any call of it has finished
    idle_s        a query without calls under way ends after this time without a new one
    max_calls     calls of one query; a further one begins a new query of the same id
    speed_window  finished calls whose pace is held against the latency model, to correct an instance's speed; 0 = never
    max_stages    distinct stage names; calls of further ones share the stage `other`
    max_tenants   the same for tenants
    seed          for rules that draw
    """

    slo_s: float = 60.0
    window: int = 100
    plan_window: int = 200
    output_tokens: float = 256.0
    idle_s: float = 60.0
    max_calls: int = 1000
    speed_window: int = 0
    max_stages: int = 64
    max_tenants: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "coordinator", zero=("window", "plan_window", "speed_window", "seed"))
