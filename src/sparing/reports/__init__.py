"""`sparing report`: figures are described once (`method_figures`, `inside_figures`, `snapshot_figures`) and drawn
twice: `svg` and `figure_files`."""
