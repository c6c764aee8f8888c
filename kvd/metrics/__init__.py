"""kvd's metrics: the table of all metrics, and their values at a scrape."""
