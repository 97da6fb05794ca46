"""The named methods, a few lines and one file each."""
