"""The caches of all layouts: opening, budgets, scrubbing, listing, erasing; tenants' secrets."""
