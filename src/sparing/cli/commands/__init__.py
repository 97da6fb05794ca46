"""The commands of `sparing`, a function each; `sparing.cli.app` puts them together."""
