from sparing.ui.cli import main

main()
