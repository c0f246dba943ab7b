"""Answers from vLLM in this process: the target's own folder, in the target's dtype."""

from typing import Any

from ..errors import EngineError, InputError, one_line
from ..specdec.plain import Answered, Asked
from ..specdec.targets import Target, locate
from .backend_settings import VllmBackend
from .http_json import UnusableError
from .vllm_answers import Wanted, answer_of, sampling_arguments


class LocalVllm:
    """vLLM's engine, stepped here. `longest`: tokens of the longest prompt and answer together; `slots`: at once."""

    def __init__(self, backend: VllmBackend, target: Target, wanted: Wanted, longest: int, slots: int) -> None:
        try:
            import vllm
        except ImportError as error:
            said = f"vLLM cannot be imported here ({one_line(error, 100)}); install it, or give a server's url"
            raise InputError(f"capture.backend: {said}") from None
        source = locate(target.settings)
        if target.settings.adapter is not None or source.gguf_file is not None:
            raise InputError(
                "capture.backend: vLLM in this process takes a plain model folder; merge target.adapter, or serve it"
            )
        self._wanted, self._sampling = wanted, vllm.SamplingParams
        self._asked: dict[str, Asked] = {}
        on_gpu = target.device.type == "cuda"
        self._engine: Any = vllm.LLM(
            model=str(source.folder),
            dtype=str(target.dtype).removeprefix("torch."),
            trust_remote_code=target.settings.trust_remote_code,
            max_model_len=longest,
            max_num_seqs=slots,
            max_logprobs=max(1, wanted.top_k),
            logprobs_mode="raw_logprobs",
            tensor_parallel_size=backend.tensor_parallel or 1,
            generation_config="vllm",
            seed=0,
            **({"gpu_memory_utilization": backend.gpu_memory_share or 0.5} if on_gpu else {"enforce_eager": True}),
        ).llm_engine
        self.about: dict[str, Any] = {"name": "vllm", "version": str(vllm.__version__), "signals": backend.signals}

    def submit(self, asked: Asked) -> None:
        """Ask it. Raises InputError where vLLM refuses."""
        self._asked[asked.name] = asked
        arguments = sampling_arguments(asked.request, self._wanted.top_k)
        prompt = {"prompt_token_ids": asked.request.prompt_ids}
        try:
            self._engine.add_request(asked.name, prompt, self._sampling(**arguments))
        except ValueError as error:
            raise InputError(f"capture.backend: vLLM refuses {asked.name}: {one_line(error)}") from None

    def collect(self) -> list[Answered]:
        """Step until an answer is there. Raises EngineError."""
        found: list[Answered] = []
        while not found:
            if not self._engine.has_unfinished_requests():
                raise EngineError(f"capture.backend: vLLM lost {len(self._asked)} requests")
            found += [self._answer(output) for output in self._engine.step() if output.finished]
        return found

    def close(self) -> None:
        """Forget what was asked, and give the memory back."""
        self._engine.abort_request(list(self._asked))
        self._asked.clear()
        self._engine.engine_core.shutdown()

    def _answer(self, output: Any) -> Answered:
        asked = self._asked.pop(output.request_id)
        (completion,) = output.outputs
        logp = [{token: float(of.logprob) for token, of in one.items()} for one in completion.logprobs]
        try:
            return answer_of(asked, list(completion.token_ids), completion.finish_reason, logp, self._wanted)
        except UnusableError as error:
            raise EngineError(f"capture.backend: vLLM: answer to {asked.name}: {error}") from None
