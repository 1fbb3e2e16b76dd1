"""Routing policies by name. Each is a pure function of what a router knows, the request and now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.routing import baselines, forecast
from octavo.engine.routing.request import Route, RouteRefusal, RouteRequest
from octavo.engine.routing.view import FleetView

RoutePolicy = Callable[[FleetView, RouteRequest, float], Route | RouteRefusal]
"""(what the router knows, the request, now in seconds) -> its replica, or why none takes it."""

POLICIES: dict[str, Callable[..., RoutePolicy]] = {
    "round_robin": baselines.round_robin,
    "least_work": baselines.least_work,
    "power_of_two": baselines.power_of_two,
    "prefix_affinity": baselines.prefix_affinity,
    "session_affinity": baselines.session_affinity,
    "forecast": forecast.forecast,
}
"""Makers of policies; their arguments are numbers, all with defaults."""


def get_live_policy(text: str, field: str) -> RoutePolicy:
    """As `get_route_policy`, of those that need nothing but what clients tell: not a session.

    Args:
        field: that errors name.
    """
    name = text.partition(":")[0].replace("-", "_")
    if name not in POLICIES or name == "session_affinity":
        allowed = ", ".join(each for each in POLICIES if each != "session_affinity")
        raise InvalidConfigError(field, text, allowed)
    return get_route_policy(text)


def get_route_policy(text: str) -> RoutePolicy:
    """The policy named by `text`, such as "least_work" or "prefix_affinity:most_gap=16".

    Raises:
        InvalidConfigError: no such policy, or a parameter that it does not have or allow.
    """
    name, _, rest = text.partition(":")
    name = name.replace("-", "_")
    if name not in POLICIES:
        raise InvalidConfigError("router", name, ", ".join(POLICIES))
    make = POLICIES[name]
    defaults: dict[str, float] = make.__kwdefaults__ or {}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in defaults or key in values:
            allowed = ", ".join(defaults) or "no parameters"
            raise InvalidConfigError("router", text, f"{name} with {allowed}, each once; not {key}")
        try:
            values[key] = float(value)
        except ValueError:
            raise InvalidConfigError(f"router.{key}", value, "a number") from None
        if not 0 <= values[key] < 1e9:
            raise InvalidConfigError(f"router.{key}", value, "a number from 0 to 1e9")
    return make(**values)
