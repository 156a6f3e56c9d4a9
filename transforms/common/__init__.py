"""What several transforms share."""
