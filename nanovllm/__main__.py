"""`python -m nanovllm` and the command `nanovllm`."""

from nanovllm.engine.interrupts import ctrl_c_leaves


def main() -> None:
    with ctrl_c_leaves():
        from nanovllm.cli import main as run
    run()


if __name__ == "__main__":
    main()
