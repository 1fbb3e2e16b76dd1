"""Whose call this is: what a protocol's gate knows of it, and what the door makes of that."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from octavo.engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a credential.

    Attributes:
        owner: its requests belong to it, and it alone may abort them; empty where the server asks
            for no token. It holds no secret.
        tenant: that the token file names; None where it names none.
        reserved: tenants that the token file names: no other caller may claim them.
    """

    owner: str = ""
    tenant: str | None = None
    reserved: frozenset[str] = field(default=frozenset(), repr=False)

    def tenant_of(self, claimed: str) -> str:
        """The tenant of a request that claims to be of one; empty claims nothing.

        Raises:
            InvalidRequestError: it is another's.
        """
        if self.tenant is not None:
            if claimed not in ("", self.tenant):
                allowed = f"{self.tenant!r}, the tenant of the token, or not given"
                raise InvalidRequestError("tenant", claimed, allowed)
            return self.tenant
        if claimed in self.reserved:
            raise InvalidRequestError("tenant", claimed, "a tenant that has no token of its own")
        return claimed


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Of the current call. Each protocol's gate sets it, before anything reads the call's message."""
