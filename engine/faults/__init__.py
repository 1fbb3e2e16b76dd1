"""What happens after a step fails: recovery, the search for the cause, quarantine."""
