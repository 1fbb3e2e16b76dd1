"""The `octavo` command: one module a subcommand; `main` says what each must have."""
