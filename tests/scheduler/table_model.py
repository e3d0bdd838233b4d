"""A model made of arithmetic: what every request has to answer, worked out without any engine.

Each token has a number that depends on its whole history, as keys and values do; the next token is a function of that
number and of the request's seed. Requests with another cache salt have other numbers for the same tokens, so that a page
shared between salts shows.
"""

from jaxpaged.request import FinishReason, Request, SamplingParams

MODULUS = (1 << 61) - 1
VOCAB = 9
END_TOKENS = frozenset({7, 8})


def advance(history: int, token_id: int) -> int:
    """The number of a token that follows `history`."""
    return (history * 1_000_003 + token_id * 7_919 + 12_345) % MODULUS


def root(salt: str | None) -> int:
    """The history before the first token."""
    history = 0
    for letter in salt or "":
        history = advance(history, ord(letter))
    return history


def next_token(history: int, seed: int = 0) -> int:
    """The scripted model: an end token once in 32 tokens or so, otherwise one of 7."""
    drawn = advance(history, seed) if seed else history
    return 7 + drawn % 2 if (drawn >> 7) % 32 == 0 else (drawn >> 13) % 7


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int | None = 16,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    eos_token_ids: frozenset[int] = END_TOKENS,
    **fields: object,
) -> Request:
    """A request; `fields` are those of `Request`."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    fields = {"seed": 0, "arrival_s": 0.0} | fields
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params, eos_token_ids=eos_token_ids, **fields)  # type: ignore[arg-type]


class Truth:
    """What the tokens of a request are and which numbers they have, on and on: the model does not know where answers end."""

    def __init__(self, request: Request) -> None:
        self._seed = request.seed
        self.tokens = list(request.prompt_token_ids)
        self.numbers: list[int] = []
        self._last = root(request.cache_salt)
        self._advance()

    def reach(self, num_tokens: int) -> None:
        """Makes sure that the first `num_tokens` tokens and their numbers are there."""
        while len(self.numbers) < num_tokens:
            self.tokens.append(next_token(self._last, self._seed))
            self._advance()

    def sampled_after(self, num_tokens: int) -> int:
        """The id that comes out when the first `num_tokens` are computed."""
        self.reach(num_tokens + 1)
        return self.tokens[num_tokens]

    def _advance(self) -> None:
        for token_id in self.tokens[len(self.numbers) :]:
            self._last = advance(self._last, token_id)
            self.numbers.append(self._last)


def solo_answer(request: Request, *, max_model_len: int, num_slots: int) -> tuple[list[int], FinishReason]:
    """The answer to `request` as the rules say it, worked out without an engine.

    Args:
        request: what is asked.
        max_model_len: tokens of prompt and answer at most.
        num_slots: tokens of one sequence that the whole page pool holds.
    """
    params, prompt = request.params, request.prompt_token_ids
    truth = Truth(request)
    answer: list[int] = []
    while True:
        token_id = truth.sampled_after(len(prompt) + len(answer))
        answer.append(token_id)
        ends = token_id in request.eos_token_ids and not params.ignore_eos
        if (ends or token_id in (params.stop_token_ids or ())) and len(answer) >= params.min_tokens:
            return answer, FinishReason.STOP
        total = len(prompt) + len(answer)
        # The last token is not stored, so one token more than the pool holds can come out.
        if len(answer) == params.max_tokens or total == max_model_len or total == num_slots + 1:
            return answer, FinishReason.LENGTH
