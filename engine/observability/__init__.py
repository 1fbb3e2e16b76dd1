"""What a running engine shows of itself: its load, and what its loop does."""
