"""What is asked of the cluster: queries, stages and LLM calls, their arrivals, SLOs and tenants."""

from hexrepro.workload.arrivals import PROCESSES, arrival_times
from hexrepro.workload.describe import describe, distinct_queries
from hexrepro.workload.generate import TraceTables, generate, load_tables, trace_names
from hexrepro.workload.readers import (
    load,
    read_parquet,
    read_released_json,
    write_parquet,
    write_released_json,
)
from hexrepro.workload.types import Workload, concat

__all__ = [
    "PROCESSES",
    "TraceTables",
    "Workload",
    "arrival_times",
    "concat",
    "describe",
    "distinct_queries",
    "generate",
    "load",
    "load_tables",
    "read_parquet",
    "read_released_json",
    "trace_names",
    "write_parquet",
    "write_released_json",
]
