"""One file for each verb of `python -m anyqlora`; each has `main(argv) -> exit code`."""
