"""What requests bring: their bodies, member by member, whichever API they speak."""
