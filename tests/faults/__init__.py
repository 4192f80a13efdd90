"""The chaos suite: seeded faults against real clusters, and what must hold after each round (docs/faults.md).

`plan.py` decides what happens, from a seed alone; `catalog.py` is what may be asked; `driver.py` does it through the
clients of `ipc_client.py` and `http_client.py`; `judge.py` and `checks.py` say what is wrong; `report.py` counts.
`planted/` are clusters with one bug each, which must all be found.
"""
