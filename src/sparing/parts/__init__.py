"""What methods are made of, in families: share, code, blend, size, train. Families never import each other."""
