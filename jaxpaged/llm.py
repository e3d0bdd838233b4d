"""The Python API for programs that wait: `LLM.generate` is a loop over `Engine.step`, nothing else."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxpaged.api import as_conversations, as_prompts, failed_output, one_each, open_own_sinks, priority_each, settle_config
from jaxpaged.beam_requests import BeamRequests, check_concurrency, run_searches
from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.config import Config
from jaxpaged.embeddings import EmbeddingRequestOutput, check_pooling, embedding_of
from jaxpaged.engine_turns import EngineTurns
from jaxpaged.errors import InvalidRequestError, JaxpagedError
from jaxpaged.events import Sink
from jaxpaged.host_limits import prepare_process
from jaxpaged.intake import Continuation, Messages, Prompt
from jaxpaged.interrupts import Interrupt
from jaxpaged.metrics import EngineMetrics, Metric
from jaxpaged.operator_calls import OperatorCalls
from jaxpaged.progress_bar import progress_bar
from jaxpaged.request import Pooling, Request, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.scoring import ContinuationScore, as_pairs, check_gives_logprobs, score_of
from jaxpaged.start import start_engine
from jaxpaged.tokenizer import Tokenizer


class LLM(OperatorCalls):
    """A model, ready to generate, in this process.

    `LLM("smollm2-135m", max_model_len=2048)`: keyword arguments carry vLLM's names; `config` gives the whole tree instead. Use it as a
    context manager, or call `close()` to give the memory back. Calls from several threads take turns.

    Args:
        model: short name, folder, .gguf file, hub id or pypi:package.
        config: every option at once; excludes keyword arguments.
        sinks: take every event; None shows the start-up on a terminal and warnings on standard error.
        kwargs: any of `option_aliases.ALIASES`, or a section with its fields (`cache={"page_size": 32}`).

    Raises:
        JaxpagedError: the options, the model or the memory; one sentence.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, sinks: Sequence[Sink] | None = None, **kwargs: Any
    ) -> None:
        self.config = settle_config(model, config, kwargs)
        prepare_process(self.config)
        self._own_sinks: list[Sink] = []
        if sinks is None:
            self._own_sinks = open_own_sinks(self.config, is_quiet=config is None)
        self._metrics = EngineMetrics()
        try:
            self._engine, self._intake = start_engine(self.config, (*self._own_sinks, *(sinks or ()), self._metrics))
        except BaseException:
            self._close_sinks()
            raise
        self._turns = EngineTurns(self._engine)

    @property
    def engine(self) -> Any:
        """The engine behind it, for whoever wants to drive `step` alone."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts and returns their outputs in the same order.

        Args:
            prompts: one or many: texts, lists of token ids, {"prompt": ...} or {"prompt_token_ids": ...}. With a "cache_salt" beside
                it, an object shares cached pages only with those of the same salt.
            sampling_params: one for all or one each; None takes the model's defaults.
            use_tqdm: show a progress bar on a terminal.
            priority: one for all or one each; lower goes first, None is 0.
            on_error: "raise" refuses the whole call when a prompt is bad, before any work; "return" gives an output with
                `finish_reason` error for it and completes the others.

        Raises:
            InvalidRequestError: a bad prompt or parameter, by index (also a ValueError).
            RequestFailedError: never; a request that fails inside the engine has `finish_reason` error.
            EnginePausedError: the engine is paused or asleep.
            EngineDeadError: the engine stopped.
        """
        several = as_prompts(prompts)
        return self._generate(several, several.__getitem__, sampling_params, use_tqdm, priority, on_error)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Continuation | Sequence[Continuation],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[ContinuationScore]:
        """How likely each continuation of its prompt is, in the model's own numbers, in the order of the continuations.

        Two texts are tokenized as one, spaces at the end of the prompt counted to the continuation. Pages of the prompt come from the
        prefix cache, so many continuations of one prompt cost little more than one.

        Args:
            prompts: one for all or one each, as for `generate`.
            continuations: one or many: texts or lists of token ids.
            use_tqdm: show a progress bar on a terminal.
            priority: one for all or one each; lower goes first.

        Raises:
            InvalidRequestError: a prompt or a continuation without a token, or the engine gives logits (`logprobs_mode`).
            RequestFailedError: a request failed inside the engine.
            EnginePausedError, EngineDeadError: as for `generate`.
        """
        check_gives_logprobs(self.config)
        pairs = as_pairs(prompts, continuations)
        priorities = priority_each(priority, len(pairs))

        def make(index: int, arrival_s: float) -> Request:
            prompt, continuation = pairs[index]
            return self._intake.scoring_request(prompt, continuation, arrival_s=arrival_s, priority=priorities[index])

        return [score_of(output) for output in self._complete([prompt for prompt, _ in pairs], make, "raise", use_tqdm)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each prompt, in the order of the prompts; what is kept and when it ends is as in transformers.

        Every step of every beam is a request of its own, which finds the pages of its beginning in the prefix cache.

        Args:
            prompts: one or many, as for `generate`.
            params: the width, the length and how answers are ordered.
            use_tqdm: show a progress bar on a terminal.
            concurrency_limit: prompts that are searched at the same time; None: as many as have their beams in one step.
            priority: one for all or one each; lower goes first.

        Raises:
            InvalidRequestError: a prompt that `generate` would refuse, or the width needs more log-probabilities than the engine tells.
            QueueFullError: too much waits already.
            EnginePausedError, EngineDeadError: as for `generate`.
        """
        check_gives_logprobs(self.config, "beam_search")
        check_concurrency(concurrency_limit)
        several = as_prompts(prompts)
        priorities = priority_each(priority, len(several))

        def make(index: int, arrival_s: float) -> Request:
            return self._intake.beam_request(several[index], params, arrival_s=arrival_s, priority=priorities[index])

        with self._turns.turn() as interrupt:
            self._turns.check_takes_requests()
            checked, _ = self._check(several, make, "raise", interrupt)
            scheduler = self._engine.scheduler
            searches = [BeamRequests(request, params, scheduler.most_prompt_tokens) for _, request in checked]
            limit = concurrency_limit or max(1, scheduler.max_num_seqs // params.beam_width)
            bar = progress_bar(len(searches)) if use_tqdm and len(searches) > 1 else None
            run_searches(searches, self._engine, self._turns, limit=limit, interrupt=interrupt, bar=bar)
        return [search.output(self._intake.tokenizer) for search in searches]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt as a vector, in the same order, made of the model's final hidden states (behind the last norm).

        Args:
            prompts: one or many, as for `generate`; one token shorter than the context at most.
            pooling: "mean" over all tokens of the prompt; "last": what its last token has.
            normalize: to a length of 1.
            use_tqdm: show a progress bar on a terminal.
            priority: one for all or one each; lower goes first.

        Raises:
            InvalidRequestError: a prompt that `generate` would refuse, or an unknown pooling.
            RequestFailedError: a request failed inside the engine.
            EnginePausedError, EngineDeadError: as for `generate`.
        """
        check_pooling(pooling, normalize)
        several = as_prompts(prompts)
        priorities = priority_each(priority, len(several))

        def make(index: int, arrival_s: float) -> Request:
            return self._intake.embedding_request(several[index], pooling, arrival_s=arrival_s, priority=priorities[index])

        return [embedding_of(output, normalize=normalize) for output in self._complete(several, make, "raise", use_tqdm)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Answers one conversation or many, laid out by the model's chat template. Without parameters an answer runs to the context's end.

        Args:
            messages: one conversation or many; `sampling_params`, `use_tqdm`, `priority` and `on_error` are as for `generate`.
            add_generation_prompt, continue_final_message: open the assistant's turn, or go on with the last message.
            chat_template_kwargs: what else the template sees.

        Raises:
            ChatTemplateError: the model has no template, or it refuses the messages, by index of the conversation; others as `generate`.
        """
        many = as_conversations(messages)
        if sampling_params is None:
            sampling_params = msgspec.structs.replace(self._intake.default_params, max_tokens=None)

        flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}

        def prompt_of(index: int) -> Prompt:
            return self._intake.chat_prompt(many[index], **flags, variables=chat_template_kwargs)

        return self._generate([()] * len(many), prompt_of, sampling_params, use_tqdm, priority, on_error, "conversation")

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[RequestOutput]:
        """Yields what is new as it comes; closing the generator aborts the request. While the engine is paused, `next` waits.

        Raises:
            InvalidRequestError: a bad prompt or parameter, at the first `next`.
            EnginePausedError: the engine is paused or asleep, at the first `next`.
        """
        params = msgspec.structs.replace(sampling_params or self._intake.default_params, output_kind=RequestOutputKind.DELTA)
        try:
            request = self._intake.request(prompt, params, arrival_s=time.monotonic(), priority=priority)
        except JaxpagedError as error:
            with self._turns.turn():
                self._engine.reject(self._intake.new_id(), error)
            raise
        mail: list[RequestOutput] = []
        try:
            with self._turns.turn():
                self._turns.check_takes_requests()
                self._engine.add(request)
                self._turns.mail[request.request_id] = mail
            while True:
                with self._turns.turn():
                    num_changes, is_stopped = self._turns.num_changes, False
                    if not mail:
                        self._engine.check_alive()
                        is_stopped = not self._engine.has_step
                        if not is_stopped:
                            self._turns.step()
                    outputs, mail[:] = list(mail), []
                if is_stopped:
                    self._turns.wait_for_step(num_changes)
                yield from outputs
                if any(output.finished for output in outputs):
                    return
        finally:
            self._turns.leave(request.request_id)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What unset sampling fields take."""
        return self._intake.default_params

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges so far, by name."""
        return self._metrics.snapshot()

    def close(self) -> None:
        """Gives weights and page pool back; a second call does nothing."""
        with self._turns.change():
            self._engine.close()
            self._close_sinks()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        prompt_of: Callable[[int], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        on_error: str,
        noun: str = "prompt",
    ) -> list[RequestOutput]:
        """The last outputs for the prompts that `prompt_of` gives for their indices; `prompts` as errors show them."""
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is 'raise' or 'return', got {on_error!r:.40}", param="on_error")
        params = one_each(sampling_params, len(prompts))
        priorities = priority_each(priority, len(prompts))

        def make(index: int, arrival_s: float) -> Request:
            own = params[index] or self._intake.default_params
            request = self._intake.request(prompt_of(index), own, arrival_s=arrival_s, priority=priorities[index])
            # Outputs before the last are not looked at, so they are not made.
            final = msgspec.structs.replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY)
            return msgspec.structs.replace(request, params=final)

        return self._complete(prompts, make, on_error, use_tqdm, noun)

    def _complete(
        self, prompts: Sequence[Prompt], make: Callable[[int, float], Request], on_error: str, use_tqdm: bool, noun: str = "prompt"
    ) -> list[RequestOutput]:
        """The last outputs of the requests that `make` gives for an index and a time of arrival."""
        with self._turns.turn() as interrupt:
            self._turns.check_takes_requests()
            requests, outputs = self._admit(prompts, make, on_error, interrupt, noun)
            self._run(requests, outputs, use_tqdm, interrupt)
        return [outputs[index] for index in range(len(prompts))]

    def _admit(
        self, prompts: Sequence[Prompt], make: Callable[[int, float], Request], on_error: str, interrupt: Interrupt, noun: str
    ) -> tuple[dict[str, int], dict[int, RequestOutput]]:
        """Checks every prompt before any is queued; returns request id -> index, and outputs of the refused ones."""
        checked, outputs = self._check(prompts, make, on_error, interrupt, noun)
        added: list[str] = []
        try:
            for _, request in checked:
                self._engine.add(request)
                added.append(request.request_id)
        except JaxpagedError:  # the queue is full: all or none
            for request_id in added:
                self._engine.abort(request_id)
            raise
        return {request.request_id: index for index, request in checked}, outputs

    def _check(
        self, prompts: Sequence[Prompt], make: Callable[[int, float], Request], on_error: str, interrupt: Interrupt, noun: str = "prompt"
    ) -> tuple[list[tuple[int, Request]], dict[int, RequestOutput]]:
        """The requests with their indices, and outputs of the refused ones by index."""
        checked: list[tuple[int, Request]] = []
        outputs: dict[int, RequestOutput] = {}
        now = time.monotonic()
        for index, prompt in enumerate(prompts):
            interrupt.check()
            num_prompt_tokens = 0
            try:
                request = make(index, now)
                num_prompt_tokens = len(request.prompt_token_ids)
                self._engine.scheduler.check_fits(num_prompt_tokens)
                checked.append((index, request))
            except InvalidRequestError as error:
                refused_id = self._intake.new_id()
                self._engine.reject(refused_id, error, num_prompt_tokens=num_prompt_tokens)
                if on_error == "raise":
                    at = f"{noun} {index}: " if len(prompts) > 1 else ""
                    raise type(error)(at + error.message, param=error.param) from error
                outputs[index] = failed_output(refused_id, prompt, error, now)
        return checked, outputs

    def _run(self, requests: dict[str, int], outputs: dict[int, RequestOutput], use_tqdm: bool, interrupt: Interrupt) -> None:
        bar = progress_bar(len(requests)) if use_tqdm and len(requests) > 1 else None
        waiting = dict(requests)
        num_tokens, begun = 0, time.monotonic()
        mail: list[RequestOutput] = []
        self._turns.mail |= dict.fromkeys(requests, mail)
        try:
            while waiting:
                interrupt.check()
                self._turns.step()
                for output in mail:
                    outputs[waiting.pop(output.request_id)] = output
                    num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                if mail and bar is not None:
                    bar(len(requests) - len(waiting), num_tokens / (time.monotonic() - begun))
                mail.clear()
        finally:
            for request_id in requests:
                del self._turns.mail[request_id]
            for request_id in waiting:
                self._engine.abort(request_id)
            if bar is not None:
                bar(None, 0.0)

    def _close_sinks(self) -> None:
        for sink in self._own_sinks:
            sink.close()
