"""Octavo's own policy: the most requests within their targets, and nobody for ever without.

Order: by due time plus `gamma` seconds for each second of the machine that a request still takes,
so that of two requests due alike the smaller goes first. Admission: a request that cannot be in
time is rejected; when not all can, the largest give way (Moore–Hodgson). Chunks: as large as the
smallest banked slack of a running row allows. Victims: the cheapest to lose for each page, and only
if the machine gains by it. A request that has waited `max_wait_s` comes first.

The decisions are in `slo_policy.py`. What they are reckoned with has modules of its own:
`admission.py`, `slack.py`, `pace.py`, `victims.py`.
"""
