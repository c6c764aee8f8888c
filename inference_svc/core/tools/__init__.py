"""Tool calls in answers: the formats in which models write them, and their parsers."""
