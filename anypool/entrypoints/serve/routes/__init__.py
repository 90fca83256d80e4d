"""One file per API, each with its `ROUTES`; `table.py` has them all."""
