"""`jaxpaged generate --logprobs N --prompt-logprobs N --json`."""

import json
from collections.abc import Sequence

import pytest

from jaxpaged.commands.engine_api import Prompt
from jaxpaged.request import Logprob, RequestOutput, SamplingParams
from tests.cli.scripted_engine import ScriptedEngine, run_cli


class TellingEngine(ScriptedEngine):
    """Tells that the first of two tokens was as likely as it could be, and the second impossible."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, /, *, use_tqdm: bool) -> list[RequestOutput]:
        outputs = super().generate(prompts, params, use_tqdm=use_tqdm)
        sure, never = Logprob(0.0, 1, "a", b"a"), Logprob(-9999.0, 7, "\ufffd", b"\xf0")
        for output in outputs:
            output.prompt_logprobs = [None, {98: never, 97: sure}]
            output.outputs[0].logprobs = [{97: sure}]
        return outputs


def test_log_probabilities_are_printed_with_json_alone() -> None:
    engine = TellingEngine()
    result = run_cli("generate", "--json", "--logprobs", "0", "--prompt-logprobs", "1", "--max-tokens", "0", "ab", engine=engine)
    assert engine.params == [SamplingParams(max_tokens=0, logprobs=0, prompt_logprobs=1)]
    (record,) = map(json.loads, result.out.splitlines())
    sure = {"id": 97, "logprob": 0.0, "rank": 1, "text": "a", "bytes": [97]}
    assert record["logprobs"] == [[sure]]
    assert record["prompt_logprobs"] == [None, [{"id": 98, "logprob": -9999.0, "rank": 7, "text": "\ufffd", "bytes": [240]}, sure]]


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_without_json_they_are_refused(flag: str) -> None:
    engine = ScriptedEngine()
    result = run_cli("generate", flag, "2", "x", engine=engine)
    assert (result.status, engine.config) == (2, None)
    assert "--json" in result.sentence
