"""How clients train."""
