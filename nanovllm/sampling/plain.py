"""Which requests draw plainly: by temperature alone (or greedily), with nothing to edit, filter or report.

Such rows need no host: on a GPU one kernel samples them inside the captured graph. The rule is a fact of the request,
never of the batch, so that a seed gives the same tokens whatever else runs.
"""

from __future__ import annotations

from nanovllm.sampling_params import SamplingParams


def is_plain(params: SamplingParams) -> bool:
    return (
        params.logprobs is None
        and params.prompt_logprobs is None
        and (params.is_greedy or (params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0))
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and params.min_tokens == 0
        and not params.logit_bias
        and not params.bad_words
        and params.allowed_token_ids is None
        and params.structured_outputs is None
    )
