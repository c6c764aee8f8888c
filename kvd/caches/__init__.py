"""All layouts and their caches: opened, bounded, scrubbed, erased; keys of tenants."""
