"""Memory and speed of a pair of models before any weights are loaded."""
