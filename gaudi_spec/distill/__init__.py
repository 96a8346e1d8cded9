"""Training a small draft for a target: `gaudi-spec distill`."""
