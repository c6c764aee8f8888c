"""Serving apart from the work itself: guards of calls, metrics, health, traces, HTTP."""
