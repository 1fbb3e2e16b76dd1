"""Writes deploy/grafana.json: `python deploy/make_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_R = "[$__rate_interval]"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(octavo:{name}_bucket{_R})))"


PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Requests", "short", {
        "running": "sum(octavo:num_requests_running)",
        "waiting": "sum(octavo:num_requests_waiting)",
        "in flight": "sum(octavo:num_requests_inflight)",
    }),
    ("Waiting, by class", "short", {"{{class}}": "sum by (class) (octavo:queue_requests)"}),
    ("Longest wait, by class", "s", {"{{class}}": "max by (class) (octavo:queue_oldest_seconds)"}),
    ("Tokens a second", "short", {
        "generated": f"sum(rate(octavo:generation_tokens_total{_R}))",
        "prompt": f"sum(rate(octavo:prompt_tokens_total{_R}))",
        "good": f"sum(rate(octavo:good_tokens_total{_R}))",
    }),
    ("Time to first token", "s", {
        "p50": _quantile(0.5, "time_to_first_token_seconds"),
        "p99": _quantile(0.99, "time_to_first_token_seconds"),
    }),
    ("Time between tokens", "s", {
        "p50": _quantile(0.5, "inter_token_latency_seconds"),
        "p99": _quantile(0.99, "inter_token_latency_seconds"),
    }),
    ("Targets met, by class", "percentunit", {
        "{{class}}": f'sum by (class) (rate(octavo:slo_requests_total{{met="true"}}{_R}))'
        f" / sum by (class) (rate(octavo:slo_requests_total{_R}))",
    }),
    ("Ends", "short", {
        "{{finished_reason}}":
            f"sum by (finished_reason) (rate(octavo:request_success_total{_R}))",
    }),
    ("Errors", "short", {
        "{{reason}}": f"sum by (reason) (rate(octavo:requests_refused_total{_R}))",
    }),
    ("KV cache", "percentunit", {
        "in use": "avg(octavo:kv_cache_usage_perc)",
        "held for nothing": "avg(octavo:kv_cache_waste_perc)",
        "prefix hits": f"sum(rate(octavo:prefix_cache_hits_total{_R}))"
        f" / sum(rate(octavo:prefix_cache_queries_total{_R}))",
    }),
    ("Preemptions", "short", {
        "{{kind}}": f"sum by (kind) (rate(octavo:preemptions_total{_R}))",
    }),
    ("Cost of preemptions, seconds a second", "percentunit", {
        "{{kind}}": f"sum by (kind) (rate(octavo:preemption_cost_seconds_total{_R}))",
    }),
    ("Device", "percentunit", {
        "idle though wanted": "avg(octavo:device_idle_perc)",
        "padding": "avg(octavo:padding_waste_perc)",
    }),
    ("Faults", "short", {
        "steps failed": f"sum(increase(octavo:step_failures_total{_R}))",
        "requests quarantined": f"sum(increase(octavo:requests_quarantined_total{_R}))",
        "compiles after ready": f"sum(increase(octavo:compiles_after_ready_total{_R}))",
    }),
    ("Health", "short", {"ready": "sum(octavo:ready)", "alive": "sum(octavo:alive)"}),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, two panels a row."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + place), "legendFormat": legend, "expr": expression}
                for place, (legend, expression) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, queries) in enumerate(PANELS)
    ]
    variable = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    return {
        "title": "Octavo", "uid": "octavo", "schemaVersion": 39, "version": 1, "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"}, "tags": ["octavo"],
        "templating": {"list": [variable]}, "panels": panels,
    }  # fmt: skip


if __name__ == "__main__":
    path = Path(__file__).with_name("grafana.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")
