"""From logits to a token: processors, warpers and noise as tensor code over static shapes."""
