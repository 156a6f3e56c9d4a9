"""Start ranks as processes, and join their process group."""
