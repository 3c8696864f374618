"""The family's example: two questions through the model's chat template, answered in one batch.

python example.py [model]
"""

import sys

from nanovllm import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=64))
    for prompt, output in zip(prompts, outputs):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output['text']!r}")
    llm.close()


if __name__ == "__main__":
    main()
