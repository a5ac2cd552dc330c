"""What a client is told whose call the gateway does not take, or has given up, through no fault of the call."""

from __future__ import annotations

from hexrepro.serving.protocol import Refused
from hexrepro.serving.upstream import Failed


def queues_full(retry_after_s: float) -> Refused:
    return Refused(
        429,
        "All queues are full.",
        code="overloaded",
        kind="rate_limit_error",
        turned="overload",
        retry_after_s=retry_after_s,
    )


def tenants_limit(most: int) -> Refused:
    return Refused(
        429,
        f"The tenant has {most} calls under way, which is its limit.",
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        turned="tenant",
        retry_after_s=1,
    )


def draining() -> Refused:
    return Refused(503, "The gateway is shutting down.", code="draining", turned="draining", retry_after_s=1)


def nobody() -> Refused:
    return Refused(
        503, "No instance is available at present.", code="no_instance", turned="no_instance", retry_after_s=1
    )


def given_up(failure: Failed, attempts: int) -> Refused:
    if failure.kind == "busy":
        return Refused(
            429,
            "The instances are busy.",
            code="overloaded",
            kind="rate_limit_error",
            retry_after_s=max(1.0, failure.retry_after_s or 1.0),
        )
    return Refused(
        failure.status,
        f"{attempts} attempts failed, the last because {failure}."
        if attempts > 1
        else f"The call failed: {failure}.",
        code="upstream_timeout" if failure.kind == "timeout" else "upstream_failed",
    )
