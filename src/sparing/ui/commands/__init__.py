"""The commands of `sparing`, a function each; `sparing.ui.cli` puts them together."""
