"""A mixture of experts on a card that does not hold it: the estimate first, then two prompts and what the experts cost.

python example_mixtral.py --model DIR --gpu-memory-gb 11
"""

import argparse
import sys
import time

from nanovllm import LLM, NanoVLLMError, SamplingParams
from nanovllm.cli.plan import make_estimate, show_estimate
from nanovllm.memory.options import PlanOptions

PROMPTS = ["The state of our union is", "My fellow Americans, this year"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with Mixtral or Qwen3-MoE")
    parser.add_argument("--gpu-memory-gb", type=float, default=11, help="behave as on a card of this size")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    estimate = make_estimate(PlanOptions(model=args.model, gpu_memory_gb=args.gpu_memory_gb))
    show_estimate(estimate)
    if estimate.tiers is None:
        sys.exit(1)  # show_estimate has printed what is missing

    with LLM(**estimate.settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        started = time.perf_counter()
        outputs = llm.generate(PROMPTS, params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - started

    for prompt, output in zip(PROMPTS, outputs):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tok/s, prompts included")
    experts = getattr(outputs[-1].metrics, "experts", None)  # None: all experts stayed on the device
    for name, value in (experts or {"experts": "all resident"}).items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    try:
        main()
    except NanoVLLMError as error:
        sys.exit(f"error: {error}")
