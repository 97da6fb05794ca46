"""Where rows of clients live, and files that are whole or not there."""
