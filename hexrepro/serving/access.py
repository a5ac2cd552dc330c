"""Who may call: API keys and the tenants that they stand for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from hexrepro.serving.config import Tenant
from hexrepro.serving.protocol import Refused


class Access:
    """The tenants of the cluster file. Where they have keys, every client must bring one.

    default_limit  calls at a time of a tenant that has no limit of its own; 0 = any
    """

    def __init__(self, tenants: Sequence[Tenant], default_limit: int) -> None:
        self._tenants = {t.name: t for t in tenants}
        # digests: comparing those tells nothing of a key's length
        self._keys = [(_digest(t.key.encode()), t) for t in tenants if t.key]
        self._default_limit = default_limit

    def authorise(self, headers: Mapping[str, str]) -> Tenant | None:
        """The tenant whose key the client brought; None where there are no keys. Every key is compared, in constant time.
        Raises Refused."""
        if not self._keys:
            return None
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        offered = _digest(offered)
        found = None
        for key, tenant in self._keys:
            if hmac.compare_digest(key, offered):
                found = tenant
        if found is None:
            raise Refused(
                401,
                "The API key is missing or not valid.",
                code="invalid_api_key",
                more_headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def tenant_name(self, claimed: str, by_key: Tenant | None) -> str:
        """For whom the call is: the key decides; without keys, what the client says. Raises Refused."""
        if by_key is None:
            return claimed
        if claimed and claimed != by_key.name:
            raise Refused(403, "The API key is of another tenant.", param="tenant", code="wrong_tenant")
        return by_key.name

    def limit(self, name: str) -> int:
        """Calls that a tenant may have under way; 0 = any."""
        tenant = self._tenants.get(name)
        return (tenant.max_under_way if tenant else 0) or self._default_limit


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
