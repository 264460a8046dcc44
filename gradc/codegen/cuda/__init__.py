"""Programs as CUDA, and the launches that run them."""
