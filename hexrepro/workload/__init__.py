"""What is asked of the cluster: queries, stages and LLM calls, their arrivals, SLOs and tenants."""

from hexrepro.workload.arrivals import PROCESSES, arrival_times, read_times_s
from hexrepro.workload.describe import describe, distinct_queries
from hexrepro.workload.formats import FORMATS, Loaded, load, read, write
from hexrepro.workload.formats.parquet import read_parquet, write_parquet
from hexrepro.workload.formats.released_json import read_released_json, write_released_json
from hexrepro.workload.generate import TraceTables, generate, load_tables, trace_names
from hexrepro.workload.mix import interleave, with_cached_share, with_random_tenants
from hexrepro.workload.types import Workload, concat

__all__ = [
    "FORMATS",
    "PROCESSES",
    "Loaded",
    "TraceTables",
    "Workload",
    "arrival_times",
    "concat",
    "describe",
    "distinct_queries",
    "generate",
    "interleave",
    "load",
    "load_tables",
    "read",
    "read_parquet",
    "read_released_json",
    "read_times_s",
    "trace_names",
    "with_cached_share",
    "with_random_tenants",
    "write",
    "write_parquet",
    "write_released_json",
]
