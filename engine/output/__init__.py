"""From committed tokens to what a user reads, and how outputs reach readers."""
