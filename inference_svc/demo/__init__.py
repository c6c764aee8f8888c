"""The demo: real conversations through the real pair, each answer checked against recomputation."""
