from regard.cli.main import main

main()
