"""All layouts and their caches: opened, bounded, scrubbed, listed, erased; tenants' secrets."""
