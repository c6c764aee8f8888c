"""What operators see of a cache: sessions, blocks, lists. Changes nothing."""
