"""`jaxpaged diagnose`: what a log or a server's figures say is wrong, why, and what to change.

Readers turn a source into windows of time (`windows.py`), `rules.py` is the table of what may be wrong, `report.py` tells it.
"""
