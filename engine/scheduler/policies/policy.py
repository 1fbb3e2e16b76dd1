"""The former name of `octavo.engine.scheduler.policy`, by which users' own policies import it."""

from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policy import (
    HOPELESS,
    Admission,
    Policy,
    Refusal,
    Snapshot,
    TenantTurns,
)

__all__ = ["HOPELESS", "Admission", "Place", "Policy", "Refusal", "Snapshot", "TenantTurns"]
