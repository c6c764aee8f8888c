"""kvd's messages as tables and lines for people, shared by the commands and `kvd top`."""
