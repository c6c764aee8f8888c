"""What both processes serve besides their work: guards of calls, metrics, health, traces, HTTP."""
