"""The `inference-svc` command: a module for each command or family, put together by `main.py`."""
