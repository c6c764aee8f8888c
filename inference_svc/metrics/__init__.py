"""The service's metrics: one table, and where its values come from."""
