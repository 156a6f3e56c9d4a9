"""From any image data set to a `.beton` file."""
