"""Several engines, each in a process with devices of its own, behind the face of one."""
