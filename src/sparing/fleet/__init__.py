"""Who is there when, on what link, and who lies."""
