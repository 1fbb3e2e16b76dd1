"""From what a user hands in to requests that the scheduler takes."""
