"""Images sampled at points and at other sizes."""
