"""A checkpoint's tensors and files, the thread that writes them, and an adapter's base."""
