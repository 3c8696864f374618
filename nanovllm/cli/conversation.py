"""`nanovllm chat`: a conversation in the terminal. Works on piped lines too (then without prompts)."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

from nanovllm.cli.stream import InOrder, SpeedMeter, note, run_requests
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

HELP = """\
/reset  forget the conversation
/stats  tokens, speed and cache so far
/help   this text
/exit   leave (as does Ctrl-D)
Ctrl-C stops an answer; anything else you type is sent to the model."""


class Chat:
    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        if engine.tokenizer is None or not getattr(engine.tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template: use `nanovllm generate`")
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.params = params
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.opening)
        self.outputs: list[RequestOutput] = []
        self.speed = SpeedMeter(engine)
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and history in input())
            note("/help lists the commands, Ctrl-D leaves")
        while (line := self.read()) is not None:
            line = line.strip()
            if re.fullmatch(r"/\w+", line):
                if line == "/exit":
                    break
                self.command(line)
            elif line:
                self.answer(line)

    def read(self) -> str | None:
        """The next line; None when there is no more."""
        if not self.interactive:
            try:
                return sys.stdin.readline() or None
            except UnicodeDecodeError as error:
                raise RequestError(f"standard input: is not text in {error.encoding}") from None
        try:
            return input("> ")
        except EOFError:
            note("")
            return None
        except KeyboardInterrupt:  # the habit of clearing a line; leaving by accident would lose the conversation
            note("\nCtrl-D or /exit leaves")
            return ""

    def command(self, name: str) -> None:
        if name == "/reset":
            self.messages = list(self.opening)
            note("the conversation is forgotten")
        elif name == "/stats":
            blocks = self.engine.scheduler.blocks
            note(f"answers: {len(self.outputs)} | {self.speed.line(self.outputs)}")
            # Between answers no block is owned, but the conversation is still found in them.
            note(
                f"KV cache: {blocks.num_blocks} blocks of {blocks.block_size} tokens, "
                f"{blocks.num_hits} of {blocks.num_queries} prompt tokens were found in it"
            )
        elif name == "/help":
            note(HELP)
        else:
            note(f"unknown command {name}\n{HELP}")

    def answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        request_id = f"chat-{len(self.outputs)}"
        try:
            parsed = self.engine.check({"prompt_token_ids": self.engine.inputs.render_chat(messages)}, self.params)
        except RequestError as error:
            note(f"error: {error}; /reset starts anew")
            return
        printer = InOrder([request_id], [""], n=1)
        outputs, interrupted = run_requests(self.engine, [parsed], self.params, [request_id], printer.show)
        if interrupted:
            printer.end()
            note("(stopped)")
        self.outputs += outputs
        answer = outputs[0].outputs[0]
        content = answer.text
        if answer.finish_reason == "stop" and answer.stop_reason is None:  # by eos, which the template writes itself
            content = content.removesuffix(self.tokenizer.decode(answer.token_ids[-1:]))
        self.messages = [*messages, {"role": "assistant", "content": content}]
