"""Decoding with a drafter: candidate generation, the prefix schedule, the cost table, and the hook into `generate`."""

from .candidate_generator_dspark import DSparkCandidateGenerator
from .cost_table_dspark import CostTable
from .schedule_dspark import PrefixScheduler
from .statistics_dspark import DSparkStatistics


__all__ = ["CostTable", "DSparkCandidateGenerator", "DSparkStatistics", "PrefixScheduler"]
