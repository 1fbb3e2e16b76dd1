"""Which replica takes a request: a pure function, for processes, fronts and simulations alike."""
