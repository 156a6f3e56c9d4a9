"""Callbacks: what users run in the training loop, and those that Drivetrain ships."""
