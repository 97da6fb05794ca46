from sparing.cli.app import main

main()
