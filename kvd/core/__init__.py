"""The pure cache engine (D1): sessions, blocks, slots, leases. No I/O, no clock, no asyncio."""
