"""What more than one engine needs and no device: pure Python and numpy."""
