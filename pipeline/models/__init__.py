"""Model factories by name, and small networks for CIFAR."""
