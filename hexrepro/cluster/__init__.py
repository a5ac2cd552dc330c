"""What answers the calls: instances, the time of their engine steps, and their KV memory."""

from hexrepro.cluster.latency import LatencyModel, fit_solo, fit_steps
from hexrepro.cluster.profiles import load_cluster, load_profile, read_profile, shipped_profiles
from hexrepro.cluster.types import Cluster, InstanceSpec, kv_blocks, kv_bytes_per_token

__all__ = [
    "Cluster",
    "InstanceSpec",
    "LatencyModel",
    "fit_solo",
    "fit_steps",
    "kv_blocks",
    "kv_bytes_per_token",
    "load_cluster",
    "load_profile",
    "read_profile",
    "shipped_profiles",
]
