"""The files of a run folder."""
