"""Starting ranks as processes, and joining their process group."""
