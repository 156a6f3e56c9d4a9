"""Which format and resolution for a data set on this machine: measured, not looked up."""
