"""Templates of projects: files that `drivetrain new` writes, one folder for each task."""
