"""Views of the cache for operators: sessions, blocks, listings. Changes nothing."""
