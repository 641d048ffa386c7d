"""Decoding with a drafter: candidate generation, the prefix schedules, cost tables, the engine for many requests, and
the hook into `generate`."""

from .candidate_generator_dspark import DSparkCandidateGenerator
from .cost_table_dspark import CostTable
from .engine_costs_dspark import EngineCosts
from .engine_dspark import DSparkEngine, EngineFull
from .global_schedule_dspark import GlobalScheduler
from .packed_target_dspark import PackedTarget
from .schedule_dspark import PrefixScheduler
from .statistics_dspark import DSparkStatistics


__all__ = [
    "CostTable",
    "DSparkCandidateGenerator",
    "DSparkEngine",
    "DSparkStatistics",
    "EngineCosts",
    "EngineFull",
    "GlobalScheduler",
    "PackedTarget",
    "PrefixScheduler",
]
