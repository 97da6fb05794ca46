"""A real federation: the same study, with clients on machines of their own and only bytes between them."""
