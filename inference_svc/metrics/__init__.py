"""The service's metrics: one table, and the code that fills it at each scrape."""
