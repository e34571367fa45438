"""lm-eval with `local-completions`: log-likelihoods and generated texts."""

import os

from asked import ANSWER, MODEL, QUESTION, THOUGHT
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url = f"{os.environ['OPENAI_BASE_URL']}/completions"
model = LocalCompletionsAPI(model=MODEL, base_url=url, tokenizer=MODEL)
prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n"


def instances(kind: str, *arguments: object) -> list[Instance]:
    return [Instance(kind, {}, (prompt, argument), 0) for argument in arguments]


(right, is_right), (wrong, is_wrong) = model.loglikelihood(instances("loglikelihood", ANSWER, "It is cold."))
assert -0.1 < right <= 0
assert wrong < -10
assert (is_right, is_wrong) == (True, False)
assert model.generate_until(instances("generate_until", {"until": ["\n"], "max_gen_toks": 64})) == [ANSWER]
