"""Files, locks, addresses, mirrors and caches."""
