"""`python -m nanovllm` is the `nanovllm` command."""

from nanovllm.cli import main

if __name__ == "__main__":
    main()
