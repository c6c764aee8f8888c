"""Touches the world: torch, the arena, files. Imports `core`, never the service or the server."""
