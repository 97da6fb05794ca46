"""`sparing report`: figures are described once (`curves`, `insides`, `views`) and drawn twice: `svg` and `files`."""
