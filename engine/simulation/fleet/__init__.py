"""Many replicas under one virtual time, behind routers that see them late."""
